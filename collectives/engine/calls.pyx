"""An application's calls: begin, test, wait, complete.

Only one call is in progress at a time. A non-blocking call that was not waited for is completed by
the next call. A call that an exception such as KeyboardInterrupt interrupts gives the application
its vector back, and operations of all ranks continue in the background.
"""

from cpython.object cimport PyObject, PyTypeObject

from collectives.engine.driver cimport Driver
from collectives.engine.guard cimport Guard
from collectives.engine.ports cimport EnginePort
from collectives.engine.served cimport LOOK, SECOND, Served
from collectives.engine.waiting cimport Waiter, serve_others
from collectives.exchange.clock cimport now
from collectives.exchange.mutex cimport pthread_mutex_lock, pthread_mutex_unlock
from collectives.memory.layout cimport UserVector
from collectives.memory.handover cimport UNKNOWN, Handover
from collectives.protocols.all_ranks cimport NONE
from collectives.protocols.contribution cimport X
from collectives.protocols.rank cimport RankProtocol
from collectives.recording.recorder cimport CALL as CALL_EVENT, note

from collectives.errors import CollectiveError, CudaError
from collectives.result import Result
from collectives.settings import checked_weight

cdef extern from "Python.h" nogil:
    unsigned long PyThread_get_thread_ident()

# The application passes no weight: that of its last call counts.
cdef double OF_LAST_CALL = -1


cdef new_result(tuple fields):
    """Return a `Result` with nothing left out, without its constructor, a Python function."""
    cdef tuple arguments = (fields + ((),),)
    return (<PyTypeObject *>tuple).tp_new(Result, <PyObject *>arguments, NULL)


cdef class Call:
    """A non-blocking call, returned by `start()`: `test()` and `wait()` complete it.

    Neither read nor change its vector until then.
    """

    def test(self):
        """Return whether the call is complete, without waiting; raises the errors of `wait()`."""
        return self._is_settled() or (<Driver>self.collective).caller.test(self.collective)

    def wait(self):
        """Wait until the call is complete, and return its `Result`; may be called repeatedly.

        Raises:
            ClosedError, DisagreementError, RankFailedError: as the blocking call would.
        """
        if not self._is_settled():
            (<Driver>self.collective).caller.complete(self.collective)
        return self.result

    def __repr__(self):
        cdef Driver driver = <Driver>self.collective
        if self.error is not None:
            return f"<Call that has failed: {type(self.error).__name__}>"
        if self.result is not None:
            return f"<Call that is complete: {self.result}>"
        version = driver.steps.called + driver.protocol.base
        return f"<Call of version {version}, not complete>"

    def __reduce_ex__(self, protocol):
        raise TypeError("a call in progress cannot be copied or pickled")

    cdef bint _is_settled(self) except -1:
        (<Driver>self.collective).check_owner()
        if self.error is not None:
            raise self.error
        return self.result is not None


cdef class Caller:
    """The calls of one collective's application, including operations of all ranks.

    Args:
        steps, port, waiter: the collective's.
    """

    def __init__(self, RankProtocol steps, EnginePort port, Waiter waiter):
        self.steps, self.port, self.waiter = steps, port, waiter
        self.guard = Guard()

    # Beginning a call

    cdef Call carry_out(self, Served collective, int what, vector, int flags, weight=None,
                        long long version=0, Handover handover=None):
        """Make a call or operation, and wait until it is complete."""
        cdef Call call
        cdef long long began = now()
        self._enter(collective)
        try:
            call = self._begin(collective, what, vector, flags, weight, version, handover)
            self._complete_pending(collective)
        finally:
            self._leave(collective, what, began)
        return call

    cdef Call start(self, Served collective, int what, vector, int flags, weight,
                    long long version=0, Handover handover=None):
        """Start a call or operation; with a handover, it begins once the vector can be used."""
        cdef long long began = now()
        self._enter(collective)
        try:
            return self._begin(collective, what, vector, flags, weight, version, handover)
        finally:
            self._leave(collective, what, began)

    cdef int _enter(self, Served collective) except -1:
        (<Driver>collective).check_usable()
        (<Driver>collective).enter_call()
        return 0

    cdef void _leave(self, Served collective, int what, long long began) noexcept:
        self.guard.taken = False
        self.count_time(
            collective, what, began, self.steps.called + self.steps.operations.base)

    cdef void count_time(
        self, Served collective, int what, long long began, long long version
    ) noexcept nogil:
        """Count the time since then as spent in a call."""
        cdef long long end = now()
        self.calls_ns += end - began
        note(CALL_EVENT, collective.number, began, end, what, version)

    cdef Call _begin(self, Served collective, int what, vector, int flags, weight,
                     long long version, Handover handover):
        """Begin a call or operation, after the one that was started before."""
        cdef Call call
        if self.pending is not None:
            self._complete_pending(collective)
        call = self._open_call(collective, what, vector, flags, weight)
        call.handover = handover
        self._begin_with(collective, call, what, version)
        return call

    cdef Call _open_call(self, Served collective, int what, vector, int flags, weight):
        """Check the application's arguments; tell all ranks of an error."""
        cdef Call call = Call.__new__(Call)
        call.collective = collective
        try:
            if flags != NO_VECTOR:
                call.vector = UserVector(vector, self.port.vectors.layout, flags)
            call.weight = OF_LAST_CALL
            if what == CALL or what == PUBLISH or weight is not None:
                # The last call's weight has been checked already.
                if (type(weight) is not float
                        or <double>weight != self.port.contribution.given_weight):
                    weight = checked_weight(weight)
                call.weight = weight
        except (TypeError, ValueError, MemoryError, CudaError) as error:
            (<Driver>collective).fail(f"{type(error).__name__}: {error}")
            raise
        return call

    cdef int _begin_with(self, Served collective, Call call, int what, long long version) except -1:
        cdef Driver driver = <Driver>collective
        if call.handover is not None:
            self.port.arrival.handover = call.handover
            self.awaited_arrays = call.vector.arrays
            self.awaited_weight = call.weight
        try:
            with nogil:
                self.waiter.wait_until(collective, CAUGHT_UP)
                if self.steps.disagreed != NONE:
                    # An interrupted operation has ended in a disagreement.
                    self.steps.disagreed = NONE
                    with gil:
                        driver.check_usable()
                pthread_mutex_lock(&collective.lock)
                try:
                    driver.agreement.loading = version
                    if call.handover is not None:
                        self.steps.done = False
                        self.awaits = True
                    else:
                        collective.give(
                            what, NULL if call.vector is None else call.vector.arrays, call.weight)
                    collective.progress()
                finally:
                    pthread_mutex_unlock(&collective.lock)
                serve_others(collective)
        except:
            with nogil:
                self._abandon(collective)
            raise
        self.pending = call
        return 0

    cdef int give(
        self, Served collective, int what, char **arrays, double weight
    ) except -1 nogil:
        """Begin a call or operation with these arrays, if any; the lock is held."""
        if arrays != NULL:
            self.port.vectors.of[X] = arrays
            self.port.vectors.asked = False
            self.port.contribution.give(self.counted(what, weight))
        collective.begin(what)
        return 0

    cdef double counted(self, int what, double weight) noexcept nogil:
        """Return the weight of the application's vector; all earlier calls are complete."""
        if weight == OF_LAST_CALL:
            return self.port.contribution.published_weight
        if what == CALL or what == PUBLISH:
            return self.port.contribution.worked(weight)
        return weight

    # Completing it

    cdef int complete(self, Served collective) except -1:
        """Wait for the call that was started, if there is one."""
        cdef long long began = now()
        if self.pending is None:
            return 0
        (<Driver>collective).enter_call()
        try:
            self._complete_pending(collective)
        finally:
            self._leave(collective, NONE, began)
        return 0

    cdef bint test(self, Served collective) except -1:
        """Return whether the call that was started is complete."""
        cdef Driver driver = <Driver>collective
        with nogil:
            pthread_mutex_lock(&collective.lock)
            collective.progress()
            pthread_mutex_unlock(&collective.lock)
            serve_others(collective)
        if not (driver.reached(DONE) or driver.is_failed(DONE)) and driver.error == 0:
            if self.pending.handover is not None and now() - self.looked > LOOK:
                with nogil:
                    self.look_for_errors()
            return False
        self.complete(collective)
        return True

    cdef int _complete_pending(self, Served collective) except -1:
        cdef Call call = self.pending
        cdef bint withdrawn
        if call is None:
            return 0
        try:
            with nogil:
                self.waiter.wait_until(collective, DONE)
        except BaseException as error:
            with nogil:
                withdrawn = self._withdraw(collective)
                if not withdrawn:
                    self._abandon(collective)
            if withdrawn:
                call.handover.withdraw()
            elif call.handover is not None:
                give_back_interrupted(call.handover)
            self._forget(call)
            call.error = error if isinstance(error, CollectiveError) else CollectiveError(
                f"the call was interrupted by {type(error).__name__}")
            raise
        self.settle(collective, call)
        if call.error is not None:
            raise call.error
        return 0

    cdef int settle(self, Served collective, Call call) except -1:
        """Set the result or the error of a completed call."""
        cdef Driver driver = <Driver>collective
        cdef bint withdrawn = False
        self._forget(call)
        if call.handover is not None:
            with nogil:  # whoever has the lock may wait for the GIL, to call a protocol in Python
                withdrawn = self._withdraw(collective)
        if withdrawn:  # a rank has failed, so the call does not begin
            call.handover.withdraw()
            call.error = driver.failure_error()
            return 0
        if self.steps.disagreed != NONE:
            call.error = driver.agreement.difference()
            self.steps.disagreed = NONE
            if call.handover is not None:
                call.handover.withdraw()
            return 0
        if call.handover is not None:
            try:
                call.handover.give_back()
            except CudaError as error:
                driver.fail(f"CudaError: {error}")
                call.error = error
                return 0
        call.result = driver.result()
        return 0

    cdef int _forget(self, Call call) except -1:
        """Stop using the application's buffer."""
        self.pending = None
        self.port.arrival.arrays = NULL
        self.port.vectors.finite = UNKNOWN
        self.port.contribution.forget()
        self.last_vector = call.vector
        call.vector = None
        return 0

    cdef void _abandon(self, Served collective) noexcept nogil:
        """Stop using the application's vector in a call that an exception has interrupted."""
        cdef bint ended
        self.port.lock_when_copied()
        self.steps.interrupt()
        ended = self._drain(collective)
        if not ended:
            self.port.exchange.leave()
        self.steps.interrupted(ended)
        pthread_mutex_unlock(&collective.lock)

    cdef bint _drain(self, Served collective) noexcept nogil:
        """Wait for messages that use the application's buffer; return whether all are complete.

        Running members complete them soon; this rank waits at most 1 s for a stopped one. Then the
        call's vector is kept, and no change is computed relative to its content.
        """
        cdef long long end = now() + SECOND
        if self.steps.begun:
            self.port.exchange.divert()
        while (self.steps.begun and self.port.exchange.uses(self.port.vectors.of[X])
               and (<Driver>collective).error == 0):
            if now() > end:
                return False
            self.port.exchange.progress()
            self.port.yield_lock()
        return True

    cdef bint has_started(self) noexcept nogil:
        """Return whether the application has started a call that is not complete."""
        return self.awaits or self.port.contribution.present

    # A call whose vector is arriving from a device

    cdef void begin_awaited(self, Served collective) noexcept nogil:
        """Begin the started call if its vector can be used; until then this rank is passive.

        If the vector will never arrive, the call is complete.
        """
        if (self.port.copying or self.steps.operations.failed >= 0
                or not self.port.arrival.handover.checked()):
            return
        self.awaits = False
        if self.port.arrival.handover.error != 0:
            self.steps.done = True
            return
        self.port.vectors.finite = self.port.arrival.handover.finite
        self.port.arrival.arrays = self.awaited_arrays
        collective.give(CALL, self.awaited_arrays, self.awaited_weight)

    cdef bint _withdraw(self, Served collective) noexcept nogil:
        """Withdraw a started call that has not begun; return whether there was one."""
        cdef bint awaited
        pthread_mutex_lock(&collective.lock)
        awaited, self.awaits = self.awaits, False
        pthread_mutex_unlock(&collective.lock)
        return awaited

    cdef void look_for_errors(self) noexcept nogil:
        """Ask the device whose vector is awaited, if any, whether it has failed."""
        self.looked = now()
        if self.port.arrival.handover is not None:
            self.port.arrival.handover.look_for_errors()
        self.port.space.error()


cdef int give_back_interrupted(Handover handover) except -1:
    """Give the vector back to the application as it is; the next call raises the device's error."""
    try:
        handover.give_back()
    except CudaError:
        pass
    return 0
