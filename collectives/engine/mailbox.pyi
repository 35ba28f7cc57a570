from typing import Any

from mpi4py.MPI import Comm

from collectives.protocols.peer_rank import PeerRankPort
from collectives.protocols.peers import PeerProtocol

class Mailbox(PeerRankPort):
    def __init__(
        self, comm: Comm, like: list[Any], whole: bool, ranks: list[int], sharing: bool
    ) -> None: ...
    def attach(self, exchanging: PeerProtocol) -> None: ...
