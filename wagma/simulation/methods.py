"""The methods that can be simulated, by the names that the command line has for them.

A method adds itself to `METHODS`: what makes its `core.Method` from the settings of a job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from collectives.protocols.parameter_server import MODES
from collectives.topology import default_group_size
from wagma.simulation import peers
from wagma.simulation.core import Method, mpi_allreduce_time
from wagma.simulation.wait_avoiding import GroupAveraging

__all__ = ["METHODS", "Settings", "Synchronous"]


@dataclass(frozen=True)
class Settings:
    """What a method may need to know of a job.

    Attributes:
        nbytes: length of the model, and of its gradient, in bytes.
        group_size: S; the paper's choice for the number of ranks where it is None.
        sync_period: τ.
        wait: whom a group average waits for, "nobody" or the "group".
        doubling: whether group averages go by recursive doubling, whatever the model's length.
        clock: whom D-PSGD's ranks wait for, their "neighbors" on the ring, or all ("global").
        neighbors: how many ranks each of SGP's sends to in a step.
        mode, backups: of `collectives.ParameterServer`.
        seed: of the neighbors that AD-PSGD draws.
        groups: whether they are "changing" with every version, or "fixed".
    """

    nbytes: int
    group_size: int | None = None
    sync_period: int = 10
    wait: str = "nobody"
    doubling: bool = False
    clock: str = "neighbors"
    neighbors: int = 1
    mode: str = "bsp"
    backups: int = 0
    seed: int = 0
    groups: str = "changing"

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.sync_period < 1:
            raise ValueError(
                f"nbytes and sync_period must be 1 or more, not {self.nbytes}, {self.sync_period}"
            )
        if self.neighbors < 1 or self.backups < 0:
            raise ValueError(
                "neighbors must be 1 or more, and backups 0 or more, "
                f"not {self.neighbors}, {self.backups}"
            )
        for name, known in (
            ("wait", ("nobody", "group")),
            ("groups", ("changing", "fixed")),
            ("clock", ("neighbors", "global")),
            ("mode", tuple(MODES)),
        ):
            if getattr(self, name) not in known:
                names = " or ".join(f'"{each}"' for each in known)
                raise ValueError(f"{name} must be {names}, not {getattr(self, name)!r}")


class Synchronous(Method):
    """All ranks average with MPI_Allreduce every `period` steps, and wait for each other.

    Allreduce-SGD is this with a period of 1, local SGD with one of τ.
    """

    def __init__(self, period: int, nbytes: int):
        self.period, self.nbytes = period, nbytes
        self.arrived = 0

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
            for each in range(self.simulation.ranks):
                self.simulation.returns(each, self.average_time)


def wagma(settings: Settings, ranks: int) -> Method:
    """Return WAGMA-SGD's ranks."""
    size = default_group_size(ranks) if settings.group_size is None else settings.group_size
    return GroupAveraging(
        size,
        settings.sync_period,
        settings.nbytes,
        settings.wait,
        settings.doubling,
        fixed=settings.groups == "fixed",
    )


def eager_sgd(trigger: str) -> Callable[[Settings, int], Method]:
    """Return what makes eager-SGD's ranks: all are one group, and every τ steps models follow."""
    return lambda settings, ranks: GroupAveraging(
        ranks,
        settings.sync_period,
        settings.nbytes,
        doubling=settings.doubling,
        drawing=trigger == "majority",
        synchronous_averages=2,
    )


METHODS: dict[str, Callable[[Settings, int], Method]] = {
    "wagma": wagma,
    "allreduce": lambda settings, ranks: Synchronous(1, settings.nbytes),
    "eager-sgd-solo": eager_sgd("solo"),
    "eager-sgd-majority": eager_sgd("majority"),
    "local-sgd": lambda settings, ranks: Synchronous(settings.sync_period, settings.nbytes),
    "d-psgd": peers.d_psgd,
    "sgp": peers.sgp,
    "ad-psgd": peers.ad_psgd,
    "parameter-server": peers.parameter_server,
}
