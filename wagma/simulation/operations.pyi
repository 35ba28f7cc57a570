from typing import Any

from collectives.memory.layout import Layout
from wagma.simulation.core import Simulation

class Operations:
    layout: Layout
    def __init__(
        self,
        simulation: Simulation,
        layout: Layout,
        nbytes: int,
        first_kind: int,
        sharing: bool = False,
    ) -> None: ...
    def check(self, vector: Any) -> None: ...
    def enter(
        self,
        rank: int,
        operation: int,
        vector: Any,
        weight: float | None,
        calls: int,
        number: int = 0,
    ) -> None: ...
    def ended(self, rank: int) -> bool: ...
    def calls_made(self) -> tuple[int, ...]: ...
    def synchronizations(self, rank: int) -> int: ...
