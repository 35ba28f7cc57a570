"""``python -m wagma.methods`` prints the documentation's table of methods and their options."""

from __future__ import annotations

from typing import Any

from wagma.methods import METHODS, REFERENCES
from wagma.methods.declarations import SHARED
from wagma.methods.method import Option, on_or_off


def table() -> str:
    """Return Markdown: a line for each method, followed by lines for its own options."""
    lines = ["| `--algorithm` | what it is | default |", "| --- | --- | --- |"]
    for name, method in (METHODS | REFERENCES).items():
        shared = ", ".join(f"`{option.flag}`" for option in method.options if option in SHARED)
        lines.append(f"| `{name}` | {method.help}{shared and f'; takes {shared}'} | |")
        for option in method.options:
            if option not in SHARED:
                usage = option.usage.replace("|", "\\|")
                lines.append(f"| `{name}:{usage}` | {option.help} | {default_of(option)} |")
    for option in SHARED:
        value = "\\|".join(option.choices) or option.metavar
        usage = option.flag if option.convert is on_or_off else f"{option.flag} {value}"
        lines.append(f"| `{usage}` | {option.help} | {default_of(option)} |")
    return "\n".join(lines)


def default_of(option: Option) -> Any:
    """Return an option's default in words."""
    return "off" if option.convert is on_or_off else option.otherwise or option.default


if __name__ == "__main__":
    print(table())
