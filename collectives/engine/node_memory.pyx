"""The memory that a collective shares with the ranks of its node."""

from collectives.exchange.exchange cimport Exchange
from collectives.exchange.shared.shared cimport Shared
from collectives.protocols.groups cimport Groups

from collectives.errors import CudaError


cdef class NodeMemory:
    """This rank's memory that other ranks of the node map, one part for each exchange that uses it.

    Args:
        rank, size: this rank, and the number of ranks.
        wanted: whether to share memory at all.
        spins: see `Shared`.

    Attributes:
        in_use: whether this rank and others of its node use each other's memory.
        missing: why this rank has no memory that others can map; None if it has.
    """

    def __init__(self, int rank, int size, bint wanted, bint spins):
        self.rank, self.size, self.wanted, self.spins = rank, size, wanted, spins
        self.exchanges, self.parts = [], []

    cdef Shared share(self, Exchange exchange, bint vectors, bint rings, Groups groups=None):
        """Allocate memory for this rank's part in exchanges; return None if there is none."""
        cdef Shared shared
        if not self.wanted:
            return None
        try:
            shared = Shared(
                exchange.reduction, groups, self.rank, self.size, vectors, rings, self.spins)
        except (AttributeError, OSError, CudaError) as error:  # memfd_create is Linux's
            self.missing = f"rank {self.rank} has no memory to share: {error}"
            return None
        self.exchanges.append(exchange)
        self.parts.append(shared)
        return shared

    @property
    def handles(self):
        """The handles by which other ranks of the node map this one's memory."""
        cdef Shared shared
        return [shared.memory.handle for shared in self.parts]

    @property
    def longest(self):
        """The bytes of the longest vector that is averaged there."""
        cdef Shared shared
        return max([shared.memory.layout.size for shared in self.parts], default=0)

    def map(self, handles):
        """Map the memory of the node's ranks, given a dict from ranks to their handles."""
        cdef int i
        cdef Shared shared
        for i, shared in enumerate(self.parts):
            shared.memory.map({rank: handle[i] for rank, handle in handles.items()})

    def use(self, bint copies):
        """Exchange vectors from now on in the memory that all ranks of the node have mapped.

        Args:
            copies: whether they may copy from and to each other's other memory.
        """
        cdef Exchange exchange
        cdef Shared shared
        for exchange, shared in zip(self.exchanges, self.parts):
            shared.memory.close()
            if copies:
                shared.blocks.copy_directly()
            exchange.shared = shared
            self.in_use = True

    def unmap(self):
        """Unmap other ranks' memory on devices, once no rank uses this one's any more."""
        cdef Shared shared
        for shared in self.parts:
            shared.memory.unmap()
