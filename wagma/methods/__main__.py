"""``python -m wagma.methods`` prints the documentation's table of methods and their options."""

from __future__ import annotations

from wagma.methods import METHODS, REFERENCES
from wagma.methods.method import on_or_off
from wagma.methods.shared import SHARED


def table() -> str:
    """Return Markdown: a line for each method, followed by those of its own options."""
    lines = ["| `--algorithm` | what it is | default |", "| --- | --- | --- |"]
    for name, method in (METHODS | REFERENCES).items():
        shared = ", ".join(f"`{option.flag}`" for option in method.options if option in SHARED)
        lines.append(f"| `{name}` | {method.help}{shared and f'; takes {shared}'} | |")
        for option in method.options:
            if option not in SHARED:
                usage = option.usage.replace("|", "\\|")
                default = (
                    "off" if option.convert is on_or_off else option.otherwise or option.default
                )
                lines.append(f"| `{name}:{usage}` | {option.help} | {default} |")
    for option in SHARED:
        usage = "\\|".join(option.choices) or option.metavar
        lines.append(
            f"| `{option.flag} {usage}` | {option.help} | {option.otherwise or option.default} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
