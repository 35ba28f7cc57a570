"""The port of formed groups: it moves one rank's vectors as `GroupRankProtocol` decides."""

from libc.stdlib cimport free
from mpi4py.MPI cimport Comm

from collectives.engine.group_queue cimport GroupQueue, Step
from collectives.engine.tags cimport group_tag
from collectives.exchange.clock cimport now
from collectives.exchange.exchange cimport Exchange
from collectives.memory.allocation cimport zeroed
from collectives.memory.handover cimport UNKNOWN
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.contribution cimport X
from collectives.recording.recorder cimport record_version, recording


cdef class GroupsPort(GroupQueue):
    """Moves the vectors of groups: by messages, or in memory that their members share.

    Args:
        comm: a communicator for groups' messages and exchanges only.
        exchange, vectors: of groups.
        deciding: the rank's protocol.
        port, rhythm: of the collective.
    """

    def __init__(self, Comm comm, Exchange exchange, HostVectors vectors,
                 GroupRankProtocol deciding, EnginePort port, Rhythm rhythm):
        GroupQueue.__init__(self, comm)
        self.exchange, self.reduction = exchange, exchange.reduction
        self.vectors, self.deciding = vectors, deciding
        self.port, self.rhythm = port, rhythm
        self.met = <double *>zeroed(self.size, sizeof(double))
        if self.met == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.met)

    cdef void let_go(self) noexcept:
        """Refer to no memory any more: the protocols and their port refer to each other."""
        self.exchange, self.reduction, self.vectors = None, None, None
        self.port, self.deciding = None, None

    # Passes over vectors

    cdef void begin_pass(self, int step, bint moves) noexcept nogil:
        self.port.begin_pass(step, moves)

    cdef bint end_pass(self, int step, bint moves) noexcept nogil:
        return self.port.end_pass(step, moves)

    cdef bint is_here(self) noexcept nogil:
        return self.port.is_here()

    cdef bint knows_finite(self) noexcept nogil:
        return self.vectors.knows_finite(self.vectors.of[X])

    cdef void changed(self) noexcept nogil:
        self.vectors.finite = UNKNOWN

    # Exchanges

    cdef bint is_in_place(self) noexcept nogil:
        return self.exchange.shares(self.first.members, self.first.size)

    cdef void begin_average(self, long long number) noexcept nogil:
        cdef Step *group = self.first
        cdef double weight = self.deciding.weight
        cdef char **arrays = self.vectors.arrays(self.deciding.target)
        self.began = now()
        self.rhythm.beat(self.began)
        self.reduction.arrival.more = group.next == NULL or not group.next.returns
        if self.is_in_place():
            self.exchange.shared.describe(False, False, True, weight, weight, 0)
            self.exchange.begin_in_memory(
                number, True, group.members, group.size, arrays, arrays != NULL, True, False)
        else:
            self.exchange.begin(
                group.members, group.size, group.me, group_tag(number), weight,
                self.vectors.start[self.deciding.source],
                self.vectors.of[X] if self.deciding.present else NULL,
                self.deciding.lent, False, arrays, NULL, NULL, self.vectors.layout.count)

    cdef bint is_exchanged(self) noexcept nogil:
        return self.exchange.progress()

    cdef double total_weight(self) noexcept nogil:
        return self.reduction.weight

    cdef void executed(self, long long number) noexcept nogil:
        cdef Step *group = self.first
        cdef int i
        if group.size > 1:
            for i in range(group.size):
                self.met[group.members[i]] += 1 / <double>group.size
        if recording():
            record_version(
                &self.reduction.exchanged, self.port.number, self.began, number, 0, 0, group.members, group.size)

    cdef void returns(self, bint in_group) noexcept nogil:
        """The caller sees it by `done`."""

    # What an exception interrupts

    cdef void adopt(self) noexcept nogil:
        self.exchange.adopt(self.vectors.of[self.deciding.source])

    cdef void redirect(self) noexcept nogil:
        self.reduction.target = self.vectors.arrays(self.deciding.target)
        self.exchange.divert()
