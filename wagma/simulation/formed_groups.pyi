from collections.abc import Callable
from typing import Any

from wagma.simulation.core import Method

class FormedGroupMethod(Method):
    most: int
    log: list[tuple[int, ...]] | None
    times: list[float]
    def __init__(self, make: Callable[..., Any], nbytes: int, sync_every: int = 1) -> None: ...
    def protocol(self, rank: int) -> Any: ...
