from collections.abc import Mapping, Sequence
from typing import Protocol, type_check_only

import numpy as np
import numpy.typing as npt

from wagma.simulation.machine import Machine

@type_check_only
class Applications(Protocol):
    def computed(self, rank: int) -> None: ...
    def returned(self, rank: int) -> None: ...

class Method:
    simulation: Simulation
    staleness: npt.NDArray[np.int64]
    calls: int
    timely: int
    updates: int
    servers: int
    def begin(self) -> None: ...
    def arrives(self, rank: int) -> None: ...
    def happens(self, kind: int, rank: int, a: int, b: int) -> None: ...

class Simulation:
    method: Method
    machine: Machine
    now: float
    ranks: int
    engines: int
    iterations: int
    made: npt.NDArray[np.int64]
    reached: npt.NDArray[np.int64]
    waited: npt.NDArray[np.float64]
    ended: npt.NDArray[np.float64]
    events: int
    messages: int
    def __init__(
        self,
        method: Method,
        machine: Machine,
        step_times: npt.NDArray[np.float64],
        seconds: float | None = None,
        applications: Applications | None = None,
        absolute: bool = False,
    ) -> None: ...
    def run(self) -> None: ...
    def later(self, delay: float, kind: int, rank: int, a: int = 0, b: int = 0) -> None: ...
    def send(
        self, source: int, destination: int, nbytes: int, kind: int, a: int = 0, b: int = 0
    ) -> None: ...
    def returns(self, rank: int, delay: float = 0.0, iterations: int = 1) -> None: ...
    def call(self, rank: int) -> None: ...
    def enter(self, rank: int) -> None: ...
    def compute(self, rank: int) -> None: ...
    def finish(self, rank: int) -> None: ...

def allreduce_time(machine: Machine, size: int, nbytes: int, doubling: bool = False) -> float: ...
def placed_allreduce_time(
    machine: Machine,
    nodes: Sequence[int],
    nbytes: int,
    doubling: bool = False,
    sharing: Mapping[int, int] | None = None,
) -> float: ...
def mpi_allreduce_time(machine: Machine, size: int, nbytes: int) -> float: ...
