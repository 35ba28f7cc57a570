# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""What all ranks do together: agree, meet, average, fail and close; the part that is in every collective.

Each collective has a lock, held while its state advances; one mutex is around all MPI calls, held
for nothing else. No MPI call blocks.
"""

import os

from cpython.buffer cimport PyBUF_WRITABLE
from libc.stdlib cimport calloc, free
from libc.string cimport strlen
from mpi4py import MPI
from mpi4py.libmpi cimport (
    MPI_LONG_LONG,
    MPI_REQUEST_NULL,
    MPI_STATUS_IGNORE,
    MPI_SUCCESS,
    MPI_Iallgather,
    MPI_Test,
)
from mpi4py.MPI cimport Comm

from collectives.engine.control_tree cimport ControlTree
from collectives.engine.inquiry cimport Inquiry
from collectives.engine.stalls cimport StallReporter
from collectives.engine.waiting cimport SECOND
from collectives.exchange.clock cimport now
from collectives.exchange.doubling cimport PHASES
from collectives.exchange.exchange cimport Exchange
from collectives.exchange.mutex cimport (
    mpi_mutex,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from collectives.memory.allocation cimport allocate
from collectives.memory.layout cimport Layout, UserVector, weight_of
from collectives.protocols.all_ranks cimport (
    AGREEING,
    AVERAGE,
    CLOSE,
    FINISH,
    LEAVING,
    LOAD,
    MEET,
    NONE,
    OUTSIDE,
    REDUCING,
    SYNC,
    SYNCHRONIZE,
    AllRanksProtocol,
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

cdef enum:
    # Bytes of a vector whose average takes so long that a caller yields often.
    LONG = 524288
    # How often it looks for questions while it is busy: they are rare and not urgent.
    POLLS_TO_ANSWER = 16

# The limits on waiting are counted in nanoseconds, of which no more than 292 years can be.
cdef double LONGEST_LIMIT = 9e9


def _note_fork():
    global forked
    forked = True

os.register_at_fork(after_in_child=_note_fork)


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
        if forked:
            check_owner(self.collective.pid)
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


cdef class AllRanks(StallReporter):
    """One rank's part in what all ranks do together.

    A subclass makes `protocol`, `tree` and `exchange`, and has what ranks do beside.

    Args:
        control, data: communicators of its own.
        like: list of arrays as they are averaged; `single`: users give one rather than a list.
        identity: what tells this collective from others, the same on all ranks.
        oversubscribed: whether ranks and their progress threads outnumber the cores.
        stall, abort: seconds without progress after which a caller says who is missing, and ends
            the job; 0: never.
    """

    def __init__(self, Comm control, Comm data, like, *, identity, bint single,
                 bint oversubscribed, double stall, double abort, wire_dtype=None):
        cdef int rank
        self.identity = identity
        self.guard = Guard()
        self.control = control
        self.data = data
        self.rank = control.Get_rank()
        self.size = control.Get_size()
        self.pid = getpid()
        self.oversubscribed = oversubscribed
        self.stall = <long long>(min(stall, LONGEST_LIMIT) * SECOND)
        self.abort = <long long>(min(abort, LONGEST_LIMIT) * SECOND)
        self.layout = Layout(
            [array.dtype.name for array in like], [array.size for array in like], single)
        self.yields_often = oversubscribed and self.layout.size >= LONG
        self.exchange = Exchange(data, self.layout, wire_dtype)
        self.reduction = self.exchange.reduction
        self.gather = MPI_REQUEST_NULL
        self.weight_given = 1
        self.weight_published = 1
        self.finite = True
        self.records = <long long *>calloc((RECORD + 2) * self.size, sizeof(long long))
        self.everyone = <int *>calloc(self.size, sizeof(int))
        self.scratch_arrays = <char **>calloc(self.layout.count, sizeof(char *))
        if self.records == NULL or self.everyone == NULL or self.scratch_arrays == NULL:
            raise MemoryError
        for rank in range(self.size):
            self.everyone[rank] = rank
        self.pairs = self.records + RECORD * self.size
        # It takes no memory before the first average() that touches it.
        self.scratch = allocate(self.layout.size)
        self.layout.locate(self.scratch_arrays, self.scratch)

    cdef int _begin_protocol(self, AllRanksProtocol protocol, ControlTree tree) except -1:
        """Have this protocol, and tags beside those of its versions."""
        self.protocol = protocol
        self.tree = tree
        self.sync_tag = tree.window * PHASES
        self.inquiry = Inquiry(self.data, self.sync_tag + 2 * PHASES)
        return 0

    def __dealloc__(self):
        free(self.scratch)
        free(self.scratch_arrays)
        free(self.records)
        free(self.everyone)

    def listen(self):
        """Begin to listen for the others, once all ranks have come so far."""
        pthread_mutex_lock(&mpi_mutex)
        self.tree.listen()
        pthread_mutex_unlock(&mpi_mutex)

    # What subclasses have beside

    cdef void _advance(self) noexcept nogil:
        """Do all that can be done without waiting, once messages have been taken in."""
        while self._step():
            pass

    cdef bint _is_busy(self) noexcept nogil:
        """Whether work is in flight."""
        return self.begun or self.protocol.stage == AGREEING

    cdef bint _step(self) noexcept nogil:
        """Take what goes on one step on; return whether it did."""
        if not self._serve_operation():
            return False
        self.reduction.progress_count += 1
        return True

    cdef int _begin(self, int what) except -1 nogil:
        """Begin what the application wants with its vector."""
        self._begin_operation(what)
        return 0

    cdef void _before_operation(self) noexcept nogil:
        """The application enters an operation."""

    cdef void _after_operation(self, bint averages) noexcept nogil:
        """The operation is over; one that only `averages` has published nothing."""

    cdef void _publish_average(self) noexcept nogil:
        """The average over all ranks is there."""
        if self.protocol.operation != AVERAGE:
            self.synchronizations += 1

    cdef void _renumber(self) noexcept nogil:
        """An operation has moved data."""

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

    # Progress: whoever holds the lock advances the collective's state

    cdef bint progress(self) noexcept nogil:
        if self.size > 1:
            pthread_mutex_lock(&mpi_mutex)
            self.tree.receive()
            self.tree.send_due()
            self.polls += 1
            if not self.busy or self.polls % POLLS_TO_ANSWER == 0:
                self._answer()
            if self.protocol.stage == AGREEING:
                self._agree()
            elif self.counting:
                self._count_questions()
            pthread_mutex_unlock(&mpi_mutex)
            if self.tree.error != 0:
                self.error = self.tree.error
        elif self.protocol.stage == AGREEING:
            self._record(self.records)
            self._agreed()
        self._advance()
        if self.reduction.error != 0:
            self.error = self.reduction.error
        self.busy = self._is_busy()
        return self.busy

    cdef long long progressed(self) noexcept nogil:
        return self.reduction.progress_count

    cdef long long _busy_ns(self) noexcept nogil:
        return self.reduction.busy_ns + self.copying_ns

    cdef void _check(self, int rc) noexcept nogil:
        if rc != MPI_SUCCESS:
            self.error = rc

    cdef bint _all_sent(self) noexcept nogil:
        cdef bint all
        pthread_mutex_lock(&mpi_mutex)
        all = self.tree.all_sent()
        pthread_mutex_unlock(&mpi_mutex)
        return all

    cdef bint _all_answered(self) noexcept nogil:
        """Whether every question has been answered."""
        cdef long long asked = 0
        cdef int rank
        if self.counting:
            return False
        for rank in range(self.size):
            if rank != self.rank:
                asked += self.records[RECORD * rank + 3]
        return self.inquiry.received == asked and self.inquiry.quiet()

    # Agreements

    cdef void _record(self, long long *record) noexcept nogil:
        record[0] = self.protocol.operation
        record[1] = self.protocol.t
        record[2] = self.purpose if self.protocol.operation != CLOSE else NONE
        if self.protocol.operation == LOAD:
            record[2] = self.loading
        record[3] = self.inquiry.asked
        record[4] = self.protocol.failed
        record[5] = self._calls_made()

    cdef void _contribute(self) noexcept nogil:
        """Gather what operation every rank is in; the MPI mutex is held."""
        self._record(self.record)
        self._check(MPI_Iallgather(self.record, RECORD, MPI_LONG_LONG, self.records, RECORD,
                                   MPI_LONG_LONG, self.control.ob_mpi, &self.gather))

    cdef void _agree(self) noexcept nogil:
        """See whether every rank has come; the MPI mutex is held."""
        cdef int done
        self._check(MPI_Test(&self.gather, &done, MPI_STATUS_IGNORE))
        if done:
            self.reduction.progress_count += 1
            self._agreed()
            if self.protocol.stage == AGREEING:
                self._contribute()
            elif self.protocol.stage == LEAVING:
                self.counting = True
                self._contribute()
            self.tree.send_due()

    cdef void _count_questions(self) noexcept nogil:
        """Learn how many questions each rank has asked that leaves; it asks no more."""
        cdef int done
        self._check(MPI_Test(&self.gather, &done, MPI_STATUS_IGNORE))
        self.counting = not done

    cdef void _agreed(self) noexcept nogil:
        cdef int operation = self.protocol.operation
        cdef bint same = True
        cdef bint failed = False
        cdef int rank
        for rank in range(self.size):
            failed = failed or self.records[RECORD * rank + 4] >= 0
            self.pairs[2 * rank] = self.records[RECORD * rank]
            self.pairs[2 * rank + 1] = self.records[RECORD * rank + 1]
            same = same and self.records[RECORD * rank + 2] == self.records[2]
        if not same:
            # Different versions to load are different operations, and so are different purposes.
            self.pairs[1] = -1
        self.protocol.agreed(self.pairs, self.size)
        if self.protocol.stage == OUTSIDE:
            self.disagreed = operation
            # A failure that made others close is on its way here too, and says why.
            self.done = not failed

    cdef void _begin_operation(self, int operation) noexcept nogil:
        self.done = False
        self._before_operation()
        if operation != CLOSE:  # which leaves a call that was started its result
            self.taken_version = self.protocol.t
        self.protocol.enter(operation)
        if self.size > 1:
            pthread_mutex_lock(&mpi_mutex)
            self._contribute()
            pthread_mutex_unlock(&mpi_mutex)

    # Averages over all ranks

    cdef bint _serve_operation(self) noexcept nogil:
        """Take the operation that all ranks are in one step on; return whether it did."""
        if self.copying or self.protocol.stage != REDUCING:
            return False
        if self.protocol.operation == LOAD:
            self._load()
        elif self.protocol.operation == MEET:
            self._end_operation()
        elif not self.begun:
            self._begin_reducing()
        elif self.exchange.progress():
            self._finish_reducing()
        else:
            return False
        return True

    cdef void _begin_reducing(self) noexcept nogil:
        """Begin to average what the application gives, if it does."""
        if not self.contributed:
            self._contribute_to_average(self.has_x and not self.protocol.joined)
        self.contributed = False
        self._reduce()

    cdef void _contribute_to_average(self, bint publishes) noexcept nogil:
        """Lend the application's vector, which takes no memory, or fill the scratch vector."""
        self._unlock_to_copy()
        self.lent = publishes and self.layout.all_finite(self.x)
        if not self.lent:
            self.layout.zero(self.scratch_arrays)
        self.gives = self.lent
        self.gives_own = self.lent
        weight_of(self.scratch)[0] = self.weight_given if self.lent else 0
        self._lock_after_copy()

    cdef void _reduce(self) noexcept nogil:
        """Begin the exchange of an average that is not published."""
        cdef bint gets = self.has_x and not self.protocol.joined or self._is_finishing()
        cdef char **target = self.x if self.lent else self.scratch_arrays
        cdef char **copy = self.x if gets and not self.lent else NULL
        self.begun = True
        self.exchange.begin(self.everyone, self.size, self.rank, self._tag(), self.scratch,
                            self.x, self.lent, False, target, copy, NULL)

    cdef int _tag(self) noexcept nogil:
        """The tag of this operation's exchange."""
        return self.sync_tag + <int>(self.protocol.ops % 2) * PHASES

    cdef void _reduce_with_equal_weights(self) noexcept nogil:
        """Nobody's vector has weight: begin again, and let all that are finite count alike."""
        self.weightless = True
        self.data_ops += 1
        self._renumber()
        self._give_equally()
        self._reduce()

    cdef void _give_equally(self) noexcept nogil:
        """Give a finite vector with weight 1."""
        weight_of(self.scratch)[0] = self.gives
        self.lent = self.gives_own

    cdef bint _is_finishing(self) noexcept nogil:
        return self.has_x and self.protocol.operation == FINISH

    cdef void _finish_reducing(self) noexcept nogil:
        self._end_exchange()
        if self.weight == 0 and not self.weightless:
            self._reduce_with_equal_weights()
            return
        self._publish_average()
        self._end_operation()

    cdef void _end_exchange(self) noexcept nogil:
        self.begun = False
        self.lent = False
        self.weight = self.reduction.weight

    cdef void _end_operation(self) noexcept nogil:
        """What every rank does has been done; one that has joined enters the next operation."""
        cdef bint averages = self.protocol.operation == AVERAGE
        self.taken_count = 0
        self.taken_weight = 0 if self.weightless else self.weight
        self.weightless = False
        self.protocol.reduced()
        self._after_operation(averages)
        self.data_ops += 1
        self._renumber()
        if self.protocol.stage != AGREEING:
            self.done = True
        elif self.size > 1:
            pthread_mutex_lock(&mpi_mutex)
            self._contribute()
            pthread_mutex_unlock(&mpi_mutex)

    cdef void _load(self) noexcept nogil:
        """Go on at another version: the one that all have agreed on, whatever this rank wanted."""
        self.protocol.base = self.records[2] - self.protocol.t
        self._end_operation()

    cdef void _unlock_to_copy(self) noexcept nogil:
        """Let others drive the collective while this thread is at vectors that may be long.

        The application holds the vectors, so nothing else reads or writes them.
        """
        self.copying = True
        self.copy_began = now()
        pthread_mutex_unlock(&self.lock)

    cdef void _lock_after_copy(self) noexcept nogil:
        self.copying_ns += now() - self.copy_began
        pthread_mutex_lock(&self.lock)
        self.copying = False

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
        text = self.tree.failure[:strlen(self.tree.failure)].decode(errors="ignore")  # it may be cut
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

    cdef int _check_usable(self) except -1:
        if forked:
            check_owner(self.pid)
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
        if forked:
            check_owner(self.pid)
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
        if forked:
            check_owner(self.pid)
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
        """Return how many versions were executed, how many passively, and the counts by staleness."""
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
