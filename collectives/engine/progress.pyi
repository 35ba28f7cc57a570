from typing import Any

from collectives.engine.served import Served

class Engine:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def add(self, collective: Served, mode: str) -> None: ...
    def remove(self, collective: Served) -> None: ...

engine: Engine
