from collections.abc import Callable
from typing import Any

from collectives.memory.layout import Layout
from wagma.simulation.core import Method

class FormedGroupMethod(Method):
    most: int
    log: list[tuple[int, ...]] | None
    times: list[float]
    operations: Any
    def __init__(
        self,
        make: Callable[..., Any] | None,
        nbytes: int,
        sync_every: int = 1,
        layout: Layout | None = None,
        sharing: bool = False,
    ) -> None: ...
    def protocol(self, rank: int) -> Any: ...
    def port(self, rank: int) -> Any: ...
