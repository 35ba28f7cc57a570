from mpi4py.libmpi cimport MPI_Comm

from collectives.engine.agreement cimport Agreement
from collectives.engine.calls cimport Caller
from collectives.engine.control_tree cimport ControlTree
from collectives.engine.node_memory cimport NodeMemory
from collectives.engine.ports cimport EnginePort
from collectives.engine.served cimport Served, Waiting
from collectives.engine.stalls cimport StallReporter
from collectives.engine.waiting cimport Waiter
from collectives.exchange.exchange cimport Exchange
from collectives.exchange.reduction cimport Reduction
from collectives.memory.layout cimport Layout
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.all_ranks cimport AllRanksProtocol
from collectives.protocols.contribution cimport ContributionProtocol
from collectives.protocols.rank cimport RankProtocol

cdef class Driver(Served):
    cdef readonly int pid
    # Of the control tree.
    cdef int dimensions
    # What decides: the rank's steps, operations of all ranks, what the rank contributes.
    cdef RankProtocol steps
    cdef AllRanksProtocol protocol
    cdef ContributionProtocol contribution
    # What executes them: the port, with the vectors and the exchange, and control messages.
    cdef readonly Layout layout
    cdef HostVectors vectors
    cdef Exchange exchange
    cdef Reduction reduction
    cdef EnginePort port
    cdef ControlTree tree
    cdef Agreement agreement
    cdef readonly NodeMemory node
    # What the application's calls go through.
    cdef Caller caller
    cdef Waiter waiter
    cdef StallReporter stalls
    # An error code of MPI, or 0; whether the application has been told of it.
    cdef int error
    cdef bint said_error
    # The communicators, and whether they have been revoked because a rank has died.
    cdef MPI_Comm communicators[2]
    cdef readonly bint bereft
    # Whether the last poll left work in flight; number of polls.
    cdef bint busy
    cdef unsigned int polls

    cdef int drive(
        self, RankProtocol steps, EnginePort port, ControlTree tree, weighing=*) except -1
    cdef void advance(self) noexcept nogil
    cdef void mourn(self) noexcept nogil
    cdef bint is_busy(self) noexcept nogil
    cdef void exchange_control_messages(self) noexcept nogil
    cdef void enter_operation(self, int operation) noexcept nogil
    cdef void gather(self) noexcept nogil
    cdef bint is_failed(self, int goal) noexcept nogil
    cdef bint is_calls(self, int goal) noexcept nogil
    cdef bint is_broken(self, int goal) noexcept nogil
    cdef bint misses(self, int goal) noexcept nogil
    cdef missing_error(self)
    cdef failure_error(self)
    cdef engine_error(self)
    cdef int check_owner(self) except -1
    cdef int check_usable(self) except -1
    cdef int enter_call(self) except -1
    cdef void begin_awaited(self) noexcept nogil
    cdef result(self)
    cdef counts(self)
    cdef long long calls_made(self) noexcept nogil
    cdef void describe_call(self, long long *answer) noexcept nogil
    cdef bint is_joining(self) noexcept nogil
    cdef why_missing_in_call(self, long long *answer, operation, elsewhere)
    cdef bint _all_sent(self) noexcept nogil
