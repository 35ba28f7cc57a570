"""One rank of a collective over MPI: it executes what the rank's protocol decides.

It consists of parts: a port moves vectors, a tree carries control messages, an agreement gathers
what all ranks have entered, a caller makes the application's calls, a waiter waits in them, a stall
reporter says for which ranks. Each collective has a lock, held while its state advances. One mutex
serializes all MPI calls and is held for nothing else. No MPI call blocks.
"""

from libc.string cimport strlen
from mpi4py import MPI
from mpi4py.libmpi cimport MPI_ERR_NO_MEM, MPI_Comm
from mpi4py.MPI cimport Comm

from collectives.engine.agreement cimport Agreement
from collectives.engine.calls cimport CAUGHT_UP, DONE, OVER, SETTLED, Caller, new_result
from collectives.engine.control_tree cimport ControlTree
from collectives.engine.deaths cimport revoke
from collectives.engine.inquiry cimport Inquiry
from collectives.engine.node_memory cimport NodeMemory
from collectives.engine.ports cimport EnginePort
from collectives.engine.served cimport Served, Waiting
from collectives.engine.stalls cimport StallReporter
from collectives.engine.waiting cimport Waiter
from collectives.exchange.exchange cimport Exchange
from collectives.exchange.mutex cimport (
    mpi_mutex,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from collectives.memory.layout cimport Layout
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.all_ranks cimport AGREEING, CLOSE, JOIN, OUTSIDE
from collectives.protocols.contribution cimport SCRATCH
from collectives.protocols.rank cimport RankProtocol

from collectives.errors import ClosedError, CollectiveError, RankDiedError, RankFailedError
from collectives.process import check_owner
from collectives.survival import name_dead
from collectives.topology import activation_peers

cdef extern from "Python.h" nogil:
    unsigned long PyThread_get_thread_ident()

cdef extern from "<unistd.h>" nogil:
    int getpid()

cdef enum:
    # Callers yield often if a vector has at least this many bytes, because its average takes long.
    LONG = 524288
    # Polls between two tests for questions while work is in flight: these are rare and not urgent.
    POLLS_TO_ANSWER = 16

# Whether this process is a fork of the one that loaded this module: spares a system call per test.
cdef bint forked = False


def note_fork():
    """Note that this process is a fork; see `forked`."""
    global forked
    forked = True


cdef class Driver(Served):
    """One rank's part in a collective: operations of all ranks, and the calls of subclasses.

    A subclass creates the protocol, port and tree for its calls, and passes them to `drive`.

    Args:
        control, data: communicators that only this collective uses; see `tags.pxd`.
        like: list of arrays with the dtypes and lengths of those averaged; `single`: whether users
            pass one array rather than a list.
        cores_per_rank: cores that the ranks of this node may use, for each of them.
        identity, stall, abort: see `StallReporter`.
        make_space, by_value: see `Layout`.
        by_messages: see `Exchange`.
        sharing: whether to average in memory that the ranks of a node share, if possible.
    """

    def __init__(self, Comm control, Comm data, like, *, identity, bint single,
                 double cores_per_rank, double stall, double abort, wire_dtype=None,
                 make_space=None, by_value=(), bint by_messages=True, bint sharing=False):
        self.pid = getpid()
        self.rank, self.size = control.Get_rank(), control.Get_size()
        self.dimensions = len(activation_peers(self.rank, self.size))
        self.layout = Layout(
            [array.dtype.name for array in like], [array.size for array in like], single,
            make_space, by_value)
        self.communicators[0], self.communicators[1] = control.ob_mpi, data.ob_mpi
        self.exchange = Exchange(data, self.layout, wire_dtype, by_messages)
        self.reduction = self.exchange.reduction
        self.vectors = HostVectors(self.layout)
        self.vectors.allocate(SCRATCH, 1)
        self.waiter = Waiter(cores_per_rank, self.layout.size >= LONG)
        self.node = NodeMemory(self.rank, self.size, sharing, self.waiter.spins)
        self.stalls = StallReporter(
            control, Inquiry(data), identity=identity, stall=stall, abort=abort)
        self.stalls.caller = PyThread_get_thread_ident()  # until another thread calls

    cdef int drive(self, RankProtocol steps, EnginePort port, ControlTree tree,
                   weighing=None) except -1:
        """Execute a protocol's steps by this port, and send control messages along this tree."""
        self.steps, self.protocol, self.contribution = steps, steps.operations, steps.contribution
        if weighing is not None:
            self.contribution.weigh_by(weighing[0], weighing[1], weighing[2])
        self.port, self.tree = port, tree
        port.lock = &self.lock
        port.number = port.reduction.number = tree.number = self.number
        steps.attach(port)
        self.stalls.protocol = self.protocol
        self.agreement = Agreement(self.stalls.control, steps, self.stalls.inquiry)
        self.caller = Caller(steps, port, self.waiter)
        return 0

    # What subclasses override or extend

    cdef void advance(self) noexcept nogil:
        """Do everything that can be done without waiting; messages have been received already."""
        cdef int steps
        if self.caller.awaits:
            self.begin_awaited()
        if not self.port.copying:
            steps = self.steps.advance()
            self.reduction.progress_count += steps  # exchanges have increased it meanwhile
        if self.steps.gathers:
            self.gather()

    cdef bint is_busy(self) noexcept nogil:
        """Return whether work is in flight."""
        return self.caller.awaits or self.steps.is_busy()

    cdef int begin(self, int what) except -1 nogil:
        self.enter_operation(what)
        return 0

    cdef int give(self, int what, char **arrays, double weight) except -1 nogil:
        return self.caller.give(self, what, arrays, weight)

    cdef void begin_awaited(self) noexcept nogil:
        """Begin the started call if the vector that it awaits can be used."""
        self.caller.begin_awaited(self)

    cdef result(self):
        """Return the `Result` of the call that is complete."""
        version = self.steps.called + self.protocol.base
        everyone = tuple(range(self.size))
        return new_result(
            (version, self.contribution.finite, version, everyone, self.steps.weight, True))

    cdef counts(self):
        """Return how many versions were executed, how many passively, and counts by staleness."""
        return 0, 0, ()

    cdef bint misses(self, int goal) noexcept nogil:
        """Return whether the caller waits for a rank that makes no calls."""
        return False

    cdef missing_error(self):
        """Return the error to raise if the caller waits for a rank that makes no calls."""

    cdef long long calls_made(self) noexcept nogil:
        """Return how many calls the application has made."""
        return self.protocol.version + self.protocol.base

    cdef void describe_call(self, long long *answer) noexcept nogil:
        """Fill in an answer: number of calls, next version, whether in a call."""
        answer[0] = self.calls_made()
        answer[1] = 0
        answer[3] = False

    cdef bint is_joining(self) noexcept nogil:
        """Return whether this rank is in join()."""
        return self.protocol.joined or self.stalls.purpose == JOIN

    cdef why_missing_in_call(self, long long *answer, operation, elsewhere):
        """Return why a rank that a call waits for is missing; None if it is not.

        Args:
            answer: the missing rank's answer.
            operation, elsewhere: in words, the operation that the rank is in, if any, or else what
                it does.
        """
        return operation or (None if answer[3] else elsewhere)

    def _waits_in_call(self):
        """Return a description of what a call waits in, and the ranks that it waits for."""
        return f"call {self.calls_made()}", range(self.size)

    def _waits_in(self):
        """Return a description of what the application waits in, and the ranks it waits for."""
        return self.stalls.waits_in(self)

    # Progress

    cdef bint progress(self) noexcept nogil:
        if self.bereft:
            self.busy = False
            return False
        self.layout.space.attach()
        if self.size > 1:
            self.exchange_control_messages()
        elif self.protocol.stage == AGREEING:
            self.agreement.agree_alone(self.stalls.purpose, self.calls_made())
        self.advance()
        if self.reduction.error != 0:
            self.error = self.reduction.error
        if self.error != 0 and self.error != MPI_ERR_NO_MEM and revoke != NULL:
            self.mourn()
        elif self.error != 0 and self.protocol.failed < 0:
            self.tree.fail(
                self.rank, b"no memory is left for messages or vectors"
                if self.error == MPI_ERR_NO_MEM else b"an MPI function has failed")
        self.busy = self.is_busy()
        return self.busy

    cdef void mourn(self) noexcept nogil:
        """Note that a rank has died, and have every rank note it; nothing more is communicated."""
        cdef MPI_Comm communicator
        self.bereft = True
        pthread_mutex_lock(&mpi_mutex)
        for communicator in self.communicators:
            revoke(communicator)
        pthread_mutex_unlock(&mpi_mutex)

    cdef void exchange_control_messages(self) noexcept nogil:
        """Receive and send control messages, questions and agreements."""
        pthread_mutex_lock(&mpi_mutex)
        self.tree.receive()
        self.tree.send_due()
        self.polls += 1
        if not self.busy or self.polls % POLLS_TO_ANSWER == 0:
            if self.stalls.inquiry.progress():
                self.describe_call(self.stalls.inquiry.answer)
                self.stalls.complete_answer(self.is_joining())
                self.stalls.inquiry.reply_to_asker()
            if self.stalls.inquiry.error != 0:
                self.error = self.stalls.inquiry.error
        if self.agreement.counting or self.protocol.stage == AGREEING and not self.steps.gathers:
            if self.agreement.look(self.stalls.purpose, self.calls_made()):
                self.reduction.progress_count += 1
                self.tree.send_due()
            if self.agreement.error != 0:
                self.error = self.agreement.error
        pthread_mutex_unlock(&mpi_mutex)
        if self.tree.error != 0:
            self.error = self.tree.error

    cdef bint is_in_memory(self) noexcept nogil:
        return self.steps.begun and self.exchange.is_in_memory()

    cdef void progress_in_memory(self) noexcept nogil:
        self.layout.space.attach()
        self.advance()

    cdef long long progressed(self) noexcept nogil:
        return self.reduction.progress_count

    cdef long long busy_ns(self) noexcept nogil:
        return self.reduction.busy_ns + self.port.copying_ns

    cdef bint is_copying(self) noexcept nogil:
        return self.port.copying

    cdef void gather(self) noexcept nogil:
        """Begin to gather which operation every rank is in, if that is due."""
        self.steps.gathers = False
        self.port.entered()
        if self.size > 1:
            pthread_mutex_lock(&mpi_mutex)
            self.agreement.begin(self.stalls.purpose, self.calls_made())
            pthread_mutex_unlock(&mpi_mutex)
            if self.agreement.error != 0:
                self.error = self.agreement.error

    cdef void enter_operation(self, int operation) noexcept nogil:
        self.steps.enter(operation)
        self.gather()

    # What callers wait for

    cdef bint reached(self, int goal) noexcept nogil:
        if goal == DONE:
            return self.steps.done
        if goal == SETTLED:
            return (self.steps.done or self.protocol.broken
                    or self.caller.awaits and self.protocol.failed >= 0)
        if goal == OVER:
            return self.protocol.stage == OUTSIDE
        if goal == CAUGHT_UP:
            return self.steps.has_caught_up()
        return self.protocol.may_leave() and self._all_sent() and self.agreement.is_over()

    cdef bint _all_sent(self) noexcept nogil:
        cdef bint all
        pthread_mutex_lock(&mpi_mutex)
        all = self.tree.all_sent()
        pthread_mutex_unlock(&mpi_mutex)
        return all

    cdef void begin_waiting(self) noexcept nogil:
        if self.is_joining():
            self.stalls.begin_join()

    cdef void end_waiting(self) noexcept nogil:
        self.stalls.end_join()

    cdef int look_for_stalls(self, Waiting *waiting, long long time) except -1:
        return self.stalls.look(self, waiting, time)

    cdef void look_for_errors(self) noexcept nogil:
        self.caller.look_for_errors()

    cdef bint is_failed(self, int goal) noexcept nogil:
        """Return whether a rank has failed, so that a call does not wait any longer."""
        return self.protocol.failed >= 0 and self.is_calls(goal)

    cdef bint is_calls(self, int goal) noexcept nogil:
        """Return whether a call waits for this goal, rather than close()."""
        return goal == DONE or goal == CAUGHT_UP

    cdef bint is_broken(self, int goal) noexcept nogil:
        """Return whether an error of this engine prevents the goal; leaving needs no memory."""
        return self.error != 0 and (self.error != MPI_ERR_NO_MEM or self.is_calls(goal))

    cdef bint is_in_vain(self, int goal) noexcept nogil:
        return self.is_broken(goal) or self.is_failed(goal) or self.misses(goal)

    cdef int raise_failure(self, int goal) except -1:
        if self.is_broken(goal):
            raise self.engine_error()
        raise self.failure_error() if self.is_failed(goal) else self.missing_error()

    # Errors

    cdef engine_error(self):
        """Return the error of this rank's engine, which is permanent."""
        self.said_error = True
        if self.error == MPI_ERR_NO_MEM:
            return CollectiveError(f"rank {self.rank} has no memory left for messages or vectors")
        if self.bereft:
            return RankDiedError(
                f"{name_dead(self.stalls.control)} has ended, so only abandon() is allowed here")
        return CollectiveError(f"rank {self.rank}: {MPI.Get_error_string(self.error)}")

    cdef failure_error(self):
        """Return the error that reports another rank's failure."""
        text = self.tree.failure[:strlen(self.tree.failure)]
        text = text.decode(errors="ignore")  # it may be truncated
        return RankFailedError(
            f"rank {self.protocol.failed} failed, so only close() is allowed here: {text}")

    def fail(self, text):
        """Tell all ranks that this one has failed; only close() is allowed then."""
        cdef bytes encoded = text.encode(errors="replace")
        cdef const char *characters = encoded
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.tree.fail(self.rank, characters)
            self.progress()
            pthread_mutex_unlock(&self.lock)

    # Entering a call

    cdef int check_owner(self) except -1:
        """Raise in a forked child."""
        if forked:
            check_owner(self.pid)
        return 0

    cdef int check_usable(self) except -1:
        """Raise if no call can be made."""
        self.check_owner()
        if self.closed or self.protocol.operation == CLOSE:
            raise ClosedError("this collective is closed")
        if self.error != 0:
            raise self.engine_error()
        if self.protocol.failed == self.rank:
            raise ClosedError("this rank failed in an earlier call: only close() is allowed")
        if self.protocol.failed >= 0:
            raise self.failure_error()
        if self.protocol.broken:
            raise ClosedError("the ranks disagreed in an earlier operation: "
                              "only close() is allowed")
        return 0

    cdef int enter_call(self) except -1:
        """Enter a call: raise in a forked child, or if another call is in progress."""
        self.check_owner()
        self.caller.guard.take()
        self.stalls.caller = PyThread_get_thread_ident()
        return 0
