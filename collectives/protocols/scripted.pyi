from collections.abc import Callable
from typing import Any

from collectives.protocols.formed_groups import GroupPort, GroupProtocol

class ScriptedGroupProtocol(GroupProtocol):
    script: Any
    def __init__(self, port: GroupPort, rank: int, size: int, make: Callable[..., Any]) -> None: ...
