"""What the command line's words are converted to, and refused for."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable


class OncePerRank(argparse.Action):
    """Collect (rank, value) pairs in a dictionary, and refuse a rank's second one."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        rank, value = values
        collected = dict(getattr(namespace, self.dest))
        if rank in collected:
            raise argparse.ArgumentError(self, f"rank {rank} is given twice")
        setattr(namespace, self.dest, collected | {rank: value})


def whole(lowest: int) -> Callable[[str], int]:
    """Return a converter of whole numbers from ``lowest`` on."""

    def convert(text: str) -> int:
        if not re.fullmatch("-?[0-9]+", text) or int(text) < lowest:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {lowest} on, not {text!r}"
            )
        return int(text)

    return convert


def number(condition: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a converter of finite numbers for which ``holds``; ``condition`` says so in words."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and holds(value)):
            raise argparse.ArgumentTypeError(f"must be a number {condition}, not {text!r}")
        return value

    return convert


not_negative = number("from 0 on", lambda value: value >= 0)


def run_name(text: str) -> str:
    """Convert a run's name: one path component."""
    if text in ("", ".", "..") or "/" in text:
        raise argparse.ArgumentTypeError(f"must be the name of one directory, not {text!r}")
    return text


def slow_rank(text: str) -> tuple[int, float]:
    """Convert "R:FACTOR" to the two numbers."""
    rank, _, factor = text.partition(":")
    try:
        return whole(0)(rank), number("from 1 on", lambda value: value >= 1)(factor)
    except argparse.ArgumentTypeError as error:
        message = f"must be R:FACTOR, a rank and a number from 1 on, not {text!r}"
        raise argparse.ArgumentTypeError(message) from error
