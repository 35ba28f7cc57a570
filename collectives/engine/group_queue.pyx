"""The steps that a protocol that forms groups requests of its rank, and its messages."""

from libc.stdlib cimport free
from mpi4py.libmpi cimport MPI_ERR_INTERN, MPI_ERR_RANK
from mpi4py.MPI cimport Comm

from collectives.engine.integer_messages cimport IntegerMessages
from collectives.exchange.clock cimport now
from collectives.memory.allocation cimport zeroed
from collectives.protocols.formed_groups cimport RECORD, Group, GroupProtocol
from collectives.protocols.group_rank cimport GroupRankPort
from collectives.protocols.paces cimport NEVER
from collectives.protocols.rank cimport CONTRIBUTE, RETURN, WAIT

cdef enum:
    # Messages received in one poll, so that those of a fast rank do not delay others.
    MOST_AT_ONCE = 16
    # Integers of a message besides two records of groups of all ranks.
    OTHERS = 16
    # Steps that there is memory for from the start.
    STEPS = 8


cdef class GroupQueue(GroupRankPort):
    """The requests and messages of one rank's port, for the thread that holds the lock.

    Args:
        comm: a communicator for its messages and its groups' exchanges.
    """

    def __init__(self, Comm comm):
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.messages = IntegerMessages(comm, OTHERS + 2 * (RECORD + 2 * self.size))
        self._allocate_steps()

    def attach(self, GroupProtocol protocol):
        """Set the protocol that requests steps."""
        self.protocol = protocol

    cdef int _allocate_steps(self) except -1:
        """Allocate as many steps as a rank usually has, none of which may be forgotten."""
        cdef int i
        for i in range(STEPS):
            if self._add_step() == NULL:
                raise MemoryError
        self.first, self.unused = NULL, self.first
        return 0

    def __dealloc__(self):
        cdef Step *step
        for first in range(2):
            while self.first != NULL:
                step = self.first
                self.first = step.next
                free(step.members)
                free(step.weights)
                free(step)
            self.first, self.unused = self.unused, NULL

    # The port

    cdef void send(self, int destination, long long[::1] integers) noexcept nogil:
        if not 0 <= destination < self.size:
            self.error = MPI_ERR_RANK
            return
        self.messages.send(destination, integers)

    cdef void reduce(self, Group group) noexcept nogil:
        cdef int me = group.index_of(self.rank)
        cdef int i
        cdef Step *step
        if me < 0 or group.members[group.size - 1] >= self.size:
            self.error = MPI_ERR_RANK
            return
        step = self._add_step()
        if step == NULL:
            return
        step.number, step.size, step.me = group.number, group.size, me
        for i in range(group.size):
            step.members[i] = group.members[i]
            step.weights[i] = group.weights[i]

    cdef void return_model(self) noexcept nogil:
        cdef Step *step = self._add_step()
        if step != NULL:
            step.returns = True

    cdef bint under_way(self, Group group) noexcept nogil:
        cdef Step *step = self.first
        cdef int i
        if step == NULL or step.returns:
            return False
        group.clear(step.number)
        for i in range(step.size):
            group.add(step.members[i], step.weights[i])
        return True

    cdef int requested(self) noexcept nogil:
        if self.first == NULL:
            return WAIT
        return RETURN if self.first.returns else CONTRIBUTE

    cdef void finish(self) noexcept nogil:
        cdef Step *step = self.first
        self.first = step.next
        step.next = self.unused
        self.unused = step
        self.progress_count += 1
        self.step_count += 1

    cdef bint is_under_way(self) noexcept nogil:
        return self.first != NULL or self.messages.under_way > 0 or self.messages.receiving

    cdef long long now(self) noexcept nogil:
        return now()

    cdef Step *_add_step(self) noexcept nogil:
        """Add a step after all others, and return it; NULL and an error without memory."""
        cdef Step *step = self.unused
        if step != NULL:
            self.unused = step.next
        else:
            step = <Step *>zeroed(1, sizeof(Step))
            if step != NULL:
                step.members = <int *>zeroed(self.size, sizeof(int))
                step.weights = <double *>zeroed(self.size, sizeof(double))
            if step == NULL or step.members == NULL or step.weights == NULL:
                if step != NULL:
                    free(step.members)
                    free(step.weights)
                free(step)
                # Other members would wait for it for good: this rank cannot even leave.
                self.error = MPI_ERR_INTERN
                return NULL
        step.returns = False
        step.next = NULL
        self.step_count += 1
        if self.first == NULL:
            self.first = step
        else:
            self.last.next = step
        self.last = step
        return step

    # The driver

    cdef bint progress(self) noexcept nogil:
        """Tell the protocol of messages that have arrived; return whether there were any."""
        cdef int count = 0
        while count < MOST_AT_ONCE and self.messages.take():
            self.protocol.passed(now())
            self.protocol.arrived(
                self.messages.source, self.messages.integers[:self.messages.length])
            count += 1
        if count < MOST_AT_ONCE and self.protocol.due != NEVER and now() >= self.protocol.due:
            self.protocol.passed(now())
            self.protocol.fell_due()
        self.messages.test()
        self.progress_count += count
        if self.messages.error != 0:
            self.error = self.messages.error
        return count > 0
