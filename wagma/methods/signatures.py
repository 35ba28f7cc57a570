"""What the constructors of `wagma` say of their arguments, for options of the command line.

Their source is read, not imported, which would load torch and MPI.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from wagma.methods.method import Option, on_or_off

ROOT = Path(__file__).parents[2]  # the folder that `wagma` is in
ARGUMENT = re.compile(r"^    (\w[\w, ]*): (.*(?:\n     .*)*)", re.MULTILINE)
CHOICE = re.compile(r'(?<!=)"([\w-]+)"')  # not in weights="given", which is another argument's


class Lazy(Sequence[Option]):
    """Options that are made when one is first asked for."""

    def __init__(self, make: Callable[[], Iterable[Option]]):
        self._make = make

    @cached_property
    def _made(self) -> tuple[Option, ...]:
        return tuple(self._make())

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]

    def __len__(self) -> int:
        return len(self._made)


@cache
def described(kind: str) -> dict[str, dict[str, Any]]:
    """Return what a constructor says of its keyword arguments, as arguments of `Option`, by name.

    Args:
        kind: the dotted name of the class.
    """
    module, _, name = kind.rpartition(".")
    tree = ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text("utf-8"))
    made = named(named(tree, name), "__init__")
    block = (ast.get_docstring(made) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    texts = {each: text for names, text in ARGUMENT.findall(block) for each in names.split(", ")}
    return {
        each.arg: option(each.annotation, default, " ".join(texts.get(each.arg, "").split()))
        for each, default in zip(made.args.kwonlyargs, made.args.kw_defaults)
    }


def named(scope: Any, name: str) -> Any:
    """Return the class or function of this name in a module or class."""
    return next(each for each in scope.body if getattr(each, "name", None) == name)


def option(annotation: ast.expr | None, default: ast.expr | None, text: str) -> dict[str, Any]:
    """Return what an argument's type, default and description say of an option.

    A `bool` is on or off; the choices of a `str` are in double quotes. The help is the first
    sentence, and those with choices, up to "; None: ", which the default in words follows.
    """
    kind = ast.unparse(annotation).split(" | ")[0] if annotation else ""
    found: dict[str, Any] = {"default": ast.literal_eval(default) if default else None}
    if found["default"] is None:
        text, _, words = text.partition("; None: ")
        found["otherwise"] = sentences(words)[0]
    choices = CHOICE.findall(text) if kind == "str" else []
    first, *others = sentences(text)
    kept = [first, *(each for each in others if choices and CHOICE.search(each))]
    found |= {"help": ". ".join(kept), "choices": tuple(choices)}
    return found | ({"convert": on_or_off} if kind == "bool" else {})


def sentences(text: str) -> list[str]:
    """Return a text's sentences, without periods and marks of code."""
    return text.replace("`", "").removesuffix(".").split(". ")
