# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The progress engine: it drives the protocol and the exchanges over MPI, without the GIL.

A rank whose application computes is served by one native thread; an application that waits in a
call drives its collective itself. Each collective has a lock, held while its state advances; one
mutex is around all MPI calls, held for nothing else. No MPI call blocks.
"""

import logging
import os
import threading

from cpython.buffer cimport PyBUF_WRITABLE
from cpython.exc cimport PyErr_CheckSignals
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset, strlen, strncpy
from mpi4py.libmpi cimport (
    MPI_ANY_TAG,
    MPI_LONG_LONG,
    MPI_REQUEST_NULL,
    MPI_STATUS_IGNORE,
    MPI_STATUSES_IGNORE,
    MPI_SUCCESS,
    MPI_UNDEFINED,
    MPI_Comm,
    MPI_Iallgather,
    MPI_Isend,
    MPI_Recv_init,
    MPI_Request,
    MPI_Request_free,
    MPI_Start,
    MPI_Test,
    MPI_Testsome,
)
from mpi4py.MPI cimport Comm

from collectives.exchange.doubling cimport PHASES
from collectives.exchange.exchange cimport Exchange
from collectives.protocols.groups cimport Groups
from collectives.engine.inquiry cimport ANSWER, Inquiry
from collectives.engine.mailbox cimport Mailbox
from collectives.memory.allocation cimport Segment, allocate
from collectives.exchange.mutex cimport (
    mpi_mutex,
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_t,
    pthread_mutex_trylock,
    pthread_mutex_unlock,
)
from collectives.engine.rhythm cimport LONGEST_PAUSE, Rhythm
from collectives.exchange.clock cimport now, sleep
from collectives.exchange.shared cimport Shared
from collectives.exchange.reduction cimport Reduction
from collectives.memory.layout cimport Layout, UserVector, weight_of
from collectives.protocols.peers cimport PeerProtocol
from collectives.protocols.all_ranks cimport (
    AGREEING,
    AVERAGE,
    CLOSE,
    FINISH,
    JOIN,
    LEAVING,
    LOAD,
    REDUCING,
    NONE,
    OUTSIDE,
    SYNC,
    SYNCHRONIZE,
)
from collectives.protocols.wait_avoiding cimport (
    HELD,
    IDLE,
    RUNNING,
    SHARED,
    WaitAvoidingProtocol,
    drawn,
)

from mpi4py import MPI

from collectives.agreement import by_value, name_ranks
from collectives.errors import (
    ClosedError,
    CollectiveError,
    DisagreementError,
    RankFailedError,
)
from collectives.process import check_owner, end_job
from collectives.result import Result
from collectives.settings import checked_weight
from collectives.topology import activation_peers, propagation_bound

cdef extern from "Python.h" nogil:
    unsigned long PyThread_get_thread_ident()

cdef extern from "<sched.h>" nogil:
    int sched_yield()
    unsigned int SCHED_OTHER

cdef extern from "<sys/prctl.h>" nogil:
    int prctl(int, unsigned long)
    int PR_SET_TIMERSLACK

cdef extern from "<sys/syscall.h>" nogil:
    long SYS_sched_getattr, SYS_sched_setattr

cdef extern from "<unistd.h>" nogil:
    int getpid()
    long syscall(long, ...)

cdef struct sched_attr:
    unsigned int size, policy
    unsigned long long flags
    int nice
    unsigned int priority
    unsigned long long runtime, deadline, period

cdef enum:
    MAX_DIMENSIONS = 32
    MAX_COLLECTIVES = 256
    # A message on the activation tree: a version and its ops; or one of these for the version: no
    # more comes from here; or a rank has failed, which rank, and its text in what is left; or
    # versions are free to start, and after how many operations.
    FIN = -1
    FAILED = -2
    FREED = -3
    MESSAGE = 32
    TEXT = 8 * (MESSAGE - 2)
    # What a rank gathers from all: operation, t, the version to load or the purpose, questions
    # asked, the rank of whose failure it has heard, and how many calls it has made.
    RECORD = 6
    # Staleness is counted up to this many versions, and what exceeds it together.
    MOST_STALENESS = 1000
    # In an answer: what the operation is for.
    PURPOSE_SHIFT = 8

cdef enum:
    # What a caller waits for.
    VECTORS_HELD
    DONE
    OVER
    CAUGHT_UP
    SETTLED
    LEFT
    # Of a mailbox: the application's call is over; nothing is under way that this rank has begun,
    # in close() and before; all messages have come.
    ANSWERED
    QUIET
    PAUSED
    EMPTY

cdef enum:
    # What the application wants, beside the synchronous operations.
    CALL = 100
    PUBLISH
    # Of a mailbox, beside these and JOIN.
    PAUSE
    RESUME
    CATCH_UP
    SETTLE
    HAND_IN

cdef enum:
    # With work in flight, how often it looks without a pause, and by how much the pauses grow.
    BUSY_POLLS = 50
    BUSY_PAUSE = 200
    SLICE = 100000
    # A waiting caller's.
    SPIN_BEFORE_SLEEP = 500000
    # Bytes of a vector whose average takes so long that a caller yields often.
    LONG = 524288
    LONGEST_WAIT = 500000
    LOOK_FOR_SIGNALS = 100000000
    # How often it looks for questions while it is busy: they are rare and not urgent.
    POLLS_TO_ANSWER = 16

cdef long long SECOND = 1000000000
# How long who asks waits for answers, on a machine that is busy.
cdef long long ANSWERING = 3 * SECOND
# The limits on waiting are counted in nanoseconds, of which no more than 292 years can be.
cdef double LONGEST_LIMIT = 9e9

OPERATIONS = {SYNC: "a periodic synchronization", AVERAGE: "average()",
              SYNCHRONIZE: "synchronize()", CLOSE: "close()", LOAD: "load()", JOIN: "join()",
              FINISH: "join()"}
# Those that several operations together may be for.
PURPOSES = {OPERATIONS[what]: what for what in (AVERAGE, SYNCHRONIZE, LOAD, JOIN)}

log = logging.getLogger("collectives")

# What a rank does that cannot come because it waits for others.
ELSEWHERE = "in join() of another collective"

# In whose join() a thread of this process waits, and which thread; 0: in none.
cdef long long joining = 0
cdef unsigned long joining_in = 0

# Whether this process is a fork of the one that loaded this module.
cdef bint forked = False

def _note_fork():
    global forked
    forked = True

os.register_at_fork(after_in_child=_note_fork)


def _calls(long long count):
    """Return "1 call" or "12 calls"."""
    return f"{count} call{'' if count == 1 else 's'}"


def _operation(kind, calls, detail):
    """Return what a rank has entered, after how many calls, in words."""
    what = f"load() of version {detail}" if kind == LOAD else OPERATIONS[detail or kind]
    return f"{what} after {_calls(calls)}"


cdef class Call:
    """A call that has been started: `test()` and `wait()` complete it.

    The vector given belongs to the collective until then.
    """
    cdef Collective collective
    cdef UserVector vector
    cdef double weight
    cdef object result, error

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
        cdef Collective collective = self.collective
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
    cdef bint taken

    def __enter__(self):
        if self.taken:
            raise RuntimeError(
                "this collective is in a call already: a signal handler or another thread cannot "
                "make one as well"
            )
        self.taken = True

    def __exit__(self, *exception):
        self.taken = False


cdef struct Waiting:
    # When a caller began to wait, when something last moved, and when it looked for signals.
    long long began, progressed, looked
    # When it asked who is missing (0: not yet), and after how long it looks for a circle.
    long long asked, circles
    # When it last said who is missing (0: not yet), and whether it has as a warning.
    long long said
    bint warned


cdef class Collective:
    """One wait-avoiding group allreduce on this rank: its vectors, messages and protocol."""
    cdef readonly int rank, size, pid
    cdef readonly bint closed
    cdef readonly Layout layout
    # Why this rank has no memory that others can map.
    cdef readonly str not_shared
    cdef WaitAvoidingProtocol protocol
    cdef Exchange exchange
    cdef Reduction reduction
    cdef Groups groups
    cdef Inquiry inquiry
    # Of a collective whose ranks send each other messages: its calls are the mailbox's.
    cdef readonly Mailbox mailbox
    cdef Rhythm rhythm
    cdef Comm control, data
    cdef MPI_Comm control_comm
    cdef pthread_mutex_t lock
    cdef bint conserving, oversubscribed, no_progress_thread
    # What ranks contribute are sums that grow from 0 after each average over all ranks that is
    # published, and a late call gets the newest mean as it is.
    cdef bint summing
    # Nanoseconds without progress after which a caller reports a stall and ends the job; 0: never.
    cdef long long stall, abort
    # The vectors' state under the conserving rule: the snapshot is still what was returned; or
    # nothing that a change could be taken against was ever returned or published.
    cdef bint unchanged, unreturned
    # The snapshot holds a finite vector, else its weight is 0; the application's last vector was
    # finite.
    cdef bint filled, finite
    # The weight of what the application gives now, and of what it last published. A rank that has
    # joined is `out` once its weight is 0 for good.
    cdef double weight_given, weight_published
    cdef bint out
    # An exchange is under way, or done and its mean not yet taken.
    cdef bint begun
    # Of ranks that share memory: other ranks may begin this one's part; how many operations have
    # moved data, which with the version makes the number of an exchange.
    cdef Shared shared
    cdef bint opened
    cdef long long opened_for, data_ops
    # What the application publishes is in its own memory, until the exchange has taken it over.
    cdef bint lent
    # An average over all ranks goes on with equal weights, since nobody's vector has any. What this
    # rank gives to it then: a finite vector, or nothing; for average(), from the application's
    # memory.
    cdef bint weightless, gives, gives_own
    # What average() takes from this rank is there already, since its call was interrupted.
    cdef bint contributed
    # The application is in a call, in publish(), past publishing in a call or operation, and past
    # everything. `copying`: a thread is at the application's memory without the lock.
    cdef bint calling, holding, published, done, copying
    # The application's memory; not there once an exception has ended its part.
    cdef char **x
    cdef bint has_x
    cdef Call pending
    # Until the next call: messages of an interrupted one may still be to and from its memory.
    cdef UserVector last_vector
    cdef int waiting_callers, error, disagreed
    cdef unsigned int polls
    cdef bint busy  # as the last poll left it
    # Python is in a call that has not returned, or in close(); which thread called last.
    cdef Guard guard
    cdef bint closing
    cdef unsigned long caller
    # What tells collectives apart, the same on all ranks.
    cdef long long identity
    # The vectors: snapshot; result, or under the conserving rule x_returned, which is kept only
    # once the snapshot is no longer `unchanged` since it was returned; what average() takes.
    cdef char *memory
    cdef char *snapshot
    cdef char *scratch
    cdef char **snapshot_arrays
    cdef char **result_arrays
    cdef char **scratch_arrays
    # The activation tree
    cdef int dimensions
    cdef int destination[MAX_DIMENSIONS]
    cdef int source[MAX_DIMENSIONS]
    cdef MPI_Request receives[MAX_DIMENSIONS]
    cdef MPI_Request sends[MAX_DIMENSIONS]
    cdef long long received[MAX_DIMENSIONS][MESSAGE]
    cdef long long sent[MAX_DIMENSIONS][MESSAGE]
    cdef char failure[TEXT]
    # Agreements
    cdef MPI_Request gather
    cdef long long record[RECORD]
    cdef long long *records
    cdef long long *pairs
    cdef long long loading, joined_at
    # What each missing rank did when this one last said so.
    cdef dict said
    # All ranks leave, and gather once more.
    cdef bint counting
    # What all ranks together are in that needs several operations; NONE: in just one.
    cdef int purpose
    cdef int window, sync_tag
    cdef double weight
    # What the last call took: its version, the newest result, and that one's group (none: all).
    cdef int *taken
    cdef int taken_count
    cdef long long taken_version, taken_source
    cdef double taken_weight
    # Statistics: counts, and nanoseconds
    cdef readonly long long calls, timely, synchronizations, versions, passive, nonfinite
    cdef long long calls_ns, waiting_ns, copy_began, copying_ns, published_version
    cdef long long staleness[MOST_STALENESS + 1]

    def __init__(self, Comm control, Comm data, like, *, long long identity, bint single,
                 int group_size, sync_period, bint fixed, bint passive, bint conserving,
                 bint summing, drawing_seed, bint oversubscribed, double stall, double abort,
                 wire_dtype, bint sharing):
        cdef int k
        cdef UserVector opened
        self.identity = identity
        self.guard = Guard()
        self.control = control
        self.data = data
        self.control_comm = control.ob_mpi
        self.rank = control.Get_rank()
        self.size = control.Get_size()
        self.pid = getpid()
        self.conserving = conserving
        self.summing = summing
        self.oversubscribed = oversubscribed
        self.stall = <long long>(min(stall, LONGEST_LIMIT) * SECOND)
        self.abort = <long long>(min(abort, LONGEST_LIMIT) * SECOND)
        self.layout = Layout(
            [array.dtype.name for array in like], [array.size for array in like], single)
        self.rhythm = Rhythm()
        self.exchange = Exchange(data, self.layout, wire_dtype)
        self.reduction = self.exchange.reduction
        self.groups = Groups(self.rank, self.size, group_size, fixed)
        peers = activation_peers(self.rank, self.size)
        self.dimensions = len(peers)
        self.protocol = WaitAvoidingProtocol(self.dimensions, group_size, sync_period, passive)
        if drawing_seed is not None:
            self.protocol.draw(self.rank, self.size, drawing_seed)
        # Engines drift apart by no more than the bound, so tags further apart are never confused:
        # those of a group do so by one version only, and groups that are fixed have no others.
        self.window = 4 * propagation_bound(self.size, group_size) + 4 if group_size > 1 else 1
        self.sync_tag = self.window * PHASES
        self.inquiry = Inquiry(data, self.sync_tag + 2 * PHASES)
        pthread_mutex_init(&self.lock, NULL)
        self._allocate_vectors(sharing)
        self.weight_given = 1
        self.published_version = -1
        opened = UserVector(like[0] if single else like, self.layout, 0)
        self._replace(opened.arrays)
        self._let_count_once()
        self.gather = MPI_REQUEST_NULL
        for k in range(MAX_DIMENSIONS):
            self.receives[k] = MPI_REQUEST_NULL
            self.sends[k] = MPI_REQUEST_NULL
        for k, (destination, source) in enumerate(peers):
            self.destination[k] = destination
            self.source[k] = source

    @property
    def handle(self):
        """Where other ranks of the node find this one's memory; None if none can be shared."""
        return None if self.shared is None else (<Segment>self.shared.segments[0]).handle

    @property
    def shares(self):
        """Whether this rank and others of its node use each other's memory."""
        return self.shared is not None and self.shared.works

    def map(self, handles):
        """Map the memory of the node's ranks, a dict from them to their handles; OSError if not."""
        self.shared.map(handles)

    def share(self):
        """Exchange vectors in the memory that all ranks of the node have mapped."""
        self.shared.use()

    def compress_from_initial(self):
        """All ranks have the same initial vector: compressed ones are told from it."""
        self.reduction.remember(self.snapshot)

    def listen(self):
        """Begin to listen for activations, once all ranks have come so far."""
        cdef int k
        pthread_mutex_lock(&mpi_mutex)
        for k in range(self.dimensions):
            self._check(MPI_Recv_init(self.received[k], MESSAGE, MPI_LONG_LONG, self.source[k],
                                      MPI_ANY_TAG, self.control_comm, &self.receives[k]))
            self._check(MPI_Start(&self.receives[k]))
        pthread_mutex_unlock(&mpi_mutex)
        self.protocol.shares = (
            self.shared is not None and self.shared.works and self.protocol.passive
            and self.protocol.exchanges)
        with nogil:
            pthread_mutex_lock(&self.lock)
            self._renumber()
            self.protocol.run()
            self._open()
            pthread_mutex_unlock(&self.lock)

    def __dealloc__(self):
        free(self.memory)
        free(self.scratch)
        free(self.records)
        free(self.taken)
        free(self.snapshot_arrays)

    cdef int _allocate_vectors(self, bint sharing) except -1:
        """Snapshot and result vector, in one piece of memory, which other ranks can map.

        The scratch vector takes no memory before the first average() touches it.
        """
        cdef Py_ssize_t vector = self.layout.size
        cdef char *result
        cdef int count = self.layout.count
        self.records = <long long *>calloc((RECORD + 2) * self.size, sizeof(long long))
        self.taken = <int *>calloc(self.size, sizeof(int))
        self.snapshot_arrays = <char **>calloc(3 * count, sizeof(char *))
        if self.records == NULL or self.taken == NULL or self.snapshot_arrays == NULL:
            raise MemoryError
        self.pairs = self.records + RECORD * self.size
        self.result_arrays = self.snapshot_arrays + count
        self.scratch_arrays = self.result_arrays + count
        if sharing:
            self._make_shared()
        if self.shared is not None:
            self.snapshot = self.shared.snapshot(self.rank)
            result = self.shared.result(self.rank)
        else:
            self.memory = allocate(2 * vector)
            memset(self.memory, 0, 2 * vector)
            self.snapshot = self.memory
            result = self.memory + vector
        self.scratch = allocate(vector)
        self.layout.locate(self.snapshot_arrays, self.snapshot)
        self.layout.locate(self.result_arrays, result)
        self.layout.locate(self.scratch_arrays, self.scratch)
        return 0

    def _make_shared(self):
        """Make the memory for what this rank shares, unless the system has none that can be."""
        try:
            self.shared = Shared(
                self.reduction, self.groups, self.size, rings=not self.protocol.passive)
            self.exchange.shared = self.shared
        except (AttributeError, OSError) as error:  # memfd_create is Linux's
            self.not_shared = f"rank {self.rank} has no memory to share: {error}"

    # Progress: whoever holds the lock advances the collective's state

    cdef bint progress(self) noexcept nogil:
        """Do all that can be done without waiting; return whether work is in flight."""
        if self.size > 1:
            pthread_mutex_lock(&mpi_mutex)
            self._receive_from_the_tree()
            self._send_what_is_due()
            self.polls += 1
            if not self.busy or self.polls % POLLS_TO_ANSWER == 0:
                self._answer()
            if self.protocol.stage == AGREEING:
                self._agree()
            elif self.counting:
                self._count_questions()
            pthread_mutex_unlock(&mpi_mutex)
        elif self.protocol.stage == AGREEING:
            self._record(self.records)
            self._agreed()
        if self.protocol.vectors == SHARED:
            self._execute_shared()
        while self._step():
            pass
        self._open()
        if self.reduction.error != 0:
            self.error = self.reduction.error
        self.busy = (self._serve_mailbox() or self.begun or self.protocol.stage == AGREEING
                     or self.protocol.due != 0 or self.calling or self._is_behind())
        return self.busy

    cdef bint _serve_mailbox(self) noexcept nogil:
        """Advance the messages, if there are any; return whether some are under way."""
        cdef long long progress_count
        cdef bint busy
        if self.mailbox is None:
            return False
        progress_count = self.mailbox.progress_count
        busy = self.mailbox.progress()
        if self.mailbox.progress_count != progress_count:
            self.reduction.progress_count += 1
            self.rhythm.beat(now())
        if self.mailbox.error != 0:
            self.error = self.mailbox.error
        return busy or self.mailbox.protocol.calling

    cdef bint _step(self) noexcept nogil:
        """Take the running version, or else the application, one step on; return whether it did."""
        if self.protocol.vectors == RUNNING:
            if not self.begun:
                self._begin_version()
            if not self.exchange.progress():
                return False
            self._finish_version()
        elif not self._serve_application():
            return False
        self.reduction.progress_count += 1
        return True

    # Vectors that other ranks of the node may use

    cdef void _open(self) noexcept nogil:
        """Let other ranks execute versions for this one, where the protocol wants that."""
        if self.protocol.vectors != SHARED or self.opened:
            return
        self.opened = True
        self.opened_for = self.protocol.next
        self._describe(self.conserving, self.conserving and self.unchanged)
        self.shared.open(self.protocol.next + self.data_ops)

    cdef void _reclaim(self) noexcept nogil:
        """Let others begin nothing more, and learn what has become of the vectors."""
        cdef bint running = False
        if self.protocol.vectors != SHARED:
            return
        if self.opened:
            self.opened = False
            running = self.shared.close()
            self._note_executed(self.shared.number - self.data_ops)
            if self.protocol.next > self.opened_for:
                self.groups.find(self.protocol.next - 1 + self.protocol.base)
                self.weight = self.shared.parts[self.rank].total
                if self.shared.parts[self.rank].replaced:
                    self.filled = True
                    self.unchanged = False
        self.protocol.reclaim(running)
        if running:
            self.begun = True
            self.groups.find(self.protocol.running + self.protocol.base)
            self.exchange.resume_in_memory(
                self.snapshot_arrays if self.conserving else self.result_arrays)

    cdef void _note_executed(self, long long end) noexcept nogil:
        """Others have executed every version before this one."""
        cdef long long version
        for version in range(self.protocol.next, end):
            self._count_version(version)
        self.protocol.executed(end)

    cdef void _execute_shared(self) noexcept nogil:
        """Execute a version that has been started and that nobody has executed for this rank."""
        cdef long long number
        if not self.opened:
            return
        # Read once: others may go on to a version that nobody has started.
        number = self.shared.reached()
        if not self._is_started(number - self.data_ops):
            return
        if self.shared.needs_messages(number):
            self._reclaim()
            if self.protocol.vectors == IDLE:
                self.protocol.execute()
        elif self.shared.help(self.rank, number):
            self.reduction.progress_count += 1

    cdef inline bint _is_behind(self) noexcept nogil:
        """Whether a version has been started that shared vectors are still to be used for."""
        return self.opened and self._is_started(self._next())

    cdef inline bint _is_started(self, long long version) noexcept nogil:
        """Whether a version has been started that may be executed now."""
        return version <= self.protocol.told and self.protocol.told_ops <= self.protocol.ops

    cdef inline long long _next(self) noexcept nogil:
        """The next version to be executed for this rank."""
        if self.opened:
            return self.shared.reached() - self.data_ops
        return self.protocol.next

    cdef void _describe(self, bint in_place, bint saves) noexcept nogil:
        """Tell other ranks of the node what is to become of this rank's vectors."""
        self.shared.describe(in_place, saves, self._weight_after())

    cdef double _weight_after(self) noexcept nogil:
        """The weight of a mean that replaces the snapshot."""
        if self.protocol.passive:
            return 0 if self.out else self.weight_published
        return weight_of(self.snapshot)[0] if self.protocol.joined else 0

    cdef void _let_count_once(self) noexcept nogil:
        """Where nobody is passive what has been averaged counts no more, but for who has joined."""
        if not (self.protocol.passive or self.protocol.joined):
            self._set_weight(0)

    cdef void _renumber(self) noexcept nogil:
        """Let exchanges be numbered on from the last operation."""
        if self.shared is not None:
            self.shared.oldest = self.protocol.t + self.data_ops
            self.shared.shift = self.protocol.base - self.data_ops

    cdef inline long long _busy_ns(self) noexcept nogil:
        return self.reduction.busy_ns + self.copying_ns

    cdef inline void _check(self, int rc) noexcept nogil:
        if rc != MPI_SUCCESS:
            self.error = rc

    cdef void _receive_from_the_tree(self) noexcept nogil:
        """Take in activations, failures and FINs; the MPI mutex is held."""
        cdef int indices[MAX_DIMENSIONS]
        cdef int count = 0
        cdef int i, k
        if self.dimensions == 0:
            return
        self._check(MPI_Testsome(
            self.dimensions, self.receives, &count, indices, MPI_STATUSES_IGNORE))
        if count == MPI_UNDEFINED:
            return
        for i in range(count):
            k = indices[i]
            if self.received[k][0] == FIN:
                self.protocol.fin(k)
                continue
            if self.received[k][0] == FAILED:
                if self.protocol.failed < 0:
                    memcpy(self.failure, &self.received[k][2], TEXT)
                self.protocol.notice(<int>self.received[k][1], k)
            elif self.received[k][0] == FREED:
                self.protocol.free(self.received[k][1], k)
            else:
                self.protocol.tell(self.received[k][0], self.received[k][1], k)
            self._check(MPI_Start(&self.receives[k]))

    cdef inline unsigned int _due(self) noexcept nogil:
        return (self.protocol.due | self.protocol.notice_due | self.protocol.freed_due
                | self.protocol.fin_due)

    cdef void _send_what_is_due(self) noexcept nogil:
        """Send what is due, one message at a time on each dimension, and a FIN last."""
        cdef int k, done
        if self._due() == 0:
            return
        for k in range(self.dimensions):
            while self._due() >> k & 1:
                self._check(MPI_Test(&self.sends[k], &done, MPI_STATUS_IGNORE))
                if not done:
                    break
                if self.protocol.due >> k & 1:
                    self.protocol.due &= ~(1u << k)
                    self._send(k, self.protocol.sent[k], self.protocol.sent_ops[k])
                elif self.protocol.notice_due >> k & 1:
                    self.protocol.notice_due &= ~(1u << k)
                    self._send(k, FAILED, self.protocol.failed)
                elif self.protocol.freed_due >> k & 1:
                    self.protocol.freed_due &= ~(1u << k)
                    self._send(k, FREED, self.protocol.freed)
                else:
                    self.protocol.fin_due &= ~(1u << k)
                    self._send(k, FIN, 0)

    cdef void _send(self, int k, long long version, long long detail) noexcept nogil:
        """Send one message on a dimension; the MPI mutex is held."""
        self.sent[k][0] = version
        self.sent[k][1] = detail
        if version == FAILED:
            memcpy(&self.sent[k][2], self.failure, TEXT)
        self._check(MPI_Isend(
            self.sent[k], MESSAGE if version == FAILED else 2, MPI_LONG_LONG, self.destination[k],
            <int>(version % self.window) if version >= 0 else self.window,
            self.control_comm, &self.sends[k]))

    cdef void _answer(self) noexcept nogil:
        """Answer ranks that ask who is missing; the MPI mutex is held."""
        cdef long long answer[ANSWER]
        answer[0] = self.protocol.t
        answer[1] = self._next()
        answer[2] = self.protocol.operation
        answer[3] = self.calling
        answer[4] = 0
        if joining != self.identity and joining_in == self.caller and not self._is_joining():
            answer[4] = joining
        if self.closing and self.protocol.operation == NONE:
            answer[2] = CLOSE
        if self.mailbox is not None:
            answer[0] = self.mailbox.protocol.calls
            answer[3] = self.mailbox.protocol.calling
            answer[2] |= self.purpose << PURPOSE_SHIFT
        self.inquiry.progress(answer)
        if self.inquiry.error != 0:
            self.error = self.inquiry.error

    cdef bint _all_sent(self) noexcept nogil:
        cdef int k, done
        cdef bint all = True
        pthread_mutex_lock(&mpi_mutex)
        for k in range(self.dimensions):
            self._check(MPI_Test(&self.sends[k], &done, MPI_STATUS_IGNORE))
            all = all and done
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
        record[5] = self.protocol.t + self.protocol.base
        if self.mailbox is not None:
            record[5] = self.mailbox.protocol.calls

    cdef void _contribute(self) noexcept nogil:
        """Gather what operation every rank is in; the MPI mutex is held."""
        self._record(self.record)
        self._check(MPI_Iallgather(self.record, RECORD, MPI_LONG_LONG, self.records, RECORD,
                                   MPI_LONG_LONG, self.control_comm, &self.gather))

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
            self._send_what_is_due()

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
        self._reclaim()
        if operation != CLOSE:  # which leaves a call that was started its result
            self.taken_version = self.protocol.t
        self.protocol.enter(operation)
        if self.size > 1:
            pthread_mutex_lock(&mpi_mutex)
            self._contribute()
            pthread_mutex_unlock(&mpi_mutex)

    # Versions and averages over all ranks

    cdef void _begin_version(self) noexcept nogil:
        cdef long long version = self.protocol.running
        cdef int me = self.groups.find(version + self.protocol.base)
        cdef int tag = <int>(version % self.window) * PHASES
        cdef bint timely = self.calling and self.published and self.protocol.timely
        cdef bint bypasses = self._bypasses_snapshot()
        cdef char **target = self.x if timely else self.result_arrays
        cdef char **copy = NULL
        cdef char **saved = NULL
        self.begun = True
        self.rhythm.beat(now())
        if self.exchange.shares(self.groups.members, self.groups.count):
            self._describe(self.conserving and not bypasses,
                           self.conserving and self.unchanged and not timely)
            self.exchange.begin_in_memory(
                version + self.data_ops, False, self.groups.members, self.groups.count,
                self.x if timely else NULL, self.lent, bypasses,
                self.snapshot_arrays if self.conserving else self.result_arrays, NULL)
            return
        if self.conserving:
            target = self.x if timely else self.snapshot_arrays
            copy = self.snapshot_arrays if timely and not bypasses else NULL
            saved = self.result_arrays if self.unchanged and not timely else NULL
        self.exchange.begin(self.groups.members, self.groups.count, me, tag,
                            self.snapshot, self.x, self.lent, not (self.conserving or bypasses),
                            target, copy, saved)

    cdef inline bint _bypasses_snapshot(self) noexcept nogil:
        """Whether a version goes from the application's memory back there, and no copy is kept.

        Where nobody is passive none is needed, unless an exception ends the call meanwhile.
        """
        return self.lent and self.calling and not self.protocol.passive

    cdef void _finish_version(self) noexcept nogil:
        cdef bint bypassed = self._bypasses_snapshot()
        self._end_exchange()
        self._count_version(self.protocol.running)
        if bypassed:
            self._note_snapshot(False)
        elif self.conserving and self.weight != 0:
            self.filled = True
            self.unchanged = False
            self._set_weight(self._weight_after())
        self._let_count_once()
        self.protocol.finished()

    cdef void _count_version(self, long long version) noexcept nogil:
        cdef long long staleness = version - self.published_version
        self.versions += 1
        self.passive += staleness != 0
        self.staleness[min(staleness, MOST_STALENESS)] += 1

    cdef void _end_exchange(self) noexcept nogil:
        self.begun = False
        self.weight = self.reduction.weight
        if (self.lent and self.weight == 0 and self.protocol.operation != AVERAGE
                and not self._bypasses_snapshot()):
            self.layout.copy(self.snapshot_arrays, self.x)
        self.lent = False

    cdef void _begin_reducing(self) noexcept nogil:
        """Begin an average over all ranks, from what the application publishes now, if it does."""
        cdef bint publishes = self.has_x and not self.protocol.joined
        if self.protocol.operation == AVERAGE:
            if not self.contributed:
                self._contribute_to_average(publishes)
            self.contributed = False
        elif publishes:
            self._lend_unlocked()
        if self._is_finishing() and self.joined_at == self.protocol.t and self.finite:
            # Nobody has made more steps: what this rank has counts.
            self._set_weight(self.weight_published)
        if self.protocol.operation != AVERAGE:
            self.gives = self.filled
        self._reduce()

    cdef void _reduce(self) noexcept nogil:
        """Begin the exchange of an average over all ranks."""
        cdef int tag = self.sync_tag + <int>(self.protocol.ops % 2) * PHASES
        cdef bint publishes = self.has_x and not self.protocol.joined
        cdef char *source = self.snapshot
        cdef char **target = self.snapshot_arrays
        cdef char **copy = self.x if publishes or self._is_finishing() else NULL
        cdef char **saved = NULL
        self.begun = True
        if self.protocol.operation == AVERAGE:
            source = self.scratch
            target = self.scratch_arrays
            if self.lent:
                target = self.x
                copy = NULL
        elif not publishes and self.unchanged:
            saved = self.result_arrays
        if (self.protocol.operation != AVERAGE
                and self.exchange.shares(self.groups.everyone, self.size)):
            self._describe(True, saved != NULL)
            self.exchange.begin_in_memory(
                self.protocol.t + self.data_ops, True, self.groups.everyone, self.size,
                copy, self.lent, False, target, copy)
            return
        self.exchange.begin(self.groups.everyone, self.size, self.rank, tag,
                            source, self.x, self.lent, False, target, copy, saved)

    cdef void _reduce_with_equal_weights(self) noexcept nogil:
        """Nobody's vector has weight: begin again, and let all that are finite count alike."""
        cdef bint averages = self.protocol.operation == AVERAGE
        self.weightless = True
        self.data_ops += 1
        self._renumber()
        if averages:
            weight_of(self.scratch)[0] = self.gives
            self.lent = self.gives_own
        else:
            self._set_weight(self.gives)
        self._reduce()

    cdef inline bint _is_finishing(self) noexcept nogil:
        return self.has_x and self.protocol.operation == FINISH

    cdef void _finish_reducing(self) noexcept nogil:
        cdef int operation = self.protocol.operation
        self._end_exchange()
        if self.weight == 0 and not self.weightless:
            self._reduce_with_equal_weights()
            return
        if operation != AVERAGE:
            self.synchronizations += 1
            if operation == SYNC and not self.protocol.joined:
                self.calls += 1
                self.timely += self.finite
            self.published_version = self.protocol.t - (operation != SYNC)
            # What a rank that has joined had not yet shared is in this average.
            self.out = self.protocol.joined and operation != FINISH
            if self.weight != 0:
                self._unlock_to_copy()
                self.reduction.remember(self.snapshot)
                self._lock_after_copy()
                self.filled = True
                self.unchanged = self.reduction.copy != NULL
                self.unreturned = self.unreturned and not self.unchanged
                self._set_weight(0 if self.out else self.weight_published)
            if self.summing:
                self._unlock_to_copy()
                self.layout.zero(self.snapshot_arrays)
                self._lock_after_copy()
        self._end_operation()

    cdef void _end_operation(self) noexcept nogil:
        """What every rank does has been done; one that has joined enters the next operation."""
        cdef bint averages
        self.taken_count = 0
        self.taken_weight = 0 if self.weightless else self.weight
        self.weightless = False
        self.published = False
        averages = self.protocol.operation == AVERAGE
        self.protocol.reduced()
        if not averages:
            self._let_count_once()
        self.data_ops += 1
        self._renumber()
        if self.protocol.stage != AGREEING:
            self.done = True
        elif self.size > 1:
            pthread_mutex_lock(&mpi_mutex)
            self._contribute()
            pthread_mutex_unlock(&mpi_mutex)

    # The application's part: what it publishes and what it takes back

    cdef bint _serve_application(self) noexcept nogil:
        """Take the application's call or operation one step on; return whether it did."""
        if self.copying:
            return False
        if self.calling:
            if self.protocol.vectors != HELD:
                return False
            if self.protocol.timely and not self.published:
                self._lend_unlocked()
                self.protocol.published()
            else:
                self._complete_call()
        elif self.protocol.stage != REDUCING:
            return False
        elif self.protocol.operation == LOAD:
            self._load()
        elif not self.begun:
            self._begin_reducing()
        elif self.exchange.progress():
            self._finish_reducing()
        else:
            return False
        return True

    cdef void _begin_call(self) noexcept nogil:
        self.done = False
        self._reclaim()
        self.taken_version = self.protocol.t
        self.calling = True
        self.protocol.call()

    cdef void _complete_call(self) noexcept nogil:
        """The version that the call waited for has been executed, timely or not: return."""
        if not self.protocol.timely:
            self._publish_unlocked()
        if self.conserving:
            self._return_snapshot()
        elif not self.protocol.timely:
            self._absorb_late()
        memcpy(self.taken, self.groups.members, self.groups.count * sizeof(int))
        self.taken_count = self.groups.count
        self.taken_weight = self.weight
        self.taken_source = self.protocol.source
        self.calls += 1
        self.timely += self.protocol.timely and self.finite
        self.calling = False
        self.published = False
        self.done = True
        self.protocol.returns()

    cdef void _load(self) noexcept nogil:
        """Go on from the application's vector at another version."""
        if self.has_x:
            self._unlock_to_copy()
            self._replace(self.x)
            self._lock_after_copy()
        # The version that all have agreed on, whatever an interrupted load() wanted.
        self.protocol.base = self.records[2] - self.protocol.t
        self.published_version = self.protocol.t - 1
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

    cdef void _publish_unlocked(self) noexcept nogil:
        self._unlock_to_copy()
        self._publish(self.x)
        self._lock_after_copy()
        self.published = True
        self.published_version = self.protocol.t

    cdef void _lend_unlocked(self) noexcept nogil:
        """Publish for an exchange that begins at once, without a copy where it needs none."""
        cdef bint replaces = not self.conserving or not self.filled or self.unchanged
        cdef bint finite = False
        if replaces:
            self._unlock_to_copy()
            finite = self.layout.all_finite(self.x)
            self._lock_after_copy()
        if not finite:
            self._publish_unlocked()
            return
        self.lent = True
        self.finite = True
        self.weight_published = self.weight_given
        self._note_snapshot(True)
        self.published = True
        self.published_version = self.protocol.t

    cdef inline void _set_weight(self, double weight) noexcept nogil:
        weight_of(self.snapshot)[0] = weight

    cdef void _note_snapshot(self, bint filled) noexcept nogil:
        """The snapshot is what the application has, or else nothing that counts."""
        self._set_weight(self.weight_given if filled else 0)
        self.filled = filled
        self.unchanged = filled
        self.unreturned = not filled

    cdef void _replace(self, char **x) noexcept nogil:
        """Make this vector what the rank contributes, with weight 0 and zeroed if not finite."""
        self.finite = self.layout.all_finite(x)
        if self.finite:
            self.layout.copy(self.snapshot_arrays, x)
        else:
            self.nonfinite += 1
            self.layout.zero(self.snapshot_arrays)
        self.weight_published = self.weight_given
        self._note_snapshot(self.finite)

    cdef void _publish(self, char **x) noexcept nogil:
        """Publish: the vector itself (paper), or what the application changed (conserving).

        While the snapshot is `unchanged` since it was returned, adding the change gives x exactly.
        """
        if not self.conserving or not self.filled:
            self._replace(x)
            return
        if self.unreturned:
            self.finite = False
        elif self.unchanged:
            self.finite = self.layout.all_finite(x)
            if self.finite:
                self.layout.copy(self.snapshot_arrays, x)
        else:
            self.finite = self.layout.finite_change(self.snapshot_arrays, x, self.result_arrays)
            if self.finite:
                self.layout.add_change(
                    self.snapshot_arrays, self.snapshot_arrays, x, self.result_arrays)
        if self.finite:
            self.weight_published = self.weight_given
            self._set_weight(self.weight_given)
        else:
            self.nonfinite += 1

    cdef void _return_snapshot(self) noexcept nogil:
        """Return the snapshot, unless nobody has contributed; a timely call has it already."""
        if not self.filled:
            return
        if not self.protocol.timely or self.weight == 0:
            self._unlock_to_copy()
            self.layout.copy(self.x, self.snapshot_arrays)
            self._lock_after_copy()
        self.unchanged = True
        self.unreturned = False

    cdef void _absorb_late(self) noexcept nogil:
        """Late under the paper's rule: x = (W·m + w·x') / (W + w), or m if x' is not finite.

        And m where x' is a sum, of which some is in m already.
        """
        cdef double own = self.weight_given if self.finite and not self.summing else 0
        if self.weight == 0:
            return
        self._unlock_to_copy()
        if own == 0:
            self.layout.copy(self.x, self.result_arrays)
        else:
            self.layout.combine(self.x, own / (self.weight + own),
                                self.result_arrays, self.weight / (self.weight + own))
        self._lock_after_copy()

    cdef void _contribute_to_average(self, bint publishes) noexcept nogil:
        """Fill the scratch vector with what a synchronization would take from this rank now.

        Where that is the application's vector, lend it: the scratch then takes no memory.
        The cases are those of `_publish`. A sum is none of an average of something else.
        """
        cdef double weight = self.weight_given
        cdef bint replaces = not self.conserving or not self.filled
        self.gives = True
        self.gives_own = False
        self._unlock_to_copy()
        if publishes and (replaces or self.unchanged) and self.layout.all_finite(self.x):
            self.lent = True
            self.gives_own = True
        elif replaces and (publishes or self.summing):
            self.layout.zero(self.scratch_arrays)
            self.gives = False
            weight = 0
        elif (publishes and not self.unreturned and not self.unchanged
                and self.layout.finite_change(self.snapshot_arrays, self.x, self.result_arrays)):
            self.layout.add_change(
                self.scratch_arrays, self.snapshot_arrays, self.x, self.result_arrays)
        else:
            self.layout.copy(self.scratch_arrays, self.snapshot_arrays)
            self.gives = self.filled
            weight = weight_of(self.snapshot)[0]
        weight_of(self.scratch)[0] = weight
        self._lock_after_copy()

    cdef int _publish_between_calls(self) except -1 nogil:
        """Publish as soon as no exchange is under way."""
        self.holding = True
        self._reclaim()
        self.protocol.hold()
        self._wait(VECTORS_HELD)
        self._unlock_to_copy()
        self._publish_between(self.x)
        self._lock_after_copy()
        self.published_version = self.protocol.t
        self.holding = False
        return 0

    cdef void _publish_between(self, char **x) noexcept nogil:
        """Publish, and remember the vector as what the application goes on from."""
        cdef bint remembers = self.conserving and not (self.unchanged or self.unreturned)
        self._publish(x)
        if remembers and self.finite:
            self.layout.copy(self.result_arrays, x)

    cdef int _join(self) except -1 nogil:
        """Share what the application has, and enter what the others do."""
        self._publish_between_calls()
        self.joined_at = self.protocol.t
        if not (self.conserving or self.summing):
            # Under other rules what was not yet shared goes into the next synchronization first.
            self._set_weight(0)
        self.protocol.release()
        self._begin_operation(JOIN)
        return 0

    # Waiting: the caller drives the collective

    cdef bint _reached(self, int goal) noexcept nogil:
        if goal == DONE:
            return self.done
        if goal == SETTLED:
            return self.done or self.protocol.broken
        if goal == VECTORS_HELD:
            return self.protocol.vectors == HELD
        if goal == OVER:
            return self.protocol.stage == OUTSIDE
        if goal == CAUGHT_UP:
            return self.protocol.stage == OUTSIDE and self._next() >= self.protocol.t
        if goal == ANSWERED:
            return not self.mailbox.protocol.calling
        if goal == QUIET or goal == PAUSED:
            return self.mailbox.protocol.is_quiet()
        if goal == EMPTY:
            return self.mailbox.is_over()
        return self.protocol.may_leave() and self._all_sent() and self._all_answered()

    cdef int _wait(self, int goal) except -1 nogil:
        """Drive the collective until the goal is reached; the lock is held on entry and exit.

        Between polls it yields where ranks outnumber cores, and the longer it has waited, the
        longer it sleeps. About ten times a second it looks for signals and stalls.
        """
        cdef Waiting waiting
        global joining, joining_in
        cdef long long progress_count, busy
        cdef bint yields = self.oversubscribed and self.layout.size >= LONG
        if self._reached(goal):
            return 0
        self.progress()
        if self._reached(goal):
            return 0
        busy = self._busy_ns()
        memset(&waiting, 0, sizeof(waiting))
        waiting.began = now()
        waiting.progressed = waiting.began
        waiting.looked = waiting.began
        waiting.circles = SECOND
        self.waiting_callers += 1
        if self._is_joining():
            joining, joining_in = self.identity, self.caller
        if yields:
            _set_slice(SLICE)
        try:
            while not self._reached(goal):
                if self.error != 0 or self._is_failed(goal) or self._misses(goal):
                    self._give_up(goal)
                progress_count = self.reduction.progress_count
                self._pause(goal, &waiting)
                self.progress()
                if self.reduction.progress_count != progress_count:
                    waiting.progressed = now()
        finally:
            if yields:
                _set_slice(0)
            if joining == self.identity:
                joining = 0
            self.waiting_callers -= 1
            self.waiting_ns += now() - waiting.began - (self._busy_ns() - busy)
        return 0

    cdef int _give_up(self, int goal) except -1 nogil:
        """Raise why waiting is in vain.

        Getting the GIL may take long: the progress thread drives in the meantime.
        """
        self.waiting_callers -= 1
        pthread_mutex_unlock(&self.lock)
        try:
            with gil:
                self._raise_failure(goal)
        finally:
            pthread_mutex_lock(&self.lock)
            self.waiting_callers += 1
        return 0

    cdef int _pause(self, int goal, Waiting *waiting) except -1 nogil:
        """Let others run between two polls of a waiting caller."""
        cdef long long time = now()
        cdef long long waited = time - waiting.progressed
        cdef bint look = time - waiting.looked > LOOK_FOR_SIGNALS
        if waited < SPIN_BEFORE_SLEEP and not self.oversubscribed and not look:
            return 0
        if look:
            self.waiting_callers -= 1  # as in `_give_up`
        pthread_mutex_unlock(&self.lock)
        try:
            if look:
                waiting.looked = time
                with gil:
                    PyErr_CheckSignals()
                    self._look_for_stalls(goal, waiting, time)
            self._serve_others()
            if waited < SPIN_BEFORE_SLEEP:
                sched_yield()
            else:
                sleep(min(waited >> 4, LONGEST_WAIT))
        finally:
            pthread_mutex_lock(&self.lock)
            if look:
                self.waiting_callers += 1
        return 0

    cdef inline bint _is_failed(self, int goal) noexcept nogil:
        """Whether a rank has failed, so that a call does not wait any longer."""
        return self.protocol.failed >= 0 and self._is_calls(goal)

    cdef inline bint _misses(self, int goal) noexcept nogil:
        """Whether it waits in vain for a rank that makes no calls, also in others' after join()."""
        return ((goal == ANSWERED or goal == DONE and self.purpose == JOIN)
                and self.mailbox.protocol.missing >= 0)

    cdef inline bint _is_calls(self, int goal) noexcept nogil:
        """Whether it is a call that waits, not close()."""
        return (goal == DONE or goal == VECTORS_HELD or goal == CAUGHT_UP or goal == ANSWERED
                or goal == PAUSED)

    cdef int _raise_failure(self, int goal) except -1:
        if self.error != 0:
            raise CollectiveError(f"rank {self.rank}: {MPI.Get_error_string(self.error)}")
        raise self._failure() if self._is_failed(goal) else self._missing()

    def _missing(self):
        """The error of a rank that waits for one that makes no calls.

        All are told of it, but where that rank has closed: they will see that themselves, as this
        one leaves too. In join() it could not, for what it is in is everybody's.
        """
        cdef PeerProtocol protocol = self.mailbox.protocol
        text = (f"rank {self.rank} waits in call {protocol.calls} for rank {protocol.missing}, "
                "which ")
        if protocol.left[protocol.index_of(protocol.missing)]:
            error = ClosedError(f"{text}has closed: all ranks make the same calls")
            if self.purpose != JOIN:
                return error
        else:
            error = DisagreementError(
                f"{text}is in average(), synchronize() or load(): all ranks enter these after the "
                "same number of calls, and while none has joined"
            )
        self.fail(f"{type(error).__name__}: {error}")
        return error

    def _failure(self):
        """The error of a rank that has heard of another's failure."""
        text = self.failure[:strlen(self.failure)].decode(errors="ignore")  # it may be cut
        return RankFailedError(
            f"rank {self.protocol.failed} failed, so only close() is left here: {text}")

    # Stalls

    cdef int _look_for_stalls(self, int goal, Waiting *waiting, long long time) except -1:
        """Say who is missing, end the job where that was asked for; without the lock.

        In close() and join(), where it is normal that others still compute, that is information;
        a warning only if those have made no call for as long again.
        """
        cdef long long waited = time - waiting.progressed
        cdef bint stalls = self.stall and waited >= self.stall and not waiting.warned
        cdef bint aborts = self.abort and waited > self.abort
        cdef bint circles = waited >= waiting.circles and (<Engine>the_engine).count > 1
        if stalls and waiting.said and time - waiting.said < self.stall:
            stalls = False
        if self.size == 1 or not (stalls or aborts or circles):
            return 0
        if waiting.asked == 0:
            waiting.asked = time
            with nogil:
                self._ask()
            return 0
        if self.inquiry.asking and time - waiting.asked < ANSWERING:
            return 0
        waiting.asked = 0
        if circles:
            waiting.circles *= 2
            self._look_for_circle()
        if stalls:
            self._say(waiting, time)
        if aborts:
            self._abort(waited)
        return 0

    cdef void _ask(self) noexcept nogil:
        """Ask all ranks how far they are.

        Not once all leave: the questions have been counted then, and nobody waits for another.
        """
        pthread_mutex_lock(&self.lock)
        if self.protocol.stage != LEAVING and not self.closed:
            pthread_mutex_lock(&mpi_mutex)
            self.inquiry.ask()
            pthread_mutex_unlock(&mpi_mutex)
        pthread_mutex_unlock(&self.lock)

    cdef int _say(self, Waiting *waiting, long long time) except -1:
        """Say who is missing."""
        cdef bint normal = self.closing or self._is_joining()
        missing = self._missing_ranks()
        waiting.warned = not normal or waiting.said and missing == self.said
        if waiting.warned or not waiting.said:
            level = logging.WARNING if waiting.warned else logging.INFO
            log.log(level, "%s", self._describe_stall((time - waiting.progressed) * 1e-9, missing))
        waiting.said = time
        self.said = missing
        return 0

    cdef inline bint _is_joining(self) noexcept nogil:
        return self.protocol.joined or self.purpose == JOIN

    def _missing_ranks(self):
        """Return what each rank does that this one waits for; not those that wait as well."""
        cdef int rank
        _, ranks = self._waits_in()
        return {rank: self._why_missing(rank) for rank in ranks
                if rank != self.rank and self._why_missing(rank)}

    def _describe_stall(self, seconds, missing):
        """Say what this rank waits in, and for whom."""
        where, _ = self._waits_in()
        whys = {}
        for rank, why in missing.items():
            whys.setdefault(why, []).append(rank)
        listed = "; ".join(f"{name_ranks(who)}: {why}" for why, who in whys.items())
        return (
            f"rank {self.rank} has waited {seconds:.0f} s in {where} for "
            + (listed or "no rank in particular: all have arrived")
        )

    cdef int _look_for_circle(self) except -1:
        """Raise where a rank waits for this one's join() of a collective, as this one does for it.

        Only where one thread of each makes the calls of both, so that neither can go on.
        """
        cdef int rank
        cdef Collective other
        waits = [rank for rank, why in self._missing_ranks().items() if why.startswith(ELSEWHERE)]
        for other in list((<Engine>the_engine).collectives):
            if other is self or other.caller != self.caller or other._is_joining():
                continue
            for rank in waits:
                if self.inquiry.answers[rank * ANSWER + 4] == other.identity:
                    error = DisagreementError(
                        f"rank {self.rank} waits in {self._waits_in()[0]} for rank {rank}, which "
                        "waits in join() of another one for this rank: join both at once "
                        "(collectives.join, or `with a.join(), b.join():` of optimizers)"
                    )
                    for each in (self, other):
                        each.fail(f"DisagreementError: {error}")
                    raise error
        return 0

    def _waits_in(self):
        """Return what this rank's application waits in, in words, and the ranks it waits for."""
        cdef int rank
        version = self.protocol.t + self.protocol.base
        if self.mailbox is not None:
            version = self.mailbox.protocol.calls
        if self.protocol.awaited() >= 0:
            return f"version {version}", [self._drawn()]
        if self.protocol.operation == CLOSE:
            return "close()", range(self.size)
        if self.protocol.operation != NONE:
            what = self.purpose or self.protocol.operation
            return f"{OPERATIONS[what]} after {_calls(version)}", range(self.size)
        if self.mailbox is not None:
            awaited = [rank for rank in range(self.size) if self.mailbox.protocol.waits_for(rank)]
            return "close()" if self.closing else f"call {version}", awaited
        if self.protocol.vectors != RUNNING:
            return f"version {version}", range(self.size)
        running = f"version {self.protocol.running + self.protocol.base}"
        members = [self.groups.members[rank] for rank in range(self.groups.count)]
        return f"publish() during {running}" if self.holding else running, sorted(members)

    cdef int _drawn(self):
        """Return which rank is drawn to start what this one waits for."""
        return drawn(self.protocol.seed, self.protocol.awaited() + self.protocol.base, self.size)

    cdef _why_missing(self, int rank):
        """Return what a rank does instead of what this one waits for; None if it does that."""
        cdef long long *answer = &self.inquiry.answers[rank * ANSWER]
        cdef long long calls = answer[0] + (self.protocol.base if self.mailbox is None else 0)
        completed = f"({_calls(calls)} completed)"
        elsewhere = f"{ELSEWHERE if answer[4] else 'still computing'} {completed}"
        what = OPERATIONS.get(answer[2] >> PURPOSE_SHIFT or answer[2])
        if self.protocol.stage == LEAVING:
            return None
        if not self.inquiry.answered[rank]:
            return "does not answer (stopped, or computing without a progress thread)"
        if self.inquiry.stale:
            return None
        if self.protocol.operation != NONE:
            if self.protocol.operation == CLOSE and what and answer[2] != CLOSE:
                return f"in {what} {completed}"
            return None if what else elsewhere
        if self.mailbox is not None:
            if what:
                return f"in {what} {completed}"
            return None if answer[3] else elsewhere
        if self.protocol.awaited() >= 0:
            return f"{elsewhere}, and drawn to start it"
        if answer[1] > self.protocol.running:
            return None
        # An interrupted call has been made, though its version is not over.
        if not (answer[3] or self.protocol.passive or answer[0] > self.protocol.running):
            return elsewhere
        if answer[1] < self.protocol.running:
            return f"still in version {answer[1] + self.protocol.base}"
        return None

    cdef int _abort(self, long long waited) except -1:
        log.error("%s; that is the limit that abort (WAGMA_ABORT) sets: it ends the job",
                  self._describe_stall(waited * 1e-9, self._missing_ranks()))
        logging.shutdown()
        end_job(self.control, 1)

    # What an exception interrupts

    cdef void _abandon(self) noexcept nogil:
        """The call was interrupted by an exception: the user's vector is ours no longer."""
        cdef bint shares, ended
        cdef char **kept
        pthread_mutex_lock(&self.lock)
        while self.copying:
            pthread_mutex_unlock(&self.lock)
            sched_yield()
            pthread_mutex_lock(&self.lock)
        # All that the application has changed is published then; x is what it goes on from.
        shares = self.conserving and (self.published or self._is_finishing() and self.begun)
        kept = self.snapshot_arrays if self._bypasses_snapshot() else NULL
        if self.begun:
            self.exchange.adopt(kept)
        elif self.lent:
            # Its version has not been started.
            self.layout.copy(self.snapshot_arrays, self.x)
        elif self._is_averaging() and not self.protocol.passive:
            # The operation goes on with what there is, and that would be nothing.
            if self.protocol.operation == AVERAGE:
                self._contribute_to_average(True)
                if self.lent:
                    self.layout.copy(self.scratch_arrays, self.x)
                self.contributed = True
            else:
                self._publish_between(self.x)
        self.lent = False
        # Of what it gave part may be nowhere any more.
        self.gives = self.gives and not self.begun
        self.gives_own = False
        if self.begun and self.reduction.target == self.x:
            self.reduction.target = self.snapshot_arrays if self.conserving else self.result_arrays
            if self.protocol.operation == AVERAGE:
                self.reduction.target = self.scratch_arrays
        self.reduction.copy = NULL
        if shares:
            self.reduction.saved = NULL
            self.unchanged = False
        self.published = False
        if self.calling:
            self.protocol.abandon()
        elif self.protocol.stage == OUTSIDE and self.holding:
            self.protocol.waiting = False
            if self.protocol.vectors == HELD:
                self.protocol.release()
        self.calling = False
        self.holding = False
        self.has_x = False
        ended = self._drain()
        if shares:
            self.layout.copy(self.result_arrays, self.x)
            self.unreturned = self.unreturned or not ended
        self._open()
        pthread_mutex_unlock(&self.lock)

    cdef inline bint _is_averaging(self) noexcept nogil:
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

    def start(self, vector, weight):
        """Begin this rank's next call, a version or a synchronization, and return the `Call`."""
        return self._start(CALL, vector, PyBUF_WRITABLE, weight)

    def call(self, vector, weight):
        """Average the vector in place in this rank's next version, or over all ranks."""
        return self._carry_out(CALL, vector, PyBUF_WRITABLE, weight).result

    def synchronize(self, vector):
        """Average the vector in place over all ranks, and publish the average."""
        self._carry_out(SYNCHRONIZE, vector, PyBUF_WRITABLE)

    def average(self, vector, weight=None):
        """Overwrite the vector by the average over all ranks, and change nothing else.

        Its weight is that of the last call, unless one is given.
        """
        self._carry_out(AVERAGE, vector, PyBUF_WRITABLE, weight)

    def load(self, vector, long long version):
        """Go on from this vector, with this version for the next one."""
        self._carry_out(LOAD, vector, 0, None, version)

    def publish(self, vector, weight):
        """Contribute this vector, or its change since the last, while this rank is late."""
        self._carry_out(PUBLISH, vector, 0, weight)

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
                    self.x = call.vector.arrays
                    self.has_x = True
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

    cdef int _wait_until(self, int goal) except -1 nogil:
        """Wait, without the lock on entry and exit."""
        pthread_mutex_lock(&self.lock)
        try:
            self._wait(goal)
        finally:
            pthread_mutex_unlock(&self.lock)
        return 0

    cdef void _serve_others(self) noexcept nogil:
        """Where there is no progress thread, advance the process's other collectives too."""
        if self.no_progress_thread:
            (<Engine>the_engine).serve_once()

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

    cdef int _begin(self, int what) except -1 nogil:
        if what == PUBLISH:
            self._publish_between_calls()
            self.protocol.release()
            self.done = True
        elif what == JOIN:
            self._join()
        elif what == CALL and not self.protocol.is_synchronous():
            self._begin_call()
        else:
            self._begin_operation(SYNC if what == CALL else what)
        return 0

    # What Python calls of a collective with a mailbox

    def attach(self, Mailbox mailbox):
        """Serve this mailbox too, whose protocol begins."""
        # Nothing serves this collective yet, so the lock is not needed.
        mailbox.protocol.begin()
        self.mailbox = mailbox

    def check(self, vector):
        """Raise, and tell all ranks, where this vector cannot be averaged here or now."""
        if self.no_progress_thread:
            with nogil:
                self._catch_up_with_messages()
        self._check_usable()
        try:
            UserVector(vector, self.layout, PyBUF_WRITABLE)
        except (TypeError, ValueError) as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise

    cdef void _catch_up_with_messages(self) noexcept nogil:
        """Without a progress thread, take in what has come: a call need not wait for any of it."""
        cdef long long progress_count = -1
        pthread_mutex_lock(&self.lock)
        while self.reduction.progress_count != progress_count:
            progress_count = self.reduction.progress_count
            self.progress()
        pthread_mutex_unlock(&self.lock)

    def call_peers(self, vector):
        """Make the next call of the mailbox's protocol, in place."""
        self._use_mailbox(CALL, vector)

    def publish_change(self, vector):
        """Publish what the application has changed; it goes on from this vector."""
        self._use_mailbox(PUBLISH, vector)

    def hand_in(self, vector):
        """Give what the application has changed since its last call, outside of any call."""
        self._use_mailbox(HAND_IN, vector)

    def settle(self):
        """Carry a call that an exception interrupted on to its end."""
        self._use_mailbox(SETTLE)

    def go_on_from(self, vector):
        """Note that the application has this vector, which is what it got but for rounding."""
        cdef UserVector opened = UserVector(vector, self.mailbox.layout, 0)
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.mailbox.go_on_from(opened.arrays)
            pthread_mutex_unlock(&self.lock)

    def begin_collectively(self, str what):
        """All ranks enter operations for this purpose, "join()" or so; "": for their own."""
        self.purpose = PURPOSES[what] if what else NONE

    @property
    def most_calls(self):
        """The most calls that a rank had made when all entered the last operation."""
        cdef int rank
        return max([self.records[RECORD * rank + 5] for rank in range(self.size)])

    def pause(self, bint paused):
        """Begin nothing new between ranks, and wait for what this one has begun; or go on."""
        self._use_mailbox(PAUSE if paused else RESUME)

    def join_peers(self, vector):
        """Make no more calls, but those that others need, until all ranks do so."""
        self._use_mailbox(JOIN, vector)

    def catch_up(self, long long calls):
        """Make as many calls as the rank that has made the most, once all have joined."""
        self._use_mailbox(CATCH_UP, None, calls)

    cdef int _use_mailbox(self, int what, vector=None, long long calls=0) except -1:
        """Do what the application wants of the mailbox, and wait for it."""
        cdef UserVector opened = None
        cdef char **arrays = NULL
        cdef long long began = now()
        self._enter()
        try:
            if vector is not None:
                opened = UserVector(vector, self.mailbox.layout, PyBUF_WRITABLE)
                arrays = opened.arrays
            with nogil:
                pthread_mutex_lock(&self.lock)
                try:
                    if arrays != NULL or what == SETTLE:
                        # A call that an exception interrupted is carried on to its end first.
                        self._wait(ANSWERED)
                    self._do_with_mailbox(what, arrays, calls)
                finally:
                    self.mailbox.forget_user()
                    self.calls_ns += now() - began
                    pthread_mutex_unlock(&self.lock)
                self._serve_others()
        finally:
            self.guard.taken = False
        return 0

    cdef int _do_with_mailbox(self, int what, char **arrays, long long calls) except -1 nogil:
        if what == CALL:
            self.mailbox.begin_call(arrays)
            self._wait(ANSWERED)
            self.calls += 1
            self.timely += 1
        elif what == PUBLISH:
            self.mailbox.publish_change(arrays)
        elif what == HAND_IN:
            self.mailbox.record_change(arrays)
            self.mailbox.protocol.hand_in()
            self._wait(ANSWERED)
        elif what == PAUSE:
            self.mailbox.protocol.pause()
            self._wait(PAUSED)
        elif what == RESUME:
            self.mailbox.protocol.resume()
        elif what == JOIN:
            self.mailbox.record_change(arrays)
            self.mailbox.protocol.join()
            if not self.mailbox.protocol.follows:
                self._wait(ANSWERED)
        elif what == CATCH_UP:
            self.mailbox.protocol.catch_up(calls)
            self._wait(ANSWERED)
            # What no call of the others has taken along.
            self.mailbox.publish(1)
        return 0

    def read_model(self, vector):
        """Overwrite the vector by the model, as calls return it."""
        cdef UserVector opened = UserVector(vector, self.mailbox.layout, PyBUF_WRITABLE)
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.mailbox._scale(opened.arrays, self.mailbox.model_arrays,
                                self.mailbox.protocol.factor())
            pthread_mutex_unlock(&self.lock)

    def restart(self, vector, long long calls):
        """Go on from this vector after so many calls, as all ranks do at the same time."""
        cdef UserVector opened = UserVector(vector, self.mailbox.layout, 0)
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.mailbox.restart(opened.arrays, calls)
            pthread_mutex_unlock(&self.lock)

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
        cdef int k
        cdef long long base = self.protocol.base
        version = self.taken_version + base
        if self.taken_count == 0:
            everyone = tuple(range(self.size))
            return Result(version, self.finite, version, everyone, self.taken_weight, True)
        group = tuple(sorted([self.taken[k] for k in range(self.taken_count)]))
        timely = self.protocol.timely and self.finite
        return Result(version, timely, self.taken_source + base, group, self.taken_weight, False)

    def fail(self, text):
        """Let all ranks know that this one has failed; only close() is left."""
        cdef bytes encoded = text.encode(errors="replace")
        cdef const char *characters = encoded
        with nogil:
            pthread_mutex_lock(&self.lock)
            self._note_failure(characters)
            self.progress()
            pthread_mutex_unlock(&self.lock)

    cdef void _note_failure(self, const char *text) noexcept nogil:
        """Set out to let all ranks know that this one has failed; the lock is held."""
        if self.protocol.failed < 0:
            strncpy(self.failure, text, TEXT - 1)
            self.protocol.notice(self.rank, -1)

    def start_join(self, vector):
        """Begin to take part in what the others do until all have joined, and return the `Call`."""
        return self._start(JOIN, vector, PyBUF_WRITABLE, None)

    def begin_close(self):
        """Let the others know that this rank closes, where that needs no waiting."""
        with nogil:
            pthread_mutex_lock(&self.lock)
            if self.protocol.stage == OUTSIDE and not (self.closed or self.has_x):
                if self.mailbox is not None:
                    self.mailbox.protocol.leave()
                self._begin_operation(CLOSE)
            pthread_mutex_unlock(&self.lock)

    def close(self):
        """Execute every version that anybody has started, and leave; collective."""
        cdef int k
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
        for k in range(self.dimensions):
            MPI_Request_free(&self.receives[k])
        if self.mailbox is not None:
            self.mailbox.free_type()
        pthread_mutex_unlock(&mpi_mutex)

    cdef int _leave(self) except -1 nogil:
        """Enter CLOSE, once what an exception interrupted is over, and wait for its end."""
        pthread_mutex_lock(&self.lock)
        try:
            if self.protocol.operation != CLOSE:
                self._wait(OVER)
                if self.mailbox is not None:
                    if not self.mailbox.protocol.leaving:
                        self.mailbox.protocol.leave()
                    self._wait(QUIET)
                self._begin_operation(CLOSE)
            self._wait(LEFT)
            if self.mailbox is not None:
                if not self.mailbox.ending:
                    self.mailbox.end()
                self._wait(EMPTY)
        finally:
            pthread_mutex_unlock(&self.lock)
        return 0

    def statistics(self):
        """Return the counts and times (in seconds) of `statistics.Statistics`, in its order."""
        cdef int staleness, last = 0
        if forked:
            check_owner(self.pid)
        with nogil:
            pthread_mutex_lock(&self.lock)
            self._note_executed(self._next())
            pthread_mutex_unlock(&self.lock)
        for staleness in range(MOST_STALENESS + 1):
            if self.staleness[staleness]:
                last = staleness + 1
        return (
            self.calls,
            self.timely,
            self.synchronizations,
            self.versions,
            self.passive,
            tuple([self.staleness[staleness] for staleness in range(last)]),
            self.nonfinite,
            self.reduction.bytes_sent,
            self.waiting_ns * 1e-9,
            (self.calls_ns - self.waiting_ns) * 1e-9,
            self._busy_ns() * 1e-9,
        )

    def _disagreement(self):
        """The error of a rank whose operation was not everybody's."""
        cdef int rank, i
        entered = by_value(
            tuple([self.records[RECORD * rank + i] for i in (0, 5, 2)]) for rank in range(self.size)
        )
        closing = any(kind == CLOSE for kind, _, _ in entered)
        (mine,) = (what for what, ranks in entered.items() if self.rank in ranks)
        del entered[mine]
        others = "; ".join(f"{name_ranks(ranks)} entered {_operation(*what)}"
                           for what, ranks in sorted(entered.items()))
        return (ClosedError if closing else DisagreementError)(
            f"rank {self.rank} waits in {_operation(*mine)}, "
            f"which needs all ranks to make the same calls, but {others}"
        )

    @property
    def version(self):
        """The version of the next call."""
        return self.protocol.t + self.protocol.base

    @property
    def executed(self):
        """Number of the next version to be executed here: how many have been, by anybody's call."""
        return self._next() + self.protocol.base

    def is_closing(self, int rank):
        """Return whether a rank has answered that it closes, and ask all again; call it often."""
        cdef bint closing
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.progress()
            closing = (self.inquiry.answered[rank]
                       and self.inquiry.answers[rank * ANSWER + 2] == CLOSE)
            pthread_mutex_unlock(&self.lock)
            self._ask()
        return closing

    @property
    def failure(self):
        """The rank of whose failure this one has heard, and its error; (−1, None): none."""
        return self.protocol.failed, self._failure() if self.protocol.failed >= 0 else None

    @property
    def broken(self):
        """Whether only close() is left."""
        return self.protocol.broken or self.protocol.failed >= 0


cdef void _set_slice(unsigned long long length) noexcept nogil:
    """Let this thread run for so many nanoseconds at a time, or as long as others (0).

    Linux 6.12 and later takes a thread with a shorter slice earlier, and one that yields gives up
    no more than a slice: without this, a caller that has yielded often is not run for as many times
    3 ms once others compute. An older kernel ignores the length.
    """
    cdef sched_attr attributes
    memset(&attributes, 0, sizeof(attributes))
    if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) == 0
            and attributes.policy == SCHED_OTHER):
        attributes.runtime = length
        syscall(SYS_sched_setattr, 0, &attributes, 0)


cdef void _ask_for_short_slices() noexcept nogil:
    """Let this thread run soon after it wakes, and sleep precisely: it needs little, at once."""
    _set_slice(SLICE)
    prctl(PR_SET_TIMERSLACK, 1)


cdef class Stop:
    """Tells one progress thread to end."""
    cdef bint asked


cdef class Engine:
    """The process's progress thread, which serves all its collectives."""
    cdef void *served[MAX_COLLECTIVES]
    cdef int count
    cdef pthread_mutex_t lock
    cdef bint spinning
    # Of the last round: what has moved, and how long the thread may sleep.
    cdef long long progress_count, pause
    cdef list collectives  # keeps those served alive
    cdef object thread
    cdef Stop stop

    def __init__(self):
        pthread_mutex_init(&self.lock, NULL)
        self.collectives = []

    def add(self, Collective collective, str mode):
        """Serve a collective; the first one starts the thread, unless the mode is "none"."""
        cdef void *pointer = <void *>collective
        cdef Stop stop = Stop()
        collective.no_progress_thread = mode == "none"
        self.collectives.append(collective)
        # Not with the GIL held in between: the thread that serves all collectives takes this lock.
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.served[self.count] = pointer
            self.count += 1
            pthread_mutex_unlock(&self.lock)
        self.spinning = mode == "dedicated"
        if mode == "none" or collective.size == 1:
            return
        thread = threading.Thread(
            target=self._serve, args=[stop], name="wagma-engine", daemon=True)
        # Nothing here lets go of the GIL, so of several threads that open one only one starts it.
        if self.thread is None:
            self.thread, self.stop = thread, stop
            thread.start()

    def remove(self, Collective collective):
        """Serve a closed collective no longer; the last one stops the thread."""
        cdef void *pointer = <void *>collective
        cdef int i, kept = 0
        with nogil:
            pthread_mutex_lock(&self.lock)
            for i in range(self.count):
                if self.served[i] != pointer:
                    self.served[kept] = self.served[i]
                    kept += 1
            self.count = kept
            pthread_mutex_unlock(&self.lock)
        self.collectives.remove(collective)
        # Another thread may have added one by now; what it adds later is served by a new thread.
        if self.count == 0 and self.thread is not None:
            thread, self.thread = self.thread, None
            self.stop.asked = True
            thread.join()

    def _serve(self, Stop stop):
        with nogil:
            _ask_for_short_slices()
            self._loop(stop)

    cdef bint serve_once(self) noexcept nogil:
        """Advance each collective that no caller drives; return whether work is in flight."""
        cdef int i
        cdef bint busy = False
        pthread_mutex_lock(&self.lock)
        self.progress_count = 0
        self.pause = LONGEST_PAUSE
        for i in range(self.count):
            busy |= self._look_after(<Collective>self.served[i])
        pthread_mutex_unlock(&self.lock)
        return busy

    cdef void _loop(self, Stop stop) noexcept nogil:
        cdef int polls = 0
        cdef bint busy
        cdef long long pause, progress_count = 0
        while not stop.asked:
            busy = self.serve_once()
            pause = self.pause
            if not busy or self.progress_count != progress_count:
                polls = 0
            progress_count = self.progress_count
            if self.spinning:
                # Whoever wants the lock, or this core, gets it.
                sched_yield()
                continue
            if busy:
                # Whom it waits for may need this core.
                polls += 1
                pause = 0 if polls < BUSY_POLLS else min(polls * BUSY_PAUSE, LONGEST_PAUSE)
            if pause:
                sleep(pause)

    cdef bint _look_after(self, Collective collective) noexcept nogil:
        """Advance one collective, unless a caller does; shorten the pause if it wants that."""
        cdef bint busy
        if collective.waiting_callers or pthread_mutex_trylock(&collective.lock) != 0:
            return False
        busy = not collective.closed and collective.progress()
        self.progress_count += collective.reduction.progress_count
        self.pause = min(self.pause, collective.rhythm.pause(now()))
        pthread_mutex_unlock(&collective.lock)
        return busy


engine = Engine()
cdef void *the_engine = <void *>engine
