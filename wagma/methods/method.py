"""What a method of training is to the command, its checks and the documentation.

Importing this module, and methods' own, loads neither torch nor MPI nor numpy: --help does not.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from mpi4py import MPI

    from wagma.optim.interfaces import AveragingOptimizer

__all__ = ["Method", "Option", "load", "on_or_off"]


def on_or_off(text: str) -> bool:
    """Convert what an option that is on or off is written as."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, not {text!r}")
    return text.lower() == "true"


def never(value: Any, ranks: int) -> str | None:
    """Every job can have it."""
    return None


def any_options(options: Mapping[str, Any], ranks: int) -> str | None:
    """Every job can have them together."""
    return None


@dataclass(frozen=True)
class Option:
    """An option of a method, written NAME:option=value, or NAME:option to switch it on.

    Attributes:
        name: the argument of the optimizer's class, and of the simulated method's settings.
        help: what it is, without its default.
        default: its value where it is not given.
        choices: the words that it is one of; () where others are allowed.
        convert: makes its value of a word, or raises `argparse.ArgumentTypeError`.
        metavar: what stands for its value in --help, where there are no choices.
        otherwise: the default in words, where the value does not say it.
        simulated: whether the simulated method has it too.
        problem: says why a job of so many ranks cannot have a value, None where it can.
    """

    name: str
    help: str
    default: Any = None
    choices: tuple[str, ...] = ()
    convert: Callable[[str], Any] = str
    metavar: str = "VALUE"
    otherwise: str = ""
    simulated: bool = True
    problem: Callable[[Any, int], str | None] = never

    @property
    def flag(self) -> str:
        """What a command calls it, where it has it for all methods at once."""
        return "--" + self.name.replace("_", "-")

    @property
    def usage(self) -> str:
        """What can be written: "option=a|b", "option=N" or "option"."""
        if self.convert is on_or_off:
            return self.name
        return f"{self.name}={'|'.join(self.choices) or self.metavar}"

    def words(self) -> list[str]:
        """Return what it can be written as, as far as that is known."""
        if self.convert is on_or_off:
            return [self.name]
        return [f"{self.name}={choice}" for choice in self.choices or ("",)]

    @property
    def help_with_default(self) -> str:
        """What it is, and its default."""
        if self.convert is on_or_off:
            return self.help
        return f"{self.help} (default: {self.otherwise or self.default})"

    def value_of(self, text: str) -> Any:
        """Return the value of a word, or raise `argparse.ArgumentTypeError`."""
        if self.choices and text not in self.choices:
            raise argparse.ArgumentTypeError(f"must be {' or '.join(self.choices)}, not {text!r}")
        return self.convert(text)

    def checked(self, value: Any) -> Any:
        """Return a value that a program gives, or raise ValueError."""
        if value == self.default:
            return value
        try:
            return self.value_of(str(value))
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{self.name} {error}") from None


@dataclass(frozen=True)
class Method:
    """A method of training, declared once: everything that lists methods reads it here.

    Attributes:
        name: what the command line calls it.
        help: what it averages, with whom, in one line.
        optimizer: the dotted name of the optimizer's class.
        simulated: the dotted name of what returns its `wagma.simulation.core.Method`, from
            `wagma.simulation.Settings` and the number of ranks.
        options: those that it takes.
        color: of its curves in plots.
        seeded: whether it draws something, and the class takes the job's seed.
        conflict: says why a job of so many ranks cannot have these options together, where each
            alone has no problem; None where it can.
    """

    name: str
    help: str
    optimizer: str
    simulated: str
    options: tuple[Option, ...] = ()
    color: str = "#999999"
    seeded: bool = False
    conflict: Callable[[Mapping[str, Any], int], str | None] = any_options

    def option(self, name: str) -> Option | None:
        """Return its option of this name, None where it has none."""
        return next((option for option in self.options if option.name == name), None)

    def given(self, words: Iterable[str]) -> dict[str, Any]:
        """Return the values of options that are written as "option=value" or "option".

        Raises:
            argparse.ArgumentTypeError: it has no such option, or not with this value.
        """
        values = {}
        for word in words:
            name, sign, text = word.partition("=")
            option = self.option(name.replace("-", "_"))
            if option is None:
                names = ", ".join(each.name for each in self.options) or "none"
                raise argparse.ArgumentTypeError(
                    f"{self.name} has no option {name!r}: it has {names}"
                )
            if option.name in values:
                raise argparse.ArgumentTypeError(f"{option.name} is given twice")
            if not sign and option.convert is not on_or_off:
                raise argparse.ArgumentTypeError(f"{option.name} needs a value: {option.usage}")
            try:
                values[option.name] = option.value_of(text if sign else "true")
            except argparse.ArgumentTypeError as error:
                raise argparse.ArgumentTypeError(f"{option.name} {error}") from None
        return values

    def resolved(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return all its options: these values of them, and the defaults of the others."""
        return {option.name: values.get(option.name, option.default) for option in self.options}

    def problem(self, options: Mapping[str, Any], ranks: int) -> str | None:
        """Return why a job of so many ranks cannot have these options; None: it can."""
        found = (option.problem(options[option.name], ranks) for option in self.options)
        return next(filter(None, found), None) or self.conflict(options, ranks)

    def idle_rank(self, options: Mapping[str, Any]) -> int | None:
        """Return the rank that makes no steps with these options; None: all make some."""
        return options["controller_rank"] if options.get("controller_only") else None

    def make(
        self,
        local: torch.optim.Optimizer,
        model: torch.nn.Module,
        comm: MPI.Comm,
        options: Mapping[str, Any],
        seed: int,
    ) -> AveragingOptimizer:
        """Make its optimizer around a local one; collective."""
        seeded = {"seed": seed} if self.seeded else {}
        return load(self.optimizer)(local, model, comm=comm, **options, **seeded)

    def bound(self, seconds: np.ndarray, options: Mapping[str, Any]) -> float:
        """Return the seconds that a job would take if communication were free.

        Args:
            seconds: float64 array of shape (ranks, steps): how long every rank's steps take.
            options: its own, as `resolved` returns them, or those that its optimizer has chosen.
        """
        return self._simulate_free(seconds, options, None).wall

    def bound_of_steps(self, seconds: np.ndarray, options: Mapping[str, Any], limit: float) -> int:
        """Return how many steps all ranks would make in so many seconds, as `bound` does."""
        return int(self._simulate_free(seconds, options, limit).made.sum())

    def _simulate_free(self, seconds, options, limit):
        from wagma.simulation import FREE, Settings, simulate  # not at the top: it loads numpy

        known = {name: options[name] for name in self.simulated_options if name in options}
        return simulate(self, seconds.T, FREE, Settings(1, **known), limit)

    @property
    def simulated_options(self) -> list[str]:
        """The names of the options that its simulation has."""
        return [option.name for option in self.options if option.simulated]


def load(name: str) -> Any:
    """Return what a dotted name stands for."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
