from collectives.exchange.exchange cimport Exchange
from collectives.exchange.shared.shared cimport Shared
from collectives.protocols.groups cimport Groups

cdef class NodeMemory:
    cdef int rank, size
    cdef bint wanted, spins
    # Those in shared memory, and this rank's part in each, a `Shared`.
    cdef list exchanges, parts
    # Why this rank has no memory that others can map, if it has none.
    cdef readonly str missing
    cdef readonly bint in_use

    cdef Shared share(self, Exchange exchange, bint vectors, bint rings, Groups groups=*)
