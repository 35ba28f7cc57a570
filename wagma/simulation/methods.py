"""The simulations of the methods that `wagma.methods` declares, and the settings of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collectives.settings import DEFAULT_LATE
from collectives.topology import default_group_size
from wagma.methods import METHODS, Option
from wagma.simulation.core import Method, mpi_allreduce_time
from wagma.simulation.triggered_average import TriggeredAveraging
from wagma.simulation.wait_avoiding import GroupAveraging

__all__ = ["Settings", "Synchronous", "allreduce", "eager_sgd", "local_sgd", "wagma"]


class Settings:
    """The settings of a simulated job.

    Args:
        nbytes: length of the model, and of its gradient, in bytes.
        doubling: whether group averages use recursive doubling for models of any length.
        seed: seed of the neighbors that AD-PSGD draws.
        accumulate: batches of a step, of which allreduce's compute_limit may leave some out.
        dedicated_server: whether a parameter server is a process of its own on a further node; else
            rank 0, which trains as well, is the server.
        options: options of methods, as declared, such as group_size, sync_period or mode.

    Its attributes are these, and every other option of a simulated method with its default; None if
    the methods' defaults differ.

    Raises:
        TypeError: no simulated method has such an option.
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        doubling: bool = False,
        seed: int = 0,
        accumulate: int = 1,
        dedicated_server: bool = False,
        **options: Any,
    ):
        if nbytes < 1:
            raise ValueError(f"nbytes must be 1 or more, not {nbytes}")
        self.nbytes, self.doubling, self.seed = nbytes, doubling, seed
        self.accumulate, self.dedicated_server = accumulate, dedicated_server
        known = simulated_options()
        for name, value in options.items():
            if name not in known:
                raise TypeError(f"no simulated method has an option {name!r}")
            check_option(known[name], value)
        vars(self).update({name: default_of(known[name]) for name in known} | options)

    if TYPE_CHECKING:  # options are attributes, too

        def __getattr__(self, name: str) -> Any: ...

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"Settings({values})"


def simulated_options() -> dict[str, set[Option]]:
    """Return the options that simulated methods have, by name: methods may have different ones."""
    found: dict[str, set[Option]] = {}
    for method in METHODS.values():
        for option in method.options:
            if option.simulated:
                found.setdefault(option.name, set()).add(option)
    return found


def check_option(options: set[Option], value: Any) -> None:
    """Raise ValueError if none of the options of a name accepts this value."""
    errors = []
    for option in options:
        try:
            option.checked(value)
        except ValueError as error:
            errors.append(str(error))
    if len(errors) == len(options):
        raise ValueError("; ".join(sorted(errors)))


def default_of(options: set[Option]) -> Any:
    """Return the default of the options of a name, None if they have different ones."""
    defaults = {option.default for option in options}
    return defaults.pop() if len(defaults) == 1 else None


class Synchronous(Method):
    """All ranks average with MPI_Allreduce every `period` steps, and wait for each other.

    Allreduce-SGD has a period of 1, local SGD one of τ.
    """

    def __init__(self, period: int, nbytes: int):
        self.period, self.nbytes = period, nbytes
        self.arrived = self.updates = 0

    def begin(self) -> None:
        ranks, machine = self.simulation.ranks, self.simulation.machine
        self.steps = [0] * ranks
        self.average_time = mpi_allreduce_time(machine, ranks, self.nbytes)
        self.average_time += 2 * self.nbytes / machine.staging

    def arrives(self, rank: int) -> None:
        self.steps[rank] += 1
        if self.steps[rank] % self.period:
            self.simulation.returns(rank)
            return
        self.arrived += 1
        if self.arrived == self.simulation.ranks:
            self.arrived = 0
            self.updates += 1
            for each in range(self.simulation.ranks):
                self.simulation.returns(each, self.average_time)


def wagma(settings: Settings, ranks: int) -> Method:
    """Return WAGMA-SGD's ranks."""
    if settings.groups not in (None, "changing", "fixed"):
        raise ValueError(f"groups is {settings.groups!r}, not one of changing, fixed")
    size = default_group_size(ranks) if settings.group_size is None else settings.group_size
    return GroupAveraging(
        size,
        settings.sync_period,
        settings.nbytes,
        settings.wait,
        settings.doubling,
        fixed=settings.groups == "fixed",
        own_pace=settings.pace == "own",
        overlap=settings.overlap,
        late=settings.late or DEFAULT_LATE,
    )


def eager_sgd(settings: Settings, ranks: int) -> Method:
    """Return eager-SGD's ranks: all are one group, and every τ steps models are averaged, too."""
    return GroupAveraging(
        ranks,
        settings.sync_period,
        settings.nbytes,
        doubling=settings.doubling,
        drawing=settings.trigger == "majority",
        synchronous_averages=2,
    )


def allreduce(settings: Settings, ranks: int) -> Method:
    """Return Allreduce-SGD's ranks."""
    return Synchronous(1, settings.nbytes)


def local_sgd(settings: Settings, ranks: int) -> Method:
    """Return local SGD's ranks."""
    if settings.trigger not in (None, "count", "solo"):
        raise ValueError(f"trigger is {settings.trigger!r}, not one of count, solo")
    kind = TriggeredAveraging if settings.trigger == "solo" else Synchronous
    return kind(settings.sync_period, settings.nbytes)
