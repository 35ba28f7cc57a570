# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""An application's calls: begin, test, wait, complete.

Only one call is in progress at a time. A non-blocking call that was not waited for is completed by
the next call.
"""

from cpython.object cimport PyObject, PyTypeObject
from libc.string cimport strlen
from mpi4py import MPI
from mpi4py.libmpi cimport MPI_ERR_NO_MEM
from mpi4py.MPI cimport Comm

from collectives.engine.guard cimport Guard
from collectives.engine.interruptible cimport Interruptible
from collectives.engine.waiting cimport LOOK
from collectives.exchange.clock cimport now
from collectives.exchange.mutex cimport pthread_mutex_lock, pthread_mutex_unlock
from collectives.memory.layout cimport UserVector
from collectives.memory.handover cimport UNKNOWN, Handover
from collectives.protocols.all_ranks cimport CLOSE, NONE, OUTSIDE
from collectives.protocols.contribution cimport X

from collectives.errors import ClosedError, CollectiveError, CudaError, RankFailedError
from collectives.process import check_owner
from collectives.result import Result
from collectives.settings import checked_weight

cdef extern from "Python.h" nogil:
    unsigned long PyThread_get_thread_ident()

cdef extern from "<unistd.h>" nogil:
    int getpid()

# Stands for the last call's weight, where the application passes none.
cdef double OF_LAST_CALL = -1

# Whether this process is a fork of the one that loaded this module: cheaper than asking each time.
cdef bint forked = False


def note_fork():
    """Note that this process is a fork; see `forked`."""
    global forked
    forked = True


cdef new_result(tuple fields):
    """Return a `Result`, without the cost of its constructor, a Python function."""
    cdef tuple arguments = (fields,)
    return (<PyTypeObject *>tuple).tp_new(Result, <PyObject *>arguments, NULL)


cdef class Call:
    """A non-blocking call, returned by `start()`: `test()` and `wait()` complete it.

    Neither read nor change its vector until then.
    """

    def test(self):
        """Return whether the call is complete, without waiting; raises the errors of `wait()`."""
        return self._is_settled() or self.collective._test()

    def wait(self):
        """Wait until the call is complete, and return its `Result`; may be called repeatedly.

        Raises:
            ClosedError, DisagreementError, RankFailedError: as the blocking call would.
        """
        if not self._is_settled():
            self.collective._complete()
        return self.result

    def __repr__(self):
        cdef Calls collective = self.collective
        if self.error is not None:
            return f"<Call that has failed: {type(self.error).__name__}>"
        if self.result is not None:
            return f"<Call that is complete: {self.result}>"
        version = collective.driven.called + collective.protocol.base
        return f"<Call of version {version}, not complete>"

    def __reduce_ex__(self, protocol):
        raise TypeError("a call in progress cannot be copied or pickled")

    cdef bint _is_settled(self) except -1:
        self.collective._check_owner()
        if self.error is not None:
            raise self.error
        return self.result is not None


cdef class Calls(Interruptible):
    """One rank's calls, including operations of all ranks."""

    def __init__(self, Comm control, Comm data, like, **options):
        Interruptible.__init__(self, control, data, like, **options)
        self.guard = Guard()
        self.pid = getpid()
        self.caller = PyThread_get_thread_ident()  # until another thread calls

    # What subclasses override

    cdef int _begin(self, int what) except -1 nogil:
        """Begin the operation or call that the application requests."""
        self._enter_operation(what)
        return 0

    cdef bint _misses(self, int goal) noexcept nogil:
        """Return whether the caller waits for a rank that makes no calls."""
        return False

    cdef _missing(self):
        """Return the error of a rank that waits for one that makes no calls."""

    # What callers wait for

    cdef bint _reached(self, int goal) noexcept nogil:
        if goal == DONE:
            return self.driven.done
        if goal == SETTLED:
            return (self.driven.done or self.protocol.broken
                    or self.awaits and self.protocol.failed >= 0)
        if goal == OVER:
            return self.protocol.stage == OUTSIDE
        if goal == CAUGHT_UP:
            return self.driven.has_caught_up()
        return self.protocol.may_leave() and self._all_sent() and self._all_answered()

    cdef bint _is_failed(self, int goal) noexcept nogil:
        """Return whether a rank has failed, so that a call does not wait any longer."""
        return self.protocol.failed >= 0 and self._is_calls(goal)

    cdef bint _is_calls(self, int goal) noexcept nogil:
        """Return whether a call waits for this goal, rather than close()."""
        return goal == DONE or goal == CAUGHT_UP

    cdef bint _is_broken(self, int goal) noexcept nogil:
        """Return whether an error of this rank's engine prevents it; leaving needs no memory."""
        return self.error != 0 and (self.error != MPI_ERR_NO_MEM or self._is_calls(goal))

    cdef bint _is_in_vain(self, int goal) noexcept nogil:
        return self._is_broken(goal) or self._is_failed(goal) or self._misses(goal)

    cdef int _raise_failure(self, int goal) except -1:
        if self._is_broken(goal):
            raise self._engine_error()
        raise self._failure() if self._is_failed(goal) else self._missing()

    def _engine_error(self):
        """Return the error of this rank's engine, which is permanent."""
        self.said_error = True
        if self.error == MPI_ERR_NO_MEM:
            return CollectiveError(f"rank {self.rank} has no memory left for messages or vectors")
        return CollectiveError(f"rank {self.rank}: {MPI.Get_error_string(self.error)}")

    def _failure(self):
        """Return the error of a rank that knows of another's failure."""
        text = self.tree.failure[:strlen(self.tree.failure)]
        text = text.decode(errors="ignore")  # it may be truncated
        return RankFailedError(
            f"rank {self.protocol.failed} failed, so only close() is allowed here: {text}")

    # A call

    cdef int _check_owner(self) except -1:
        """Raise in a forked child."""
        if forked:
            check_owner(self.pid)
        return 0

    cdef int _check_usable(self) except -1:
        self._check_owner()
        if self.closed or self.protocol.operation == CLOSE:
            raise ClosedError("this collective is closed")
        if self.error != 0:
            raise self._engine_error()
        if self.protocol.failed == self.rank:
            raise ClosedError("this rank failed in an earlier call: only close() is allowed")
        if self.protocol.failed >= 0:
            raise self._failure()
        if self.protocol.broken:
            raise ClosedError("the ranks disagreed in an earlier operation: "
                              "only close() is allowed")
        return 0

    cdef Call _carry_out(self, int what, vector, int flags, weight=None, long long version=0,
                         Handover handover=None):
        cdef Call call = self._start(what, vector, flags, weight, version, handover)
        self._complete()
        return call

    cdef Call _start(self, int what, vector, int flags, weight, long long version=0,
                     Handover handover=None):
        """Start a call or operation; with a handover, it begins once the vector can be used."""
        cdef Call call
        self._check_usable()
        self._enter()
        try:
            self._complete_pending()
            call = self._open_call(what, vector, flags, weight)
            call.handover = handover
            self._begin_with(call, what, version)
        finally:
            self.guard.taken = False
        return call

    cdef Call _open_call(self, int what, vector, int flags, weight):
        """Check what the application gives; all ranks hear of a mistake."""
        cdef Call call = Call.__new__(Call)
        call.collective = self
        try:
            if flags != NO_VECTOR:
                call.vector = UserVector(vector, self.layout, flags)
            call.weight = OF_LAST_CALL
            if what == CALL or what == PUBLISH or weight is not None:
                # That of the last call has been checked.
                if type(weight) is not float or <double>weight != self.contribution.given_weight:
                    weight = checked_weight(weight)
                call.weight = weight
        except (TypeError, ValueError, MemoryError, CudaError) as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise
        return call

    cdef int _begin_with(self, Call call, int what, long long version) except -1:
        cdef long long began = now()
        if call.handover is not None:
            self.awaited = call.handover
            self.awaited_arrays = call.vector.arrays
            self.awaited_weight = call.weight
            self.reduction.handover = call.handover
        try:
            with nogil:
                self._wait_until(CAUGHT_UP)
            if self.driven.disagreed != NONE:
                self._forget_disagreement()
            with nogil:
                pthread_mutex_lock(&self.lock)
                try:
                    self.loading = version
                    if call.handover is not None:
                        self.driven.done = False
                        self.awaits = True
                    else:
                        self._give(what, NULL if call.vector is None else call.vector.arrays,
                                   call.weight)
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

    cdef int _give(self, int what, char **arrays, double weight) except -1 nogil:
        """Begin a call or operation with these arrays, if any; the lock is held."""
        if arrays != NULL:
            self.vectors.of[X] = arrays
            self.vectors.asked = False
            self.contribution.give(self._counted(what, weight))
        self._begin(what)
        return 0

    cdef double _counted(self, int what, double weight) noexcept nogil:
        """Return the weight of the application's vector; all earlier calls are complete."""
        if weight == OF_LAST_CALL:
            return self.contribution.published_weight
        if what == CALL or what == PUBLISH:
            return self.contribution.worked(weight)
        return weight

    # A call whose vector is arriving from a device

    cdef void _look_for_errors(self) noexcept nogil:
        self.looked = now()
        if self.awaited is not None:
            self.awaited.look_for_errors()
        self.layout.space.error()

    cdef void _advance(self) noexcept nogil:
        if self.awaits:
            self._begin_awaited()
        Interruptible._advance(self)

    cdef bint _is_busy(self) noexcept nogil:
        return self.awaits or Interruptible._is_busy(self)

    cdef void _begin_awaited(self) noexcept nogil:
        """Begin the started call if its vector can be used; until then this rank is passive.

        A call whose vector will never arrive is complete.
        """
        if self.port.copying or self.protocol.failed >= 0 or not self.awaited.checked():
            return
        self.awaits = False
        if self.awaited.error != 0:
            self.driven.done = True
            return
        self.vectors.finite = self.awaited.finite
        self.reduction.staged = self.awaited_arrays
        self._give(CALL, self.awaited_arrays, self.awaited_weight)

    cdef bint _withdraw(self) noexcept nogil:
        """Withdraw a started call that has not begun; return whether there was one."""
        cdef bint awaited
        pthread_mutex_lock(&self.lock)
        awaited, self.awaits = self.awaits, False
        pthread_mutex_unlock(&self.lock)
        return awaited

    def prepare_to_fetch(self, Handover handover):
        """Raise where no call can be made; wait until no earlier one uses the handover.

        Such a call was started and not waited for, or was interrupted by an exception.
        """
        self._check_usable()
        self._complete()
        with nogil:
            self._wait_until(CAUGHT_UP)
            self._wait_for(handover)

    cdef int _enter(self) except -1:
        """Enter a call: raise in a forked child, or where another call is in progress."""
        self._check_owner()
        self.guard.take()
        self.caller = PyThread_get_thread_ident()
        return 0

    cdef int _forget_disagreement(self) except -1:
        """Raise that an interrupted operation has ended in a disagreement, and forget that."""
        self.driven.disagreed = NONE
        self._check_usable()
        return 0

    def _test(self):
        """Return whether the call that was started is complete."""
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.progress()
            pthread_mutex_unlock(&self.lock)
            self._serve_others()
        if not self._reached(DONE) and not self._is_failed(DONE) and self.error == 0:
            if self.pending.handover is not None and now() - self.looked > LOOK:
                with nogil:
                    self._look_for_errors()
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
        cdef bint withdrawn
        if call is None:
            return 0
        try:
            with nogil:
                self._wait_until(DONE)
        except BaseException as error:
            with nogil:
                withdrawn = self._withdraw()
                if not withdrawn:
                    self._abandon()
            if withdrawn:
                call.handover.withdraw()
            elif call.handover is not None:
                self._give_back_interrupted(call.handover)
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

    cdef int _give_back_interrupted(self, Handover handover) except -1:
        """Give the vector back to the application as it is; leave an error to the next call."""
        try:
            handover.give_back()
        except CudaError:
            pass
        return 0

    cdef int _forget(self, Call call) except -1:
        """Stop using the application's buffer."""
        self.pending = None
        self.reduction.staged = NULL
        self.vectors.finite = UNKNOWN
        self.contribution.forget()
        self.last_vector = call.vector
        call.vector = None
        return 0

    cdef int _settle(self, Call call) except -1:
        """Set the result or the error of a completed call."""
        cdef bint withdrawn
        self._forget(call)
        with nogil:  # whoever has the lock may wait for the GIL, to call a protocol in Python
            withdrawn = self._withdraw()
        if withdrawn:  # a rank has failed, so the call does not begin
            call.handover.withdraw()
            call.error = self._failure()
            return 0
        if self.driven.disagreed != NONE:
            call.error = self._disagreement()
            self.driven.disagreed = NONE
            if call.handover is not None:
                call.handover.withdraw()
            return 0
        if call.handover is not None:
            try:
                call.handover.give_back()
            except CudaError as error:
                self.fail(f"CudaError: {error}")
                call.error = error
                return 0
        call.result = self._result()
        return 0

    cdef _result(self):
        version = self.driven.called + self.protocol.base
        everyone = tuple(range(self.size))
        return new_result(
            (version, self.contribution.finite, version, everyone, self.driven.weight, True))

    def fail(self, text):
        """Tell all ranks that this one has failed; only close() is allowed then."""
        cdef bytes encoded = text.encode(errors="replace")
        cdef const char *characters = encoded
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.tree.fail(self.rank, characters)
            self.progress()
            pthread_mutex_unlock(&self.lock)
