# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Calls of methods whose groups a protocol forms: what callers wait for, and what Python calls."""

from cpython.buffer cimport PyBUF_WRITABLE

from collectives.engine.calls cimport CALL, give_back_interrupted
from collectives.engine.group_averages cimport GroupAverages
from collectives.engine.protocol_calls cimport (
    ANSWERED,
    EMPTY,
    FURTHER_WISHES,
    PAUSE,
    PAUSED,
    QUIET,
    RESUME,
)
from collectives.engine.served cimport Waiting
from collectives.exchange.clock cimport now
from collectives.exchange.mutex cimport pthread_mutex_lock, pthread_mutex_unlock
from collectives.memory.handover cimport UNKNOWN, Handover
from collectives.memory.layout cimport UserVector

from collectives.errors import CudaError
from collectives.result import Result

cdef enum:
    # What the application requests: a call that averages nothing, and one whose vector is arriving
    # from a device.
    PASS_BY = FURTHER_WISHES
    AWAIT


cdef class FormedGroups(GroupAverages):
    """One rank of a method whose groups a protocol forms; see `GroupAverages`."""

    # What callers wait for, and how they report it

    cdef bint reached(self, int goal) noexcept nogil:
        if goal == ANSWERED:
            return not (self.caller.awaits or self.queue.protocol.calling)
        if goal == QUIET or goal == PAUSED:
            return self.queue.first == NULL and self.queue.protocol.is_quiet()
        if goal == EMPTY:
            return self.queue.first == NULL and self.messages.is_over()
        return GroupAverages.reached(self, goal)

    cdef long long calls_made(self) noexcept nogil:
        return self.queue.protocol.calls

    cdef void describe_call(self, long long *answer) noexcept nogil:
        """Report the group being averaged as well, as its number plus one; 0: none."""
        GroupAverages.describe_call(self, answer)
        answer[3] = self.queue.protocol.calling
        answer[1] = self.queue.first.number + 1 if self.averaging else 0

    def _waits_in_call(self):
        cdef int rank, i
        awaited = {rank for rank in range(self.size) if self.queue.protocol.waits_for(rank)}
        where = "close()" if self.stalls.closing else f"call {self.calls_made()}"
        if self.averaging:
            where = f"{where}, in group {self.queue.first.number},"
            awaited.update([self.queue.first.members[i] for i in range(self.queue.first.size)])
        return where, sorted(awaited)

    cdef why_missing_in_call(self, long long *answer, operation, elsewhere):
        """Return why a rank is missing; a member of this group may be in an earlier one."""
        if self.averaging and answer[1] not in (0, self.queue.first.number + 1):
            return f"in group {answer[1] - 1}"
        return operation or (None if answer[3] else elsewhere)

    cdef int look_for_stalls(self, Waiting *waiting, long long time) except -1:
        """Report stalls, and end the wait of an overdue caller for ranks that are in no call.

        A caller is overdue once it has reported for whom it waits, or after twice the time, as on
        the controller's rank something may always move.
        """
        cdef long long limit = self.stalls.stall if waiting.said else 2 * self.stalls.stall
        GroupAverages.look_for_stalls(self, waiting, time)
        if self.stalls.stall and time - max(waiting.began, waiting.overdue) >= limit:
            waiting.overdue = time
            with nogil:
                pthread_mutex_lock(&self.lock)
                if not self.messages.ending:
                    self.queue.protocol.overdue()
                pthread_mutex_unlock(&self.lock)
        return 0

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
        if self.queue.protocol.passive or self.queue.protocol.averages():
            return None
        self._use_protocol(PASS_BY)
        return self._result_of_call()

    cdef int _call_with(self, vector, Handover handover) except -1:
        """Make a call with a handover's vector, and give that back."""
        self.caller.awaited = self.reduction.handover = self.group_reduction.handover = handover
        try:
            self._use_protocol(AWAIT, vector)
        except:
            if self.reduction.staged != NULL:
                give_back_interrupted(handover)
            raise
        finally:
            self.reduction.staged = self.group_reduction.staged = NULL
            self.vectors.finite = UNKNOWN
        try:
            handover.check()
            if self.changed or self.layout.space.deferred:
                handover.give_back()
            else:
                handover.withdraw()
        except CudaError as error:
            self.fail(f"CudaError: {error}")
            raise
        return 0

    def _result_of_call(self):
        cdef int i
        version = self.calls_made() - 1
        members = [self.last_members[i] for i in range(self.last_size)] or [self.rank]
        weight = self.last_weight if self.last_size else 1.0
        return Result(version, self.last_timely, version, tuple(members), weight, False)

    def add_moved(self, vector):
        """Add to the vector what averages changed since the last call, as a call would."""
        cdef UserVector opened = UserVector(vector, self.layout, PyBUF_WRITABLE)
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.user = opened.arrays
            self._add_what_moved()
            self.user = NULL
            pthread_mutex_unlock(&self.lock)

    def go_on_from(self, vector):
        """Take this vector, from which the application continues, as the model."""
        cdef UserVector opened = UserVector(vector, self.layout, 0)
        with nogil:
            pthread_mutex_lock(&self.lock)
            if self.queue.protocol.passive:
                self.layout.copy(self.model_arrays, opened.arrays)
                self.moved = False
                self.unreturned = False
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
            return GroupAverages.give(self, what, arrays, weight)
        self.group_reduction.staged = self.reduction.staged
        self.vectors.asked = False
        self.user = arrays
        self.queue.protocol.passed(now())
        self.queue.protocol.call()
        return 0

    cdef int _do(self, int what, char **arrays, long long calls) except -1 nogil:
        if what == CALL or what == PASS_BY or what == AWAIT:
            self.lent = True
            self.last_size = 0
            self.last_timely = True
            self.changed = False
            if what == AWAIT:
                self.caller.awaited_arrays = arrays
                self.caller.awaits = True
            else:
                self.give(CALL, arrays, 0)
            self.waiter.wait(self, ANSWERED)
            if what == AWAIT and self.reduction.staged == NULL:
                return 0  # its device has failed
            self.protocol.completed()
            self.steps.timely += self.last_timely
        elif what == PAUSE:
            self.queue.protocol.pause()
            self.waiter.wait(self, PAUSED)
        elif what == RESUME:
            self.queue.protocol.passed(now())
            self.queue.protocol.resume()
        return 0

    cdef counts(self):
        return self.groups_reduced, self.groups_passive, ()

    @property
    def who_was_met(self):
        """For each rank, the sum of 1/|S| over the groups S with both it and this one."""
        cdef int rank
        return [self.met[rank] for rank in range(self.size)]

    @property
    def group_bytes(self):
        """Bytes of vectors sent in groups."""
        return self.group_reduction.bytes_sent
