from typing import Any

from mpi4py.MPI import Comm

from collectives.protocols.peers import PeerProtocol, Port

class Mailbox(Port):
    def __init__(self, comm: Comm, like: list[Any], whole: bool) -> None: ...
    def attach(self, protocol: PeerProtocol) -> None: ...
