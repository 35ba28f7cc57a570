"""The parser of the command line: only rank 0 of a job prints, and errors take one line."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from wagma import job, methods, progress

EXIT_STATUSES = "exit status:\n" + "".join(
    f"  {status:<3}  {meaning}\n" for status, meaning in job.EXIT_STATUSES.items()
)


def help_formatter() -> type[argparse.HelpFormatter]:
    """Return the formatter of help: with color on a terminal if rich-argparse is installed."""
    output = progress.terminal()
    if output is None or importlib.util.find_spec("rich_argparse") is None:
        return argparse.RawDescriptionHelpFormatter
    from rich.console import Console
    from rich_argparse import RawDescriptionRichHelpFormatter

    class Colored(RawDescriptionRichHelpFormatter):
        group_name_formatter = str
        help_markup = text_markup = False
        highlights = [
            *RawDescriptionRichHelpFormatter.highlights,
            r"(?m)^(?P<groups>[a-z ]+:)$",
            r"(?m)^  (?P<syntax>(mpiexec|srun|wagma) .*)$",
        ]

        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, console=Console(file=output), **options)

    return Colored


class Parser(argparse.ArgumentParser):
    """A parser that prints on the job's rank 0 only, and errors in one line."""

    def __init__(self, description: str, **options) -> None:
        super().__init__(
            allow_abbrev=False,
            description=textwrap.fill(description, 79),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )

    def format_help(self) -> str:
        self.formatter_class = help_formatter()  # not sooner: it may load rich
        return super().format_help()

    def parse_args(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        settings, unknown = self.parse_known_args(arguments)
        if unknown:
            settings.parser.refuse(unknown)
        return settings

    def refuse(self, unknown: list[str]) -> NoReturn:
        """Exit with the unknown arguments and the most similar option."""
        known = {
            option.lstrip("-"): option for each in self._actions for option in each.option_strings
        }
        words = [word.partition("=")[0].lstrip("-") for word in unknown if word.startswith("-")]
        chooses = known.get("algorithm") or known.get("algorithms")
        for word in words:
            written = methods.example(word.replace("-", "_"))
            if chooses and written and word.replace("_", "-") not in known:
                self.error(f"argument --{word}: belongs to an algorithm: write {chooses} {written}")
        nearest = [match for word in words for match in difflib.get_close_matches(word, known, n=1)]
        meant = "".join(f", did you mean {known[match]}?" for match in nearest[:1])
        self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")

    def error(self, message: str) -> NoReturn:
        job.let_rank_0_speak()
        self.exit(job.USAGE, f"wagma: error: {message} (see {self.prog} --help)\n")

    def _print_message(self, message, file=None) -> None:
        if job.launcher_rank() == 0:
            super()._print_message(message, file)
