"""How a training method is declared, for the command line, its checks and the documentation.

Importing this module, or a method's, loads neither torch nor MPI nor numpy, for a fast --help.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from mpi4py import MPI

    from wagma.optim.interfaces import Averager
    from wagma.simulation import Result

__all__ = ["Choice", "Method", "Option", "load", "on_or_off"]


def on_or_off(text: str) -> bool:
    """Convert the text of a Boolean option."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, not {text!r}")
    return text.lower() == "true"


def never(value: Any, ranks: int) -> str | None:
    """Accept any value."""
    return None


def any_options(options: Mapping[str, Any], ranks: int) -> str | None:
    """Accept any combination, of which all have an effect."""
    return None


@dataclass(frozen=True)
class Option:
    """An option of a method, written NAME:option=value, or NAME:option to switch it on.

    Attributes:
        name: the averager's keyword argument, and a name in the simulated method's settings.
        help: its description, without the default.
        default: its value if it is not given.
        choices: its allowed values; () if others are allowed.
        convert: converts text to a value, or raises `argparse.ArgumentTypeError`.
        metavar: the placeholder of its value in --help, if it has no choices.
        otherwise: the default in words, if its value does not say enough.
        simulated: whether the simulated method takes it as well.
        problem: returns why a value is invalid for a number of ranks, None if it is valid.
        switch: whether its name alone stands for "true", which other values exclude.
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
    switch: bool = False

    @property
    def flag(self) -> str:
        """The command-line option that sets it for all methods at once."""
        return "--" + self.name.replace("_", "-")

    @property
    def usage(self) -> str:
        """How it is written: "option=a|b", "option=N" or "option"."""
        if self.convert is on_or_off:
            return self.name
        if self.switch:
            return f"{self.name}[={self.metavar}]"
        return f"{self.name}={'|'.join(self.choices) or self.metavar}"

    def words(self) -> list[str]:
        """Return the known ways to write it, for completion."""
        if self.convert is on_or_off:
            return [self.name]
        if self.switch:
            return [self.name, f"{self.name}="]
        return [f"{self.name}={choice}" for choice in self.choices or ("",)]

    @property
    def help_with_default(self) -> str:
        """Its description and its default."""
        if self.convert is on_or_off:
            return self.help
        return f"{self.help} (default: {self.otherwise or self.default})"

    def value_of(self, text: str) -> Any:
        """Return the value of `text`.

        Raises:
            argparse.ArgumentTypeError: it is invalid.
        """
        if self.choices and text not in self.choices:
            raise argparse.ArgumentTypeError(f"must be {' or '.join(self.choices)}, not {text!r}")
        return self.convert(text)

    def checked(self, value: Any) -> Any:
        """Return `value`, given in Python, converted.

        Raises:
            ValueError: it is invalid.
        """
        if value == self.default:
            return value
        text = "+".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        try:
            return self.value_of(text)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{self.name} {error}") from None


@dataclass(frozen=True)
class Method:
    """A training method, declared once: all lists of methods are made from these declarations.

    Attributes:
        name: its name on the command line.
        help: what it averages and with which ranks, in one line.
        averager: the dotted name of the averager's class.
        simulated: the dotted name of a function that returns its `wagma.simulation.core.Method`
            for `wagma.simulation.Settings` and a number of ranks.
        options: its options.
        color: the color of its curves in plots.
        seeded: whether the averager's class takes the job's seed.
        combination: checks options that are valid alone, for a number of ranks: raises ValueError
            if they are invalid together, and returns why one has no effect, None if all have.
    """

    name: str
    help: str
    averager: str
    simulated: str
    options: Sequence[Option] = ()
    color: str = "#999999"
    seeded: bool = False
    combination: Callable[[Mapping[str, Any], int], str | None] = any_options

    def option(self, name: str) -> Option | None:
        """Return its option of this name, None if it has none."""
        return next((option for option in self.options if option.name == name), None)

    def given(self, words: Iterable[str]) -> dict[str, Any]:
        """Return the values of options by name, from `words` such as "option=value" or "option".

        Raises:
            argparse.ArgumentTypeError: it has no such option, or the value is invalid.
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
            if not (sign or option.switch or option.convert is on_or_off):
                raise argparse.ArgumentTypeError(f"{option.name} needs a value: {option.usage}")
            try:
                values[option.name] = option.value_of(text if sign else "true")
            except argparse.ArgumentTypeError as error:
                raise argparse.ArgumentTypeError(f"{option.name} {error}") from None
        return values

    def resolved(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return all its options: `values` of some by name, and the defaults of the others."""
        return {option.name: values.get(option.name, option.default) for option in self.options}

    def check(self, options: Mapping[str, Any], ranks: int) -> str | None:
        """Return why one of these `options` has no effect; None: all have.

        Raises:
            ValueError: a job of so many `ranks` cannot have them.
        """
        for option in self.options:
            problem = option.problem(options[option.name], ranks)
            if problem:
                raise ValueError(problem)
        return self.combination(options, ranks)

    def problem(self, options: Mapping[str, Any], ranks: int) -> str | None:
        """Return why a job of so many `ranks` cannot have these `options`; None: it can."""
        try:
            self.check(options, ranks)
        except ValueError as error:
            return str(error)
        return None

    def idle_rank(self, options: Mapping[str, Any]) -> int | None:
        """Return the rank that makes no steps with these `options`; None: all make some."""
        return options["controller_rank"] if options.get("controller_only") else None

    def first_rank(self, options: Mapping[str, Any]) -> int:
        """Return the first rank that makes steps with these `options`, which shows the progress."""
        return 1 if self.idle_rank(options) == 0 else 0

    def make(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: MPI.Intracomm,
        options: Mapping[str, Any],
        seed: int,
        survive: Any = False,
    ) -> Averager:
        """Make its averager beside an optimizer; collective.

        Args:
            model: the model to train.
            optimizer: that of a rank's own steps.
            comm: mpi4py intracommunicator of the ranks that train together.
            options: by name, as `resolved` returns them.
            seed: seed of the method's random draws, the same on all ranks.
            survive: as `wagma.optim.WAGMA` takes it.

        Returns:
            The averager, which the caller closes.
        """
        more = {"seed": seed} if self.seeded else {}
        if survive:
            more["survive"] = survive
        return load(self.averager)(model, optimizer, comm=comm, **options, **more)

    def bound(self, seconds: np.ndarray, options: Mapping[str, Any]) -> float:
        """Return the seconds that a job would take if communication were free.

        Args:
            seconds: float64 array of shape (ranks, steps): seconds of every rank's steps.
            options: its options, as `resolved` returns them, or its averager's `settings`.
        """
        return self._simulate_free(seconds, options, None).wall

    def bound_of_steps(self, seconds: np.ndarray, options: Mapping[str, Any], limit: float) -> int:
        """Return how many steps all ranks would make in `limit` seconds with free communication.

        Args:
            seconds, options: those of `bound`.
        """
        return int(self._simulate_free(seconds, options, limit).made.sum())

    def _simulate_free(
        self, seconds: np.ndarray, options: Mapping[str, Any], limit: float | None
    ) -> Result:
        from wagma.simulation import FREE, Settings, simulate  # not at the top: it loads numpy

        known = {name: options[name] for name in self.simulated_options if name in options}
        return simulate(self, seconds.T, FREE, Settings(1, **known), limit)

    @property
    def simulated_options(self) -> list[str]:
        """The names of the options that its simulation has."""
        return [option.name for option in self.options if option.simulated]


@dataclass(frozen=True)
class Choice:
    """A method with options, as the command line chooses it.

    Attributes:
        label: the text that chose it: the method's name, and after colons its options.
        method: the method.
        options: the values by name: those in the label, or all once it is `resolved`.
    """

    label: str
    method: Method
    options: dict[str, Any]

    def resolved(self, common: Mapping[str, Any]) -> Choice:
        """Return it with all options: its own, else those in `common`, else the defaults."""
        return replace(self, options=self.method.resolved({**common, **self.options}))


def load(name: str) -> Any:
    """Return the object that a dotted name refers to."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
