# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""What all ranks do together: agree, meet, average, fail and close; it is in every collective."""

from cpython.buffer cimport PyBUF_WRITABLE
from libc.string cimport strlen
from mpi4py import MPI
from mpi4py.MPI cimport Comm

from collectives.engine.operations cimport RECORD, Operations
from collectives.engine.waiting cimport SECOND
from collectives.exchange.clock cimport now
from collectives.exchange.mutex cimport (
    mpi_mutex,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from collectives.memory.layout cimport UserVector
from collectives.protocols.all_ranks cimport (
    AVERAGE,
    CLOSE,
    LOAD,
    MEET,
    NONE,
    OUTSIDE,
    SYNC,
    SYNCHRONIZE,
)

from collectives.agreement import by_value, name_ranks
from collectives.engine.stalls import PURPOSES, operation_in_words
from collectives.errors import (
    ClosedError,
    CollectiveError,
    DisagreementError,
    RankFailedError,
)
from collectives.process import check_owner
from collectives.result import Result
from collectives.settings import checked_weight

cdef extern from "Python.h" nogil:
    unsigned long PyThread_get_thread_ident()

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<unistd.h>" nogil:
    int getpid()

# Whether this process is a fork of the one that loaded this module: cheaper than asking each time.
cdef bint forked = False


def note_fork():
    """This process is such a fork."""
    global forked
    forked = True


cdef class Call:
    """A call that has been started: `test()` and `wait()` complete it.

    The vector given belongs to the collective until then.
    """

    def test(self):
        """Return whether the call is complete, without waiting; raises what `wait()` would."""
        return self._is_settled() or self.collective._test()

    def wait(self):
        """Wait until the call is complete and return its `Result`; the same one every time.

        Raises:
            ClosedError, DisagreementError, RankFailedError: as the blocking call would.
        """
        if not self._is_settled():
            self.collective._complete()
        return self.result

    def __repr__(self):
        cdef AllRanks collective = self.collective
        if self.error is not None:
            return f"<Call that has failed: {type(self.error).__name__}>"
        if self.result is not None:
            return f"<Call that is complete: {self.result}>"
        version = collective.taken_version + collective.protocol.base
        return f"<Call of version {version}, not complete>"

    def __reduce_ex__(self, protocol):
        raise TypeError("a call that has been started cannot be copied or pickled")

    cdef bint _is_settled(self) except -1:
        self.collective._check_owner()
        if self.error is not None:
            raise self.error
        return self.result is not None


cdef class Guard:
    """Keeps a signal handler's call, or another thread's, out of one that is going on."""

    def __enter__(self):
        if self.taken:
            raise RuntimeError(
                "this collective is in a call already: a signal handler or another thread cannot "
                "make one as well"
            )
        self.taken = True

    def __exit__(self, *exception):
        self.taken = False


cdef class AllRanks(Operations):
    """One rank's part in what all ranks do together.

    A subclass makes `protocol` and `tree`, and has what ranks do beside.
    """

    def __init__(self, Comm control, Comm data, like, **options):
        Operations.__init__(self, control, data, like, **options)
        self.guard = Guard()
        self.pid = getpid()

    def listen(self):
        """Begin to listen for the others, once all ranks have come so far."""
        pthread_mutex_lock(&mpi_mutex)
        self.tree.listen()
        pthread_mutex_unlock(&mpi_mutex)

    # What subclasses have beside

    cdef int _begin(self, int what) except -1 nogil:
        """Begin what the application wants with its vector."""
        self._begin_operation(what)
        return 0

    cdef bint _misses(self, int goal) noexcept nogil:
        """Whether it waits in vain for a rank that makes no calls."""
        return False

    cdef _missing(self):
        """The error of a rank that waits for one that makes no calls."""

    cdef void _announce_leaving(self) noexcept nogil:
        """The application makes no more calls."""

    cdef int _leave_others(self) except -1 nogil:
        """Wait, before closing, for what this rank has begun with others; the lock is held."""
        return 0

    cdef int _end_messages(self) except -1 nogil:
        """Wait, once all leave, for messages of a subclass's; the lock is held."""
        return 0

    cdef void _free_requests(self) noexcept nogil:
        """Give back what MPI has of it; the MPI mutex is held."""
        self.tree.free()

    # What is waited for

    cdef bint _reached(self, int goal) noexcept nogil:
        if goal == DONE:
            return self.done
        if goal == SETTLED:
            return self.done or self.protocol.broken
        if goal == OVER or goal == CAUGHT_UP:
            return self.protocol.stage == OUTSIDE
        return self.protocol.may_leave() and self._all_sent() and self._all_answered()

    cdef bint _is_failed(self, int goal) noexcept nogil:
        """Whether a rank has failed, so that a call does not wait any longer."""
        return self.protocol.failed >= 0 and self._is_calls(goal)

    cdef bint _is_calls(self, int goal) noexcept nogil:
        """Whether it is a call that waits, not close()."""
        return goal == DONE or goal == CAUGHT_UP

    cdef bint _is_in_vain(self, int goal) noexcept nogil:
        return self._is_failed(goal) or self._misses(goal)

    cdef int _raise_failure(self, int goal) except -1:
        if self.error != 0:
            raise CollectiveError(f"rank {self.rank}: {MPI.Get_error_string(self.error)}")
        raise self._failure() if self._is_failed(goal) else self._missing()

    def _failure(self):
        """The error of a rank that has heard of another's failure."""
        text = self.tree.failure[:strlen(self.tree.failure)]
        text = text.decode(errors="ignore")  # it may be cut
        return RankFailedError(
            f"rank {self.protocol.failed} failed, so only close() is left here: {text}")

    # What an exception interrupts

    cdef void _abandon(self) noexcept nogil:
        """The operation was interrupted by an exception: the user's vector is ours no longer."""
        self._lock_when_copied()
        if self.begun:
            self.exchange.adopt(NULL)
        elif self._is_averaging():
            # It goes on with what there is, and that would be nothing.
            self._contribute_ahead()
        self._keep_nothing_lent(self.scratch_arrays)
        self._drain()
        pthread_mutex_unlock(&self.lock)

    cdef void _lock_when_copied(self) noexcept nogil:
        """Take the lock, once no thread is at the application's memory."""
        pthread_mutex_lock(&self.lock)
        while self.copying:
            pthread_mutex_unlock(&self.lock)
            sched_yield()
            pthread_mutex_lock(&self.lock)

    cdef void _contribute_ahead(self) noexcept nogil:
        """Give now what an average will take from this rank."""
        self._contribute_to_average(True)
        if self.lent:
            self.layout.copy(self.scratch_arrays, self.x)
        self.contributed = True

    cdef void _keep_nothing_lent(self, char **target) noexcept nogil:
        """Let what is averaged go to this target, where it would go to the application's memory."""
        self.lent = False
        # Of what it gave part may be nowhere any more.
        self.gives = self.gives and not self.begun
        self.gives_own = False
        if self.begun and self.reduction.target == self.x:
            self.reduction.target = target
        self.reduction.copy = NULL
        self.has_x = False

    cdef bint _is_averaging(self) noexcept nogil:
        """Whether the application is in an operation that averages what it gives."""
        return (self.has_x and not self.protocol.joined
                and self.protocol.operation in (SYNC, SYNCHRONIZE, AVERAGE))

    cdef bint _drain(self) noexcept nogil:
        """Wait for messages from and to the application's memory; return whether they have ended.

        Members that run end them soon. For one that is stopped it does not wait long: the call's
        vector is kept, and no change is taken against what is in it.
        """
        cdef long long end = now() + SECOND
        if self.begun:
            self.exchange.divert()
        while self.begun and self.exchange.uses(self.x) and self.error == 0:
            if now() > end:
                return False
            self.exchange.progress()
            pthread_mutex_unlock(&self.lock)
            sched_yield()
            pthread_mutex_lock(&self.lock)
        return True

    # What Python calls

    cdef int _check_owner(self) except -1:
        """Raise in a forked child."""
        if forked:
            check_owner(self.pid)
        return 0

    cdef int _check_usable(self) except -1:
        self._check_owner()
        if self.closed or self.protocol.operation == CLOSE:
            raise ClosedError("this collective is closed")
        if self.protocol.failed == self.rank:
            raise ClosedError("this rank failed in an earlier call: only close() is left")
        if self.protocol.failed >= 0:
            raise self._failure()
        if self.protocol.broken:
            raise ClosedError("the ranks disagreed in an earlier operation: only close() is left")
        return 0

    def synchronize(self, vector, weight=None):
        """Average the vector in place over all ranks, as what all go on from.

        Its weight is that of the last call, unless one is given.
        """
        self._carry_out(SYNCHRONIZE, vector, PyBUF_WRITABLE, weight)

    def average(self, vector, weight=None):
        """Overwrite the vector by the average over all ranks, and change nothing else.

        Its weight is that of the last call, unless one is given.
        """
        self._carry_out(AVERAGE, vector, PyBUF_WRITABLE, weight)

    def load(self, vector, long long version):
        """Go on from this vector, with this version for the next one."""
        self._carry_out(LOAD, vector, 0, None, version)

    def meet(self):
        """Wait until all ranks are here; return how many calls the one with the most has made."""
        self._carry_out(MEET, None, 0)
        return self.most_calls

    cdef Call _carry_out(self, int what, vector, int flags, weight=None, long long version=0):
        cdef Call call = self._start(what, vector, flags, weight, version)
        self._complete()
        return call

    cdef Call _start(self, int what, vector, int flags, weight, long long version=0):
        """Begin what the application wants with its vector."""
        cdef Call call
        self._check_usable()
        self._enter()
        try:
            self._complete_pending()
            call = self._open_call(what, vector, flags, weight)
            self._begin_with(call, what, version)
        finally:
            self.guard.taken = False
        return call

    cdef Call _open_call(self, int what, vector, int flags, weight):
        """Check what the application gives; all ranks hear of a mistake."""
        cdef Call call = Call.__new__(Call)
        call.collective = self
        try:
            if what != MEET:
                call.vector = UserVector(vector, self.layout, flags)
            call.weight = self.weight_published
            if what == CALL or what == PUBLISH or weight is not None:
                call.weight = checked_weight(weight)
        except (TypeError, ValueError) as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise
        return call

    cdef int _begin_with(self, Call call, int what, long long version) except -1:
        cdef long long began = now()
        try:
            with nogil:
                self._wait_until(CAUGHT_UP)
            if self.disagreed != NONE:
                self._forget_disagreement()
            with nogil:
                pthread_mutex_lock(&self.lock)
                try:
                    if call.vector is not None:
                        self.x = call.vector.arrays
                    self.has_x = call.vector is not None
                    self.weight_given = call.weight
                    self.loading = version
                    self._begin(what)
                    self.progress()
                finally:
                    pthread_mutex_unlock(&self.lock)
                self._serve_others()
        except:
            with nogil:
                self._abandon()
            raise
        finally:
            self.calls_ns += now() - began
        self.pending = call
        return 0

    cdef int _enter(self) except -1:
        """Keep a forked child out, and other calls than this one."""
        self._check_owner()
        self.guard.__enter__()
        self.caller = PyThread_get_thread_ident()
        return 0

    cdef int _forget_disagreement(self) except -1:
        """What an exception interrupted has ended in a disagreement meanwhile: only say so."""
        self.disagreed = NONE
        self._check_usable()
        return 0

    def begin_collectively(self, str what):
        """All ranks enter operations for this purpose, "join()" or so; "": for their own."""
        self.purpose = PURPOSES[what] if what else NONE

    @property
    def most_calls(self):
        """The most calls that a rank had made when all entered the last operation."""
        cdef int rank
        return max([self.records[RECORD * rank + 5] for rank in range(self.size)])

    def _test(self):
        """Return whether the call that was started is complete."""
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.progress()
            pthread_mutex_unlock(&self.lock)
            self._serve_others()
        if not self.done and not self._is_failed(DONE) and self.error == 0:
            return False
        self._complete()
        return True

    cdef int _complete(self) except -1:
        """Wait for the call that was started, if there is one."""
        if self.pending is None:
            return 0
        self._enter()
        try:
            self._complete_pending()
        finally:
            self.guard.taken = False
        return 0

    cdef int _complete_pending(self) except -1:
        cdef long long began = now()
        cdef Call call = self.pending
        if call is None:
            return 0
        try:
            with nogil:
                self._wait_until(DONE)
        except BaseException as error:
            with nogil:
                self._abandon()
            self._forget(call)
            call.error = error if isinstance(error, CollectiveError) else CollectiveError(
                f"the call was interrupted by {type(error).__name__}")
            raise
        finally:
            self.calls_ns += now() - began
        self._settle(call)
        if call.error is not None:
            raise call.error
        return 0

    cdef int _forget(self, Call call) except -1:
        """The user's memory is the user's again."""
        self.pending = None
        self.has_x = False
        self.last_vector = call.vector
        call.vector = None
        return 0

    cdef int _settle(self, Call call) except -1:
        """Give a completed call its result or its error."""
        self._forget(call)
        if self.disagreed != NONE:
            call.error = self._disagreement()
            self.disagreed = NONE
        else:
            call.result = self._result()
        return 0

    def _result(self):
        version = self.taken_version + self.protocol.base
        everyone = tuple(range(self.size))
        return Result(version, self.finite, version, everyone, self.taken_weight, True)

    def fail(self, text):
        """Let all ranks know that this one has failed; only close() is left."""
        cdef bytes encoded = text.encode(errors="replace")
        cdef const char *characters = encoded
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.tree.fail(self.rank, characters)
            self.progress()
            pthread_mutex_unlock(&self.lock)

    def begin_close(self):
        """Let the others know that this rank closes, where that needs no waiting."""
        with nogil:
            pthread_mutex_lock(&self.lock)
            if self.protocol.stage == OUTSIDE and not (self.closed or self.has_x):
                self._announce_leaving()
                self._begin_operation(CLOSE)
            pthread_mutex_unlock(&self.lock)

    def close(self):
        """Carry out what anybody has started, and leave; collective."""
        cdef long long waiting = self.waiting_ns
        if self.closed:
            return
        self._enter()
        self.closing = True
        try:
            if self.protocol.operation != CLOSE and self.has_x:
                # What was started is carried on to its end first.
                with nogil:
                    self._wait_until(SETTLED)
                self._settle(self.pending)
            with nogil:
                self._leave()
        finally:
            # The times are those of calls.
            self.waiting_ns = waiting
            self.guard.taken = False
        self.closed = True
        self.last_vector = None
        pthread_mutex_lock(&mpi_mutex)
        self._free_requests()
        pthread_mutex_unlock(&mpi_mutex)

    cdef int _leave(self) except -1 nogil:
        """Enter CLOSE, once what an exception interrupted is over, and wait for its end."""
        pthread_mutex_lock(&self.lock)
        try:
            if self.protocol.operation != CLOSE:
                self._wait(OVER)
                self._leave_others()
                self._begin_operation(CLOSE)
            self._wait(LEFT)
            self._end_messages()
        finally:
            pthread_mutex_unlock(&self.lock)
        return 0

    def statistics(self):
        """Return the counts and times (in seconds) of `statistics.Statistics`, in its order."""
        self._check_owner()
        versions, passive, staleness = self._counts()
        return (
            self.calls,
            self.timely,
            self.synchronizations,
            versions,
            passive,
            staleness,
            self.nonfinite,
            self.reduction.bytes_sent,
            self.waiting_ns * 1e-9,
            (self.calls_ns - self.waiting_ns) * 1e-9,
            self._busy_ns() * 1e-9,
        )

    def _counts(self):
        """Return how many versions were executed, how many passively, and counts by staleness."""
        return 0, 0, ()

    def _disagreement(self):
        """The error of a rank whose operation was not everybody's."""
        cdef int rank, i
        entered = by_value(
            tuple([self.records[RECORD * rank + i] for i in (0, 5, 2)]) for rank in range(self.size)
        )
        closing = any(kind == CLOSE for kind, _, _ in entered)
        (mine,) = (what for what, ranks in entered.items() if self.rank in ranks)
        del entered[mine]
        others = "; ".join(f"{name_ranks(ranks)} entered {operation_in_words(*what)}"
                           for what, ranks in sorted(entered.items()))
        return (ClosedError if closing else DisagreementError)(
            f"rank {self.rank} waits in {operation_in_words(*mine)}, "
            f"which needs all ranks to make the same calls, but {others}"
        )

    @property
    def version(self):
        """The version of the next call."""
        return self.protocol.t + self.protocol.base

    @property
    def failure(self):
        """The rank of whose failure this one has heard, and its error; (−1, None): none."""
        return self.protocol.failed, self._failure() if self.protocol.failed >= 0 else None

    @property
    def broken(self):
        """Whether only close() is left."""
        return self.protocol.broken or self.protocol.failed >= 0
