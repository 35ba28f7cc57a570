"""Calls of methods whose groups a protocol forms: what callers wait for, and what Python calls."""

import array

from cpython.buffer cimport PyBUF_WRITABLE
from mpi4py.MPI cimport Comm

from collectives.engine.calls cimport CALL, give_back_interrupted
from collectives.engine.group_port cimport GroupsPort
from collectives.engine.protocol_calls cimport (
    ANSWERED,
    DRAINED,
    FURTHER_WISHES,
    PAUSE,
    PAUSED,
    QUIET,
    RESUME,
    ProtocolCalls,
)
from collectives.engine.served cimport SECOND, Waiting
from collectives.exchange.clock cimport now
from collectives.exchange.exchange cimport Exchange
from collectives.exchange.mutex cimport pthread_mutex_lock, pthread_mutex_unlock
from collectives.memory.handover cimport UNKNOWN, Handover
from collectives.memory.layout cimport UserVector
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.contribution cimport RESULT, SCRATCH, SNAPSHOT, X
from collectives.protocols.formed_groups cimport GroupProtocol
from collectives.protocols.group_rank cimport GroupRankProtocol

from collectives.errors import CudaError
from collectives.result import Result

cdef enum:
    # What the application requests: a call that averages nothing, and one whose vector is arriving
    # from a device.
    PASS_BY = FURTHER_WISHES
    AWAIT


cdef class FormedGroups(ProtocolCalls):
    """One rank of a method whose groups a protocol forms.

    A rank's groups are averaged one after the other, in its protocol's order; those of other ranks
    run at the same time.

    Args:
        control, data, like, others: see `Driver`.
        groups: a communicator for groups' messages and exchanges only.
    """

    def __init__(self, Comm control, Comm data, like, *, Comm groups, bint by_messages=True,
                 **others):
        ProtocolCalls.__init__(self, control, data, like, by_messages=by_messages, **others)
        self.group_exchange = Exchange(groups, self.layout, None, by_messages)
        self.group_reduction = self.group_exchange.reduction
        self.group_reduction.number = self.number
        self.group_reduction.arrival = self.reduction.arrival
        self.group_vectors = HostVectors(self.layout)
        self.deciding = GroupRankProtocol(self.group_vectors, self.size)
        self.queue = GroupsPort(groups, self.group_exchange, self.group_vectors, self.deciding,
                                self.port, self.rhythm)
        self.messages = self.queue.messages
        self.node.share(self.group_exchange, False, True)
        if self.layout.space.deferred:  # averages over all ranks: see `EnginePort`
            self.node.share(self.exchange, False, True)
        # In host memory it has no pages before an average of short vectors or an exception uses it.
        self.group_vectors.allocate(SCRATCH, 1)

    cdef void let_go(self) noexcept:
        if self.queue is not None:
            self.queue.let_go()

    def attach(self, GroupProtocol protocol, like):
        """Set the protocol that forms groups, and begin it; a passive rank's model is `like` then.
        """
        cdef UserVector opened
        self.queue.attach(protocol)
        self.deciding.attach(self.queue, protocol)
        if protocol.passive:
            self.group_vectors.allocate(RESULT, 1)
            self.group_vectors.allocate(SNAPSHOT, 1)
            opened = UserVector(like, self.layout, 0)
            self.group_vectors.of[X] = opened.arrays
        # Nothing serves this collective yet, so the lock is not needed.
        self.deciding.begin()

    # Progress

    cdef void advance(self) noexcept nogil:
        ProtocolCalls.advance(self)
        if self.queue.progress():
            self.rhythm.beat(now())
        self.deciding.advance()
        if self.queue.error != 0:
            self.error = self.queue.error
        if self.group_reduction.error != 0:
            self.error = self.group_reduction.error

    cdef bint is_busy(self) noexcept nogil:
        return ProtocolCalls.is_busy(self) or self.deciding.is_busy()

    cdef long long advanced(self) noexcept nogil:
        # Ready signals and reminders end no wait.
        return (self.reduction.progress_count + self.group_reduction.progress_count
                + self.queue.step_count)

    cdef long long progressed(self) noexcept nogil:
        return (self.reduction.progress_count + self.group_reduction.progress_count
                + self.queue.progress_count)

    cdef long long busy_ns(self) noexcept nogil:
        return ProtocolCalls.busy_ns(self) + self.group_reduction.busy_ns

    # What callers wait for, and how they report it

    cdef bint reached(self, int goal) noexcept nogil:
        if goal == ANSWERED:
            return not (self.caller.awaits or self.queue.protocol.calling)
        if goal == QUIET or goal == PAUSED:
            return self.queue.first == NULL and self.queue.protocol.is_quiet()
        if goal == DRAINED:
            return self.queue.first == NULL and self.messages.is_over()
        return ProtocolCalls.reached(self, goal)

    cdef long long calls_made(self) noexcept nogil:
        return self.queue.protocol.calls

    cdef void describe_call(self, long long *answer) noexcept nogil:
        """Report the group being averaged as well, as its number plus one; 0: none."""
        ProtocolCalls.describe_call(self, answer)
        answer[3] = self.queue.protocol.calling
        answer[1] = self.queue.first.number + 1 if self.deciding.begun else 0

    def _waits_in_call(self):
        cdef int rank
        awaited = {rank for rank in range(self.size) if self.queue.protocol.waits_for(rank)}
        where = "close()" if self.stalls.closing else f"call {self.calls_made()}"
        number, members = self._averaged()
        if members:
            where = f"{where}, in group {number},"
            awaited.update(members)
        return where, sorted(awaited)

    def _averaged(self):
        """Return the number and the members of the group being averaged; 0 and [] without one."""
        cdef int[::1] members = array.array("i", [0]) * self.size
        cdef long long number = 0
        cdef int i, count = 0
        with nogil:
            # The progress thread may end the average meanwhile.
            pthread_mutex_lock(&self.lock)
            if self.deciding.begun:
                number, count = self.queue.first.number, self.queue.first.size
                for i in range(count):
                    members[i] = self.queue.first.members[i]
            pthread_mutex_unlock(&self.lock)
        return number, list(members[:count])

    cdef why_missing_in_call(self, long long *answer, operation, elsewhere):
        """Return why a rank is missing; a member of this group may be in an earlier one."""
        number, members = self._averaged()
        if members and answer[1] not in (0, number + 1):
            return f"in group {answer[1] - 1}"
        return operation or (None if answer[3] else elsewhere)

    cdef int look_for_stalls(self, Waiting *waiting, long long time) except -1:
        """Report stalls, and end the wait of an overdue caller for ranks that are in no call.

        A caller is overdue once it has reported for whom it waits, or after twice the time, as on
        the controller's rank something may always move.
        """
        cdef long long limit = self.stalls.stall if waiting.said else 2 * self.stalls.stall
        ProtocolCalls.look_for_stalls(self, waiting, time)
        if self.stalls.stall and time - max(waiting.began, waiting.overdue) >= limit:
            waiting.overdue = time
            with nogil:
                pthread_mutex_lock(&self.lock)
                if not self.messages.ending:
                    self.queue.protocol.overdue()
                pthread_mutex_unlock(&self.lock)
        return 0

    # What an exception interrupts

    cdef void _forget_user(self) noexcept nogil:
        """Stop using the application's buffer; its call, if pending, continues without it."""
        cdef long long end = now() + SECOND
        self.caller.awaits = False
        while self.port.copying or self.queue.protocol.calling and not self.port.is_here():
            self.port.yield_lock()
        # From here on other threads begin nothing that uses the buffer.
        self.deciding.interrupt()
        # Running members complete their messages soon; a stopped one is waited for at most 1 s.
        while (self.deciding.kept and self.deciding.begun and self.error == 0
                and self.group_exchange.uses(self.group_vectors.of[X]) and now() < end):
            self.group_exchange.progress()
            self.port.yield_lock()

    # Leaving

    cdef void announce_leaving(self) noexcept nogil:
        if not self.queue.protocol.leaving:
            self.queue.protocol.leave()

    # What Python calls

    def call(self, vector, Handover handover=None):
        """Make the next call, in place, and return its `Result`.

        With a handover, the call begins once the device has checked the vector.
        """
        if handover is None:
            self._use_protocol(CALL, vector)
        else:
            self._call_with(vector, handover)
        return self._result_of_call()

    def pass_by(self):
        """Make a call that averages nothing, for which no vector is needed; return its `Result`.

        Return None where the call may average; then it has not been made.
        """
        self.settle()
        if not self.deciding.passes_by():
            return None
        self._use_protocol(PASS_BY)
        return self._result_of_call()

    cdef int _call_with(self, vector, Handover handover) except -1:
        """Make a call with a handover's vector, and give that back."""
        self.port.arrival.handover = handover
        try:
            self._use_protocol(AWAIT, vector)
        except:
            if self.port.arrival.arrays != NULL:
                give_back_interrupted(handover)
            raise
        finally:
            self.port.arrival.arrays = NULL
            self.vectors.finite = UNKNOWN
        try:
            handover.check()
            if self.deciding.changed or self.layout.space.deferred:
                handover.give_back()
            else:
                handover.withdraw()
        except CudaError as error:
            self.fail(f"CudaError: {error}")
            raise
        return 0

    def _result_of_call(self):
        version = self.calls_made() - 1
        members, _ = self.deciding.last.listed()
        return Result(version, self.deciding.timely, version, members or (self.rank,),
                      self.deciding.total, False)

    def add_moved(self, vector):
        """Add to the vector what averages changed since the last call, as a call would."""
        cdef UserVector opened = UserVector(vector, self.layout, PyBUF_WRITABLE)
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.group_vectors.of[X] = opened.arrays
            self.deciding.continue_with()
            pthread_mutex_unlock(&self.lock)

    def go_on_from(self, vector):
        """Take this vector, from which the application continues, as the model."""
        cdef UserVector opened = UserVector(vector, self.layout, 0)
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.group_vectors.of[X] = opened.arrays
            self.deciding.go_on_from()
            pthread_mutex_unlock(&self.lock)

    def restart(self, long long calls):
        """Continue with this number of calls made, once all ranks have paused."""
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.queue.protocol.restart(calls)
            pthread_mutex_unlock(&self.lock)

    cdef int _before_call(self) except -1:
        if self.no_progress_thread:
            with nogil:
                pthread_mutex_lock(&self.lock)
                self.progress()
                pthread_mutex_unlock(&self.lock)
        self.check_usable()
        return 0

    cdef int give(self, int what, char **arrays, double weight) except -1 nogil:
        if what != CALL:
            return ProtocolCalls.give(self, what, arrays, weight)
        self.group_vectors.of[X] = arrays
        self.group_vectors.finite = self.vectors.finite
        self.group_vectors.asked = False
        self.deciding.call()
        return 0

    cdef int _do(self, int what, char **arrays, long long calls) except -1 nogil:
        if what == CALL or what == PASS_BY or what == AWAIT:
            self.lent = True
            if what == AWAIT:
                self.caller.awaited_arrays = arrays
                self.caller.awaits = True
            elif what == CALL:
                self.give(CALL, arrays, 0)
            else:
                self.deciding.pass_by()
            self.waiter.wait(self, ANSWERED)
            if what == AWAIT and self.port.arrival.arrays == NULL:
                return 0  # its device has failed
            self.protocol.completed()
            self.steps.timely += self.deciding.timely
        elif what == PAUSE:
            self.queue.protocol.pause()
            self.waiter.wait(self, PAUSED)
        elif what == RESUME:
            self.queue.protocol.passed(now())
            self.queue.protocol.resume()
        return 0

    cdef counts(self):
        return self.deciding.averages, self.deciding.passive, ()

    @property
    def who_was_met(self):
        """For each rank, the sum of 1/|S| over the groups S with both it and this one."""
        cdef int rank
        return [self.queue.met[rank] for rank in range(self.size)]

    @property
    def group_nonfinite(self):
        """How many vectors were left out of groups."""
        return self.deciding.nonfinite

    @property
    def group_bytes(self):
        """Bytes of vectors sent in groups."""
        return self.group_reduction.bytes_sent
