"""Converters of the command line's values, which also check them."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


class Once(argparse.Action):
    """Collect (key, value) pairs in a dictionary, in which no key may repeat."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        key, value = values
        collected = dict(getattr(namespace, self.dest))
        if key in collected:
            what = f"rank {key}" if isinstance(key, int) else key
            raise argparse.ArgumentError(self, f"{what} is given twice")
        setattr(namespace, self.dest, collected | {key: value})


def whole(lowest: int) -> Callable[[str], int]:
    """Return a converter of integers of at least ``lowest``."""

    def convert(text: str) -> int:
        if not re.fullmatch("-?[0-9]+", text) or int(text) < lowest:
            raise argparse.ArgumentTypeError(
                f"must be an integer of at least {lowest}, not {text!r}"
            )
        return int(text)

    return convert


def number(condition: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a converter of finite numbers for which ``holds``; ``condition`` describes them."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and holds(value)):
            raise argparse.ArgumentTypeError(f"must be a number {condition}, not {text!r}")
        return value

    return convert


not_negative = number("of at least 0", lambda value: value >= 0)
positive = number("above 0", lambda value: value > 0)


def run_name(text: str) -> str:
    """Convert a run's name: one path component."""
    if text in ("", ".", "..") or "/" in text:
        raise argparse.ArgumentTypeError(f"must be the name of one directory, not {text!r}")
    return text


def slow_rank(text: str) -> tuple[int, float]:
    """Convert "R:FACTOR" to the two numbers."""
    rank, _, factor = text.partition(":")
    try:
        return whole(0)(rank), number("of at least 1", lambda value: value >= 1)(factor)
    except argparse.ArgumentTypeError as error:
        message = f"must be R:FACTOR, a rank and a number of at least 1, not {text!r}"
        raise argparse.ArgumentTypeError(message) from error


def separated(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a converter of values separated by commas, none of them twice."""

    def convert_all(text: str) -> list[Any]:
        values = [convert(part.strip()) for part in text.split(",")]
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"repeats a value: {text!r}")
        return values

    return convert_all


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """Return a converter of one of these names."""

    def convert(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(names)}, not {text!r}")
        return text

    return convert


def assignment(names: Collection[str]) -> Callable[[str], tuple[str, float]]:
    """Return a converter of "NAME=VALUE", for one of these names and a number of at least 0."""

    def convert(text: str) -> tuple[str, float]:
        name, _, text = text.partition("=")
        value = not_negative(text)
        return one_of(names)(name), int(value) if value.is_integer() else value

    return convert


@dataclass(frozen=True)
class Every:
    """How often something is done: after so many steps, or seconds; neither: never.

    Attributes:
        steps: of a rank.
        seconds: since the last time.
    """

    steps: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.seconds:g}s" if self.steps is None else str(self.steps)


def every(text: str) -> Every:
    """Convert a number of steps, or of seconds, minutes or hours with the unit."""
    if text.isdigit():
        return Every(steps=whole(1)(text))
    return Every(seconds=duration(text))


def duration(text: str) -> float:
    """Convert seconds, or minutes or hours with the unit, to seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([smh]?)", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(
            f"must be a number above 0, with s, m or h for its unit, not {text!r}"
        )
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
