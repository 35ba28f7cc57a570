"""Calls that a method's own protocol executes by messages, and operations of all ranks."""

from cpython.buffer cimport PyBUF_WRITABLE
from mpi4py.MPI cimport Comm

from collectives.engine.collective cimport NativeCollective
from collectives.engine.calls cimport CALL
from collectives.engine.control_tree cimport ControlTree
from collectives.engine.ports cimport EnginePort
from collectives.engine.waiting cimport serve_others
from collectives.exchange.clock cimport now
from collectives.exchange.mutex cimport pthread_mutex_lock, pthread_mutex_unlock
from collectives.memory.layout cimport UserVector
from collectives.protocols.all_ranks cimport AllRanksProtocol
from collectives.protocols.contribution cimport ContributionProtocol
from collectives.protocols.rank cimport RankProtocol


cdef class ProtocolCalls(NativeCollective):
    """One rank of a method with a protocol for its calls; a subclass drives that protocol.

    Args:
        control, data, like, others: see `Driver`.
    """

    def __init__(self, Comm control, Comm data, like, **others):
        cdef AllRanksProtocol protocol
        cdef ContributionProtocol contribution
        NativeCollective.__init__(self, control, data, like, **others)
        protocol = AllRanksProtocol(self.dimensions)
        contribution = ContributionProtocol(self.vectors, protocol)
        self.drive(
            RankProtocol(protocol, contribution),
            EnginePort(self.exchange, self.vectors, contribution, self.rank, self.size),
            ControlTree(control, protocol))

    def __del__(self):
        self.let_go()

    # What subclasses override

    cdef void let_go(self) noexcept:
        """Free what protocols and their port keep as they refer to each other."""

    cdef int _before_call(self) except -1:
        """Raise if the application cannot make a call."""
        return 0

    cdef UserVector _open(self, vector):
        """Open the application's vector; tell all ranks if it is invalid."""
        try:
            return UserVector(vector, self.layout, PyBUF_WRITABLE)
        except (TypeError, ValueError, MemoryError) as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise

    cdef int _do(self, int what, char **arrays, long long calls) except -1 nogil:
        """Execute the application's request, and wait for it; the lock is held."""
        return 0

    cdef void _forget_user(self) noexcept nogil:
        """Stop using the application's buffer; the lock is held."""

    # What callers wait for, and how they report it

    cdef bint is_calls(self, int goal) noexcept nogil:
        return goal == ANSWERED or goal == PAUSED or NativeCollective.is_calls(self, goal)

    cdef void describe_call(self, long long *answer) noexcept nogil:
        NativeCollective.describe_call(self, answer)
        answer[3] = not self.reached(ANSWERED)

    # Leaving

    cdef int leave_others(self) except -1 nogil:
        self.announce_leaving()
        self.waiter.wait(self, QUIET)
        return 0

    cdef int end_messages(self) except -1 nogil:
        if not self.messages.ending:
            self.messages.end()
        self.waiter.wait(self, DRAINED)
        return 0

    cdef bint has_left(self) noexcept nogil:
        return self.messages.ending and self.reached(DRAINED)

    # What Python calls

    def check(self, vector):
        """Raise, and tell all ranks, if this vector cannot be averaged here or now."""
        self.check_usable()
        ProtocolCalls._open(self, vector)

    def settle(self):
        """Complete a call that an exception interrupted."""
        self._use_protocol(SETTLE)

    def pause(self, bint paused):
        """Begin nothing new between ranks, and wait for what this one has begun; or resume."""
        self._use_protocol(PAUSE if paused else RESUME)

    cdef int _use_protocol(self, int what, vector=None, long long calls=0) except -1:
        """Execute the application's request, and wait for it."""
        cdef UserVector opened = None
        cdef char **arrays = NULL
        cdef long long began = now()
        self._before_call()
        self.enter_call()
        self.lent = False
        try:
            if what == CALL or vector is not None:
                opened = self._open(vector)
                arrays = opened.arrays
            with nogil:
                pthread_mutex_lock(&self.lock)
                try:
                    if arrays != NULL or what == SETTLE:
                        # A call that an exception interrupted is completed first.
                        self.waiter.wait(self, ANSWERED)
                    self._do(what, arrays, calls)
                finally:
                    self._forget_user()
                    self.caller.count_time(self, what, began, self.calls_made() - 1)
                    pthread_mutex_unlock(&self.lock)
                serve_others(self)
        finally:
            if self.lent:
                # Kept until the next call: messages of an interrupted one may still be pending.
                self.caller.last_vector = opened
            self.caller.guard.taken = False
        return 0
