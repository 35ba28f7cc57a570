from collectives.exchange.exchange cimport Exchange
from collectives.exchange.shared cimport Shared
from collectives.protocols.groups cimport Groups

cdef class NodeMemory:
    cdef int rank, size
    # One for each exchange in shared memory.
    cdef list exchanges
    # Why this rank has no memory that others can map, if it has none.
    cdef readonly str missing
    cdef readonly bint in_use

    cdef Shared share(self, Exchange exchange, bint vectors, bint rings, Groups groups=*)
