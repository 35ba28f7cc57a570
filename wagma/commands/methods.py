"""Options that select methods and set their options: "NAME:option=value:option"."""

from __future__ import annotations

import argparse
import itertools
import textwrap
from collections.abc import Callable, Collection, Mapping
from typing import Any

from wagma.arguments import one_of, separated
from wagma.methods import Choice, Method
from wagma.methods.declarations import SHARED
from wagma.methods.method import on_or_off

# Names of `wagma simulate` that have become options.
RENAMED = {"eager-sgd-solo": "eager-sgd", "eager-sgd-majority": "eager-sgd:trigger=majority"}
WIDTH = 59  # characters of help next to a method's name


def chosen(methods: Mapping[str, Method]) -> Callable[[str], Choice]:
    """Return a converter of "NAME:option=value:option" for these methods."""

    def convert(text: str) -> Choice:
        name, *words = text.split(":")
        if name in RENAMED:
            raise argparse.ArgumentTypeError(f"no algorithm {name}: write {RENAMED[name]}")
        method = methods[one_of(methods)(name)]
        try:
            return Choice(text, method, method.given(words))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{text}: {error}") from None

    return convert


def all_chosen(methods: Mapping[str, Method]) -> Callable[[str], list[Choice]]:
    """Return a converter of several such texts, separated by commas, none of them twice."""
    return lambda text: [chosen(methods)(label) for label in separated(str)(text)]


def add_shared_options(group, simulated: bool = False) -> None:
    """Add the options that several methods share, each for all methods that take it."""
    for option in SHARED:
        if simulated and not option.simulated:
            continue
        if option.convert is on_or_off:
            words = {"action": "store_const", "const": True}
        elif option.choices:
            words = {"choices": option.choices}
        else:
            words = {"type": option.convert, "metavar": option.metavar}
        group.add_argument(option.flag, help=option.help_with_default, **words)


def resolve(
    settings: argparse.Namespace, choices: Collection[Choice], refusal: str
) -> list[Choice]:
    """Return the choices with all options: their own, the shared ones, and the defaults.

    The shared options are removed from the settings. If none of the methods takes one that was
    given, it is refused with the message ``refusal``.
    """
    common = {}
    for option in SHARED:
        if hasattr(settings, option.name):
            value = getattr(settings, option.name)
            delattr(settings, option.name)
            if value is not None:
                common[option.name] = value
                if not any(each.method.option(option.name) for each in choices):
                    settings.parser.error(f"argument {option.flag}: {refusal}")
    return [each.resolved(common) for each in choices]


def listed(methods: Mapping[str, Method], simulated: bool = False) -> str:
    """Return lines that describe each method and its options."""
    lines = []
    for name, method in methods.items():
        options = [each for each in method.options if each.simulated or not simulated]
        shared = ", ".join(each.flag for each in options if each in SHARED)
        texts = [method.help, *([f"takes {shared}"] if shared else [])]
        wrapped = [line for text in texts for line in wrap(text, WIDTH)]
        for option in options:
            if option not in SHARED:
                described = wrap(option.help_with_default, WIDTH - 4)
                wrapped += [f":{option.usage}", *(f"    {line}" for line in described)]
        starts = itertools.chain([name], itertools.repeat(""))
        lines += [f"  {start:<18}{line}\n" for start, line in zip(starts, wrapped)]
    return "".join(lines)


def wrap(text: str, width: int) -> list[str]:
    """Return the text in lines, without breaking words."""
    return textwrap.wrap(text, width, break_on_hyphens=False)


def completer(methods: Mapping[str, Method], several: bool) -> Callable[..., list[str]]:
    """Return a function that completes "NAME:option=value", for argcomplete."""

    def complete(prefix: str, **_: Any) -> list[str]:
        before, comma, last = prefix.rpartition(",") if several else ("", "", prefix)
        name, *words = last.split(":")
        if not words:
            return [f"{before}{comma}{each}" for each in methods]
        if name not in methods:
            return []
        start = f"{before}{comma}{':'.join([name, *words[:-1]])}:"
        given = {word.partition("=")[0].replace("-", "_") for word in words[:-1]}
        options = [each for each in methods[name].options if each.name not in given]
        ends = [end for each in options for end in each.words()]
        return [start + end for end in ends]

    return complete
