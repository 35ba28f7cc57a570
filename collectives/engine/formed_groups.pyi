from typing import Any

from mpi4py.MPI import Comm

from collectives.engine.served import Served

class FormedGroups(Served):
    def __init__(self, control: Comm, data: Comm, like: Any, **options: Any) -> None: ...
