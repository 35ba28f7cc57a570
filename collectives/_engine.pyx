# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The progress engine: it drives the protocol and the exchanges over MPI, without the GIL.

A rank whose application computes is served by one native thread; an application that waits in a
call drives its collective itself. Each collective has a lock, held while its state advances; one
mutex is around all MPI calls, held for nothing else. No MPI call blocks.
"""

import threading

from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.exc cimport PyErr_CheckSignals
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset
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
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, nanosleep, timespec

from collectives._exchange cimport (
    HEADER,
    Exchange,
    mpi_mutex,
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_t,
    pthread_mutex_trylock,
    pthread_mutex_unlock,
)
from collectives._kernels cimport (
    add_change,
    all_finite,
    blend,
    finite_change,
    real,
)
from collectives.protocols.wait_avoiding cimport (
    AGREEING,
    AVERAGE,
    CLOSE,
    HELD,
    MOVING,
    OUTSIDE,
    RUNNING,
    SYNC,
    SYNCHRONIZE,
    WaitAvoiding,
)

from mpi4py import MPI

from collectives.agreement import name_ranks
from collectives.errors import ClosedError, CollectiveError, DisagreementError
from collectives.topology import activation_peers, propagation_bound, shuffle

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<sys/prctl.h>" nogil:
    int prctl(int, unsigned long)
    int PR_SET_TIMERSLACK

cdef extern from "<sys/syscall.h>" nogil:
    long SYS_sched_getattr, SYS_sched_setattr

cdef extern from "<unistd.h>" nogil:
    long syscall(long, ...)

cdef struct sched_attr:
    unsigned int size, policy
    unsigned long long flags
    int nice
    unsigned int priority
    unsigned long long runtime, deadline, period

cdef extern from "<sys/mman.h>" nogil:
    int madvise(void *, size_t, int)
    int MADV_HUGEPAGE

cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void **, size_t, size_t)

cdef enum:
    # Tags of one version: a fold, up to 31 phases of doubling, an unfold.
    PHASES = 34
    MAX_DIMENSIONS = 32
    MAX_COLLECTIVES = 256
    LINE = 64
    HUGE_PAGE = 2097152
    # An activation's version that says: nothing more comes from here.
    FIN = -1

cdef enum:
    # What a caller waits for.
    VECTORS_HELD
    AGREED
    AVERAGED
    OVER
    CAUGHT_UP
    LEFT

cdef enum:
    # What the application wants, beside the synchronous operations.
    CALL = 100
    PUBLISH

SYNC_NAMES = {SYNC: "a periodic synchronisation", AVERAGE: "average()",
              SYNCHRONIZE: "synchronize()", CLOSE: "close()"}

cdef inline long long now() noexcept nogil:
    """Nanoseconds on the monotonic clock."""
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return time.tv_sec * 1000000000LL + time.tv_nsec

cdef inline void sleep(long long nanoseconds) noexcept nogil:
    cdef timespec time
    time.tv_sec = nanoseconds // 1000000000LL
    time.tv_nsec = nanoseconds % 1000000000LL
    nanosleep(&time, NULL)


cdef inline Py_ssize_t _round_up(Py_ssize_t number, Py_ssize_t unit) noexcept nogil:
    return (number + unit - 1) // unit * unit

cdef char *_allocate(Py_ssize_t size) except NULL:
    """Zeroed memory, on huge pages unless it is small: a peer reads from those at twice the speed."""
    cdef void *memory = NULL
    cdef bint huge = size >= HUGE_PAGE // 8
    if huge:
        size = _round_up(size, HUGE_PAGE)
    if posix_memalign(&memory, HUGE_PAGE if huge else LINE, size) != 0:
        raise MemoryError(f"no {size} bytes for the vectors of a collective")
    if huge:
        madvise(memory, size, MADV_HUGEPAGE)
    memset(memory, 0, size)
    return <char *>memory


cdef class Rhythm:
    """When to look for the next version, from when the last ones came.

    Around the time at which the next one is due the idle engine looks often, before that rarely,
    and the less often the longer nothing has come. Versions that follow each other closely are
    mostly driven by this rank's own calls, which looking often would disturb.
    """
    cdef long long last
    cdef double interval, deviation

    cdef void beat(self, long long time) noexcept nogil:
        """A version began at this time."""
        cdef double interval = time - self.last
        cdef double error = interval - self.interval
        if self.last == 0:
            self.last = time
            return
        self.last = time
        if self.interval == 0 or interval > 8 * self.interval or 8 * interval < self.interval:
            self.interval = interval
            self.deviation = interval / 2
            return
        self.interval += error / 8
        self.deviation += ((error if error > 0 else -error) - self.deviation) / 4

    cdef long long pause(self, long long time) noexcept nogil:
        """How many nanoseconds the idle engine may sleep at this time."""
        cdef double since = time - self.last
        cdef double guard = 2 * self.deviation + 50e3
        cdef double early = self.interval - guard - since
        cdef double shortest = PAUSE_WHEN_FAST if self.interval < FAST else SHORTEST_PAUSE
        if early > 0:
            return <long long>min(early + 1e3, LONGEST_PAUSE_WITHIN_RHYTHM)
        if since < self.interval + guard:
            # The less is known of the rhythm the longer this lasts, so look less often.
            return <long long>min(max(guard / 64, shortest), LONGEST_PAUSE)
        return <long long>min(max((since - self.interval) / 8, shortest), LONGEST_PAUSE)

cdef enum:
    SHORTEST_PAUSE = 10000
    FAST = 1000000
    PAUSE_WHEN_FAST = 100000
    LONGEST_PAUSE_WITHIN_RHYTHM = 500000
    LONGEST_PAUSE = 1000000
    # With work in flight, how often it looks without a pause, and by how much the pauses grow.
    BUSY_POLLS = 50
    BUSY_PAUSE = 200
    SLICE = 100000


cdef class Result:
    """What a call of a collective did.

    Attributes:
        version: number of this call, from 0.
        timely: whether this call's vector is in the average of its own version: nobody had started
            that before, and the vector is finite.
        source: the version whose result was used; later than `version` if this rank was overtaken.
        group: the ranks that averaged in `source`, sorted.
        weight: the total weight of their vectors: the group's size, less non-finite ones.
        synchronized: whether it was the average over all ranks.
    """
    cdef readonly long long version, source
    cdef readonly bint timely, synchronized
    cdef readonly tuple group
    cdef readonly double weight

    def __repr__(self):
        return (
            f"Result(version={self.version}, timely={self.timely}, source={self.source}, "
            f"group={self.group}, weight={self.weight:g}, synchronized={self.synchronized})"
        )


cdef class Collective:
    """One wait-avoiding group allreduce on this rank: its vectors, messages and protocol."""
    cdef readonly int rank, size, group_size
    cdef readonly bint closed
    cdef readonly Py_ssize_t length
    cdef readonly long long nonfinite
    cdef WaitAvoiding protocol
    cdef Exchange exchange
    cdef Rhythm rhythm
    cdef Comm control, data
    cdef MPI_Comm control_comm
    cdef pthread_mutex_t lock
    cdef bint is_double, conserving, crowded
    # The vectors' state under the conserving rule: the snapshot is still what was returned; or
    # nothing that a change could be taken against was ever returned or published.
    cdef bint unchanged, unreturned
    # The application's last vector was finite.
    cdef bint finite
    # An exchange is under way, or done and its mean not yet taken.
    cdef bint begun
    # The application is in a call, in publish(), and past publishing in either or an operation.
    cdef bint calling, holding, published
    # An exception ended the application's part in the present operation; the engine goes on.
    cdef bint abandoned
    cdef int waiting_callers, error, itemsize
    cdef str dtype
    # The vectors: snapshot behind its header; result, or under the conserving rule x_returned,
    # which is kept only once the snapshot is no longer `unchanged` since it was returned.
    cdef char *vectors
    cdef char *snapshot
    cdef char *second
    cdef char *third
    cdef char *x
    # Activations
    cdef int dimensions
    cdef int destination[MAX_DIMENSIONS]
    cdef int source[MAX_DIMENSIONS]
    cdef MPI_Request receives[MAX_DIMENSIONS]
    cdef MPI_Request sends[MAX_DIMENSIONS]
    cdef long long received[MAX_DIMENSIONS][2]
    cdef long long sent[MAX_DIMENSIONS][2]
    # Agreements
    cdef MPI_Request gather
    cdef long long record[2]
    cdef long long *records
    # Groups, from topology.Shuffle
    cdef int *cycle_begin
    cdef int *cycle_length
    cdef int *cycle_index
    cdef int *cycles
    cdef int *chunk_begin
    cdef int *chunk_end
    cdef int *members
    cdef int *everyone
    cdef int group_count, window, sync_tag
    cdef double weight
    # What the last call took: its version, the newest result, and that one's group (none: all).
    cdef int *taken
    cdef int taken_count
    cdef long long taken_version, taken_source
    cdef double taken_weight

    def __init__(self, Comm control, Comm data, like, int group_size, sync_period, bint passive,
                 bint conserving, bint crowded):
        cdef Py_buffer view
        cdef int k
        self.control = control
        self.data = data
        self.control_comm = control.ob_mpi
        self.rank = control.Get_rank()
        self.size = control.Get_size()
        self.group_size = group_size
        self.is_double = like.dtype.char == "d"
        self.itemsize = 8 if self.is_double else 4
        self.dtype = str(like.dtype)
        self.length = like.size
        self.conserving = conserving
        self.crowded = crowded
        self.rhythm = Rhythm()
        self.exchange = Exchange(data, self.length, self.is_double)
        self._lay_out_groups(shuffle(self.size, group_size))
        peers = activation_peers(self.rank, self.size)
        self.dimensions = len(peers)
        self.protocol = WaitAvoiding(self.dimensions, group_size, sync_period, passive)
        # Engines drift apart by no more than the bound, so tags further apart are never confused.
        self.window = 4 * propagation_bound(self.size, group_size) + 4 if group_size > 1 else 1
        self.sync_tag = self.window * PHASES
        pthread_mutex_init(&self.lock, NULL)
        self._allocate_vectors()
        PyObject_GetBuffer(like, &view, PyBUF_C_CONTIGUOUS)
        self._replace(<char *>view.buf)
        PyBuffer_Release(&view)
        self.gather = MPI_REQUEST_NULL
        for k in range(MAX_DIMENSIONS):
            self.receives[k] = MPI_REQUEST_NULL
            self.sends[k] = MPI_REQUEST_NULL
        for k, (destination, source) in enumerate(peers):
            self.destination[k] = destination
            self.source[k] = source

    def start(self):
        """Begin to listen for activations, once all ranks have come so far."""
        cdef int k
        pthread_mutex_lock(&mpi_mutex)
        for k in range(self.dimensions):
            self._check(MPI_Recv_init(self.received[k], 2, MPI_LONG_LONG, self.source[k],
                                      MPI_ANY_TAG, self.control_comm, &self.receives[k]))
            self._check(MPI_Start(&self.receives[k]))
        pthread_mutex_unlock(&mpi_mutex)

    def __dealloc__(self):
        free(self.vectors)
        free(self.third)
        free(self.records)
        free(self.cycles)

    cdef int _allocate_vectors(self) except -1:
        """Snapshot, second vector and the exchange's two blocks, in one piece of memory."""
        cdef Py_ssize_t vector = _round_up((HEADER + self.length) * self.itemsize, LINE)
        cdef Py_ssize_t block = _round_up(self.exchange.block * self.itemsize, LINE)
        self.vectors = _allocate(2 * vector + 2 * block)
        self.snapshot = self.vectors
        self.second = self.vectors + vector
        self.exchange.partial = self.vectors + 2 * vector
        self.exchange.incoming = self.exchange.partial + block
        return 0

    cdef int _lay_out_groups(self, sigma) except -1:
        """Lay the permutation out in C arrays, for `_find_group` to read without the GIL."""
        cdef int position, place, size = self.size
        cdef int *base = <int *>malloc(9 * size * sizeof(int))
        self.records = <long long *>malloc(2 * size * sizeof(long long))
        if base == NULL or self.records == NULL:
            raise MemoryError
        self.cycles = base
        self.cycle_begin, self.cycle_length = base + size, base + 2 * size
        self.cycle_index, self.chunk_begin = base + 3 * size, base + 4 * size
        self.chunk_end, self.members = base + 5 * size, base + 6 * size
        self.everyone, self.taken = base + 7 * size, base + 8 * size
        begin = {}
        place = 0
        for position in range(size):
            cycle = sigma.cycle[position]
            if cycle[0] not in begin:
                begin[cycle[0]] = place
                for rank in cycle:
                    self.cycles[place] = rank
                    place += 1
            self.cycle_begin[position] = begin[cycle[0]]
            self.cycle_length[position] = len(cycle)
            self.cycle_index[position] = sigma.index[position]
            self.chunk_begin[position] = sigma.bounds[sigma.chunk[position]]
            self.chunk_end[position] = sigma.bounds[sigma.chunk[position] + 1]
            self.everyone[position] = position
        return 0

    cdef int _find_group(self, long long version) noexcept nogil:
        """Fill `members` with this rank's group of the version; return its own place in it.

        This is topology.Shuffle.members on the arrays of `_lay_out_groups`.
        """
        cdef int rank = self.rank
        cdef long long length = self.cycle_length[rank]
        cdef int position = self.cycles[
            self.cycle_begin[rank]
            + <int>((self.cycle_index[rank] - version % length + length) % length)
        ]
        cdef int first = self.chunk_begin[position]
        cdef int each
        self.group_count = self.chunk_end[position] - first
        for each in range(first, first + self.group_count):
            self.members[each - first] = self.cycles[
                self.cycle_begin[each]
                + <int>((self.cycle_index[each] + version) % self.cycle_length[each])
            ]
        return position - first

    # Progress: whoever holds the lock advances the collective's state

    cdef bint progress(self) noexcept nogil:
        """Do all that can be done without waiting; return whether work is in flight."""
        cdef int indices[MAX_DIMENSIONS]
        cdef int count = 0
        cdef int i, k, done
        if self.size > 1:
            pthread_mutex_lock(&mpi_mutex)
            if self.dimensions:
                self._check(MPI_Testsome(
                    self.dimensions, self.receives, &count, indices, MPI_STATUSES_IGNORE))
            if count == MPI_UNDEFINED:
                count = 0
            for i in range(count):
                k = indices[i]
                if self.received[k][0] == FIN:
                    self.protocol.fin(k)
                else:
                    self.protocol.tell(self.received[k][0], self.received[k][1], k)
                    self._check(MPI_Start(&self.receives[k]))
            self._send_what_is_due()
            if self.protocol.stage == AGREEING:
                self._check(MPI_Test(&self.gather, &done, MPI_STATUS_IGNORE))
                if done:
                    self.protocol.agreed(self.records, self.size)
                    if self.protocol.stage == AGREEING:
                        self._contribute()
                    self._send_what_is_due()
            pthread_mutex_unlock(&mpi_mutex)
        elif self.protocol.stage == AGREEING:
            self.records[0] = self.protocol.operation
            self.records[1] = self.protocol.t
            self.protocol.agreed(self.records, 1)
        while self.protocol.vectors == RUNNING:
            if not self.begun:
                self._begin_version()
            if not self.exchange.progress():
                break
            self._finish_version()
        if self.protocol.stage == MOVING:
            if self.abandoned and not self.begun:
                self._begin_moving(self.snapshot)
            if self.begun and self.exchange.progress() and self.abandoned:
                self._finish_moving()
                self.abandoned = False
        if self.exchange.error != 0:
            self.error = self.exchange.error
        return self.begun or self.protocol.stage == AGREEING or self.protocol.due != 0

    cdef inline void _check(self, int rc) noexcept nogil:
        if rc != MPI_SUCCESS:
            self.error = rc

    cdef void _send_what_is_due(self) noexcept nogil:
        """Send activations and FINs; one send at a time is under way on each dimension."""
        cdef int k, done
        cdef unsigned int due = self.protocol.due | self.protocol.fin_due
        if due == 0:
            return
        for k in range(self.dimensions):
            while due >> k & 1:
                self._check(MPI_Test(&self.sends[k], &done, MPI_STATUS_IGNORE))
                if not done:
                    break
                if self.protocol.due >> k & 1:
                    self.protocol.due &= ~(1u << k)
                    self.sent[k][0] = self.protocol.sent[k]
                    self.sent[k][1] = self.protocol.sent_ops[k]
                else:
                    self.protocol.fin_due &= ~(1u << k)
                    self.sent[k][0] = FIN
                    self.sent[k][1] = 0
                self._check(MPI_Isend(
                    self.sent[k], 2, MPI_LONG_LONG, self.destination[k],
                    <int>(self.sent[k][0] % self.window) if self.sent[k][0] >= 0 else self.window,
                    self.control_comm, &self.sends[k]))
                due = self.protocol.due | self.protocol.fin_due

    cdef bint _all_sent(self) noexcept nogil:
        cdef int k, done
        cdef bint all = True
        pthread_mutex_lock(&mpi_mutex)
        for k in range(self.dimensions):
            self._check(MPI_Test(&self.sends[k], &done, MPI_STATUS_IGNORE))
            all = all and done
        pthread_mutex_unlock(&mpi_mutex)
        return all

    cdef void _contribute(self) noexcept nogil:
        """Gather what operation every rank is in; the MPI mutex is held."""
        self.record[0] = self.protocol.operation
        self.record[1] = self.protocol.t
        self._check(MPI_Iallgather(self.record, 2, MPI_LONG_LONG, self.records, 2, MPI_LONG_LONG,
                                   self.control_comm, &self.gather))

    cdef void _begin_version(self) noexcept nogil:
        cdef long long version = self.protocol.running
        cdef int me = self._find_group(version)
        cdef int tag = <int>(version % self.window) * PHASES
        cdef bint timely = self.calling and self.protocol.waiting and self.protocol.timely
        cdef char *target = self.x if timely else self.second
        cdef char *copy = NULL
        cdef char *saved = NULL
        if self.conserving:
            target = self.x if timely else self._data()
            copy = self._data() if timely else NULL
            saved = self.second if self.unchanged and not timely else NULL
        self.begun = True
        self.rhythm.beat(now())
        self.exchange.begin(self.members, self.group_count, me, tag,
                            self.snapshot, target, copy, saved)

    cdef void _finish_version(self) noexcept nogil:
        self.begun = False
        self.weight = self.exchange.weight
        if self.conserving and self.weight != 0:
            self._set_weight(1)
            self.unchanged = False
        self.protocol.finished()

    cdef void _begin_moving(self, char *source) noexcept nogil:
        cdef int tag = self.sync_tag + <int>(self.protocol.ops % 2) * PHASES
        cdef char *target = self._data()
        cdef char *copy = NULL if self.abandoned else self.x
        cdef char *saved = NULL
        if self.protocol.operation == AVERAGE:
            target = self.third + HEADER * self.itemsize
        elif self.abandoned and self.unchanged:
            saved = self.second
        self.begun = True
        self.exchange.begin(self.everyone, self.size, self.rank, tag, source, target, copy, saved)

    cdef void _finish_moving(self) noexcept nogil:
        self.begun = False
        self.weight = self.exchange.weight
        if self.protocol.operation != AVERAGE:
            if self.weight != 0:
                self._set_weight(1)
                self.unchanged = not self.abandoned
                self.unreturned = self.unreturned and self.abandoned
        self.protocol.moved()

    # What a rank publishes and what it takes back: the two late rules

    cdef void _set_weight(self, double weight) noexcept nogil:
        if self.is_double:
            (<double *>self.snapshot)[0] = weight
        else:
            (<float *>self.snapshot)[0] = <float>weight

    cdef bint _has_weight(self) noexcept nogil:
        return (<double *>self.snapshot)[0] != 0 if self.is_double else (
            (<float *>self.snapshot)[0] != 0)

    cdef char *_data(self) noexcept nogil:
        return self.snapshot + HEADER * self.itemsize

    cdef void _replace(self, char *x) noexcept nogil:
        """Make this vector what the rank contributes, with weight 0 and zeroed if not finite."""
        if self.is_double:
            self.finite = all_finite(<double *>x, self.length)
        else:
            self.finite = all_finite(<float *>x, self.length)
        if self.finite:
            memcpy(self._data(), x, self.length * self.itemsize)
        else:
            self.nonfinite += 1
            memset(self._data(), 0, self.length * self.itemsize)
        self._set_weight(1 if self.finite else 0)
        self.unchanged = self.finite
        self.unreturned = not self.finite

    cdef void _publish(self, char *x) noexcept nogil:
        """Publish: the vector itself (paper), or what the application changed (conserving).

        While the snapshot is `unchanged` since it was returned, adding the change gives x exactly.
        """
        if not self.conserving:
            self._replace(x)
            return
        if self.unreturned and not self._has_weight():
            self._replace(x)
            return
        if self.unreturned:
            self.finite = False
        elif self.is_double:
            self.finite = self._add_change(<double *>self._data(), <double *>x)
        else:
            self.finite = self._add_change(<float *>self._data(), <float *>x)
        if not self.finite:
            self.nonfinite += 1

    cdef bint _add_change(self, real *snapshot, const real *x) noexcept nogil:
        cdef const real *returned = <const real *>self.second
        if self.unchanged:
            if not all_finite(x, self.length):
                return False
            memcpy(snapshot, x, self.length * self.itemsize)
            return True
        if not finite_change(x, returned, self.length):
            return False
        add_change(snapshot, snapshot, x, returned, self.length)
        return True

    cdef void _take_late(self, char *x) noexcept nogil:
        """Late under the paper's rule: x = (W·m + x') / (W + 1), or m if x' is not finite."""
        if self.weight == 0:
            return
        if not self.finite:
            memcpy(x, self.second, self.length * self.itemsize)
        elif self.is_double:
            blend(<double *>x, <double *>self.second, self.weight, self.length)
        else:
            blend(<float *>x, <float *>self.second, <float>self.weight, self.length)

    cdef void _contribute_to_average(self, char *x) noexcept nogil:
        """Fill `third` with what a synchronisation would take from this rank now."""
        if self.is_double:
            self._fill_contribution(<double *>self.third, <double *>self._data(), <double *>x)
        else:
            self._fill_contribution(<float *>self.third, <float *>self._data(), <float *>x)

    cdef void _fill_contribution(
        self, real *contribution, const real *snapshot, const real *x
    ) noexcept nogil:
        cdef real *out = contribution + HEADER
        cdef const real *returned = snapshot if self.unchanged else <const real *>self.second
        cdef Py_ssize_t size = self.length * self.itemsize
        if not self.conserving or self.unreturned and not self._has_weight():
            contribution[0] = all_finite(x, self.length)
            memcpy(out, x, size)
            if contribution[0] == 0:
                memset(out, 0, size)
        elif self.unreturned or not finite_change(x, returned, self.length):
            contribution[0] = (<real *>self.snapshot)[0]
            memcpy(out, snapshot, size)
        elif self.unchanged:
            contribution[0] = 1
            memcpy(out, x, size)
        else:
            contribution[0] = 1
            add_change(out, snapshot, x, returned, self.length)

    # Waiting: the caller drives the collective

    cdef bint _reached(self, int goal) noexcept nogil:
        if goal == VECTORS_HELD:
            return self.protocol.vectors == HELD and not self.protocol.waiting
        if goal == AGREED:
            return self.protocol.stage != AGREEING
        if goal == AVERAGED:
            return self.begun and self.exchange.low >= self.exchange.length and self.error == 0
        if goal == OVER:
            return self.protocol.stage == OUTSIDE
        if goal == CAUGHT_UP:
            return self.protocol.stage == OUTSIDE and self.protocol.next >= self.protocol.t
        return self.protocol.may_leave() and self._all_sent()

    cdef int _wait(self, int goal) except -1 nogil:
        """Drive the collective until the goal is reached; the lock is held on entry and exit.

        Between polls it yields where ranks outnumber cores, and the longer it has waited, the
        longer it sleeps. About ten times a second it looks for signals.
        """
        cdef long long begin, checked, moves
        if self._reached(goal):
            return 0
        self.progress()
        if self._reached(goal):
            return 0
        begin = now()
        checked = begin
        self.waiting_callers += 1
        try:
            while not self._reached(goal):
                if self.error != 0:
                    with gil:
                        self._raise_mpi_error()
                moves = self.exchange.moves
                self._pause(begin, &checked)
                self.progress()
                if self.exchange.moves != moves:
                    begin = now()
        finally:
            self.waiting_callers -= 1
        return 0

    cdef int _pause(self, long long begin, long long *checked) except -1 nogil:
        """Let others run between two polls of a caller that has waited since `begin`."""
        cdef long long time = now()
        cdef long long waited = time - begin
        if waited < SPIN_BEFORE_SLEEP and not self.crowded:
            return 0
        cdef bint look = time - checked[0] > 100000000
        if look:
            # Getting the GIL may take long: let the progress thread drive in the meantime.
            self.waiting_callers -= 1
        pthread_mutex_unlock(&self.lock)
        try:
            if look:
                checked[0] = time
                with gil:
                    PyErr_CheckSignals()
            if waited < SPIN_BEFORE_SLEEP:
                sched_yield()
            else:
                sleep(min(waited >> 4, LONGEST_WAIT))
        finally:
            pthread_mutex_lock(&self.lock)
            if look:
                self.waiting_callers += 1
        return 0

    cdef int _raise_mpi_error(self) except -1:
        raise CollectiveError(f"rank {self.rank}: {MPI.Get_error_string(self.error)}")

    cdef int _call(self, char *x) except -1 nogil:
        """One version, from the application's vector to what it returns, in place."""
        self.x = x
        self.taken_version = self.protocol.t
        self.calling = True
        self.protocol.call()
        if self.protocol.timely:
            # The activations leave before the vector is copied.
            self.progress()
            self._publish_unlocked(x)
            self.protocol.published()
        self._wait(VECTORS_HELD)
        if not self.protocol.timely:
            pthread_mutex_unlock(&self.lock)
            self._publish(x)
            if not self.conserving:
                self._take_late(x)
            pthread_mutex_lock(&self.lock)
        if self.conserving:
            self._take_snapshot(x)
        memcpy(self.taken, self.members, self.group_count * sizeof(int))
        self.taken_count = self.group_count
        self.taken_weight = self.weight
        self.taken_source = self.protocol.source
        self.calling = False
        self.published = False
        self.protocol.returns()
        self._begin_what_waited()
        return 0

    cdef void _begin_what_waited(self) noexcept nogil:
        """Begin at once the version that waited for the application to let go of the vectors."""
        if self.protocol.vectors == RUNNING:
            self.progress()

    cdef int _publish_between_calls(self, char *x) except -1 nogil:
        """Publish, and remember the vector as what the application goes on from."""
        cdef bint unchanged
        self.holding = True
        self.protocol.hold()
        self._wait(VECTORS_HELD)
        unchanged = self.unchanged or self.unreturned
        pthread_mutex_unlock(&self.lock)
        self._publish(x)
        if self.conserving and self.finite and not unchanged:
            memcpy(self.second, x, self.length * self.itemsize)
        pthread_mutex_lock(&self.lock)
        self.holding = False
        self.protocol.release()
        self._begin_what_waited()
        return 0

    cdef void _take_snapshot(self, char *x) noexcept nogil:
        """Return the snapshot, unless nobody has contributed to it; a timely call has it already."""
        if not self._has_weight():
            return
        if not self.protocol.timely or self.weight == 0:
            pthread_mutex_unlock(&self.lock)
            memcpy(x, self._data(), self.length * self.itemsize)
            pthread_mutex_lock(&self.lock)
        self.unchanged = True
        self.unreturned = False

    cdef void _publish_unlocked(self, char *x) noexcept nogil:
        """Publish a vector that may be long, while the progress thread goes on forwarding.

        The application holds the vectors, so nothing else reads or writes them.
        """
        pthread_mutex_unlock(&self.lock)
        self._publish(x)
        pthread_mutex_lock(&self.lock)
        self.published = True

    cdef int _operate(self, int operation, char *x) except -1 nogil:
        """One synchronous operation; raises if the ranks do not agree on which it is."""
        cdef double weight
        self.protocol.enter(operation)
        if self.size > 1:
            pthread_mutex_lock(&mpi_mutex)
            self._contribute()
            pthread_mutex_unlock(&mpi_mutex)
        self._wait(AGREED)
        if operation == CLOSE:
            return self._wait(LEFT)
        if self.protocol.stage != MOVING:
            with gil:
                self._raise_disagreement(operation)
        self.x = x
        self.taken_version = self.protocol.t
        self.taken_count = 0
        if operation == AVERAGE:
            self._contribute_to_average(x)
            self._begin_moving(self.third)
        else:
            self._publish_unlocked(x)
            self._begin_moving(self.snapshot)
        self._wait(AVERAGED)
        weight = self.exchange.weight
        self.published = False
        self._finish_moving()
        self._begin_what_waited()
        self.taken_weight = weight
        return 0

    cdef void _abandon(self) noexcept nogil:
        """The call was interrupted by an exception: the user's vector is ours no longer."""
        pthread_mutex_lock(&self.lock)
        if self.begun and self.exchange.target == self.x:
            self.exchange.target = self._data() if self.conserving else self.second
        self.exchange.copy = NULL
        if self.published and self.conserving:
            # All that the application has changed is published; x is what it goes on from.
            memcpy(self.second, self.x, self.length * self.itemsize)
            self.unchanged = False
        self.published = False
        if self.protocol.stage != OUTSIDE:
            self.abandoned = True
        elif self.calling:
            self.protocol.abandon()
        elif self.holding:
            self.protocol.waiting = False
            if self.protocol.vectors == HELD:
                self.protocol.release()
        self.calling = False
        self.holding = False
        pthread_mutex_unlock(&self.lock)

    # What Python calls

    cdef int _open(self, vector, Py_buffer *view, int flags) except -1:
        """Check a vector and open its memory."""
        if self.closed or self.protocol.operation == CLOSE:
            raise ClosedError("this collective is closed")
        if self.protocol.broken:
            raise ClosedError("the ranks disagreed in an earlier operation: only close() is left")
        try:
            PyObject_GetBuffer(vector, view, flags | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
        except (BufferError, ValueError, TypeError):
            raise _what_is_wrong(vector, self.dtype, self.length) from None
        if (view.ndim != 1 or view.shape[0] != self.length or view.format[1] != 0
                or view.format[0] != (c"d" if self.is_double else c"f")
                or <size_t>view.buf % self.itemsize != 0):
            PyBuffer_Release(view)
            raise _what_is_wrong(vector, self.dtype, self.length)
        return 0

    def call(self, vector):
        """Average the vector in place in this rank's next version, or over all ranks."""
        cdef Result result = Result()
        cdef int k
        self._enter(CALL, vector, PyBUF_WRITABLE)
        result.version = self.taken_version
        result.synchronized = self.taken_count == 0
        result.weight = self.taken_weight
        if result.synchronized:
            result.timely = self.finite
            result.source = result.version
            result.group = tuple(range(self.size))
        else:
            result.timely = self.protocol.timely and self.finite
            result.source = self.taken_source
            result.group = tuple(sorted([self.taken[k] for k in range(self.taken_count)]))
        return result

    def synchronize(self, vector):
        """Average the vector in place over all ranks, and publish the average."""
        self._enter(SYNCHRONIZE, vector, PyBUF_WRITABLE)

    def average(self, vector):
        """Overwrite the vector by the average over all ranks, and change nothing else."""
        if self.third == NULL:
            self.third = _allocate((HEADER + self.length) * self.itemsize)
        self._enter(AVERAGE, vector, PyBUF_WRITABLE)

    def publish(self, vector):
        """Contribute this vector, or its change since the last, while this rank is late."""
        self._enter(PUBLISH, vector, 0)

    cdef int _enter(self, int what, vector, int flags) except -1:
        """Do what the application wants with its vector; see to it if an exception interrupts."""
        cdef Py_buffer view
        self._open(vector, &view, flags)
        try:
            with nogil:
                pthread_mutex_lock(&self.lock)
                try:
                    # What an exception interrupted before is carried on to its end first.
                    self._wait(CAUGHT_UP)
                    if what == CALL and not self.protocol.is_synchronous():
                        self._call(<char *>view.buf)
                    elif what == PUBLISH:
                        self._publish_between_calls(<char *>view.buf)
                    else:
                        self._operate(SYNC if what == CALL else what, <char *>view.buf)
                finally:
                    pthread_mutex_unlock(&self.lock)
        except:
            self._abandon()
            raise
        finally:
            PyBuffer_Release(&view)
        return 0

    def close(self):
        """Execute every version that anybody has started, and leave; collective."""
        cdef int k
        if self.closed:
            return
        with nogil:
            pthread_mutex_lock(&self.lock)
            try:
                if self.protocol.operation != CLOSE:
                    # What an exception interrupted is carried on to its end first.
                    self._wait(OVER)
                    self.abandoned = False
                    self._operate(CLOSE, NULL)
                else:
                    self._wait(LEFT)
            finally:
                pthread_mutex_unlock(&self.lock)
        self.closed = True
        pthread_mutex_lock(&mpi_mutex)
        for k in range(self.dimensions):
            MPI_Request_free(&self.receives[k])
        pthread_mutex_unlock(&mpi_mutex)

    cdef int _raise_disagreement(self, int operation) except -1:
        entered = {}
        for rank in range(self.size):
            entered.setdefault((self.records[2 * rank], self.records[2 * rank + 1]), []).append(rank)
        others = "; ".join(
            f"{name_ranks(ranks)} entered {SYNC_NAMES[kind]} after {t} calls"
            for (kind, t), ranks in sorted(entered.items())
        )
        closing = any(kind == CLOSE for kind, _ in entered)
        raise (ClosedError if closing else DisagreementError)(
            f"rank {self.rank} waits in {SYNC_NAMES[operation]} after {self.protocol.t} calls, "
            f"which needs all ranks to make the same calls, but {others}"
        )

    @property
    def version(self):
        """The version of the next call."""
        return self.protocol.t

    @property
    def executed(self):
        """Number of the next version to be executed here: how many have been, by anybody's call."""
        return self.protocol.next

    @property
    def bytes_sent(self):
        """Bytes of vectors sent by this rank so far."""
        return self.exchange.bytes_sent


cdef enum:
    SPIN_BEFORE_SLEEP = 500000
    LONGEST_WAIT = 500000


def _what_is_wrong(vector, dtype, length):
    """The error for a vector that the collective cannot average."""
    import numpy

    if not isinstance(vector, numpy.ndarray):
        return TypeError(f"the vector is a {type(vector).__name__}, not a numpy array")
    if vector.dtype != dtype:
        return TypeError(f"the vector is of dtype {vector.dtype}, the collective of {dtype}")
    if vector.ndim != 1:
        return ValueError(f"the vector has {vector.ndim} dimensions, not one")
    if vector.size != length:
        return ValueError(f"the vector has {vector.size} elements, the collective's have {length}")
    if not vector.flags.c_contiguous:
        return ValueError("the vector is not contiguous")
    if not vector.flags.aligned:
        return ValueError("the vector is not aligned")
    return ValueError("the vector is read-only")


cdef void _ask_for_short_slices() noexcept nogil:
    """Let this thread run soon after it wakes, and sleep precisely.

    It needs little time but at once. Linux 6.12 and later takes a thread with a shorter slice
    earlier; an older kernel ignores the length.
    """
    cdef sched_attr attributes
    memset(&attributes, 0, sizeof(attributes))
    if syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) == 0:
        attributes.runtime = SLICE
        syscall(SYS_sched_setattr, 0, &attributes, 0)
    prctl(PR_SET_TIMERSLACK, 1)


cdef class Engine:
    """The process's progress thread, which serves all its collectives."""
    cdef void *served[MAX_COLLECTIVES]
    cdef int count
    cdef pthread_mutex_t lock
    cdef bint stopping, spinning
    cdef long long moves
    cdef list collectives  # keeps those served alive
    cdef object thread

    def __init__(self):
        pthread_mutex_init(&self.lock, NULL)
        self.collectives = []

    def add(self, Collective collective, str mode):
        """Serve a collective; the first one starts the thread, unless the mode is "none"."""
        cdef void *pointer = <void *>collective
        self.collectives.append(collective)
        # Not with the GIL held in between: the thread that serves all collectives takes this lock.
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.served[self.count] = pointer
            self.count += 1
            pthread_mutex_unlock(&self.lock)
        self.spinning = mode == "dedicated"
        if self.thread is None and mode != "none" and collective.size > 1:
            self.stopping = False
            self.thread = threading.Thread(target=self._serve, name="wagma-engine", daemon=True)
            self.thread.start()

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
        if kept == 0 and self.thread is not None:
            thread, self.thread = self.thread, None
            self.stopping = True
            thread.join()

    def _serve(self):
        with nogil:
            _ask_for_short_slices()
            self._loop()

    cdef void _loop(self) noexcept nogil:
        cdef int i, polls = 0
        cdef bint busy
        cdef long long pause, moves = 0
        while not self.stopping:
            busy = False
            self.moves = 0
            pause = LONGEST_PAUSE
            pthread_mutex_lock(&self.lock)
            for i in range(self.count):
                busy |= self._look_after(<Collective>self.served[i], &pause)
            pthread_mutex_unlock(&self.lock)
            if not busy or self.moves != moves:
                polls = 0
            moves = self.moves
            if self.spinning:
                continue
            if busy:
                # Whom it waits for may need this core.
                polls += 1
                pause = 0 if polls < BUSY_POLLS else min(polls * BUSY_PAUSE, LONGEST_PAUSE)
            if pause:
                sleep(pause)

    cdef bint _look_after(self, Collective collective, long long *pause) noexcept nogil:
        """Advance one collective, unless a caller does; shorten the pause if it wants that."""
        cdef bint busy
        if collective.waiting_callers or pthread_mutex_trylock(&collective.lock) != 0:
            return False
        busy = not collective.closed and collective.progress()
        self.moves += collective.exchange.moves
        pause[0] = min(pause[0], collective.rhythm.pause(now()))
        pthread_mutex_unlock(&collective.lock)
        return busy
