"""The engine's ports: they move one rank's vectors as its `RankProtocol` decides.

The thread that holds the collective's lock calls them. MPI is called by the exchanges only, which
take the MPI mutex for it.
"""

from libc.stdlib cimport free
from libc.string cimport memcpy

from collectives.engine.tags cimport operation_tag, version_tag
from collectives.exchange.clock cimport now
from collectives.exchange.mutex cimport pthread_mutex_lock, pthread_mutex_unlock
from collectives.memory.allocation cimport zeroed
from collectives.protocols.all_ranks cimport AVERAGE
from collectives.protocols.contribution cimport NOWHERE, SCRATCH, SNAPSHOT, X
from collectives.protocols.snapshots cimport UNFILLED
from collectives.recording.recorder cimport (
    BYTES,
    COPY,
    OPERATION,
    flush,
    note,
    note_if_long,
    record_version,
    recording,
)

cdef extern from "<sched.h>" nogil:
    int sched_yield()


cdef class EnginePort(RankPort):
    """Moves the vectors of operations of all ranks: by messages, or in memory that ranks share.

    Args:
        exchange, vectors: of the collective.
        contribution: what the rank contributes.
        rank, size: this rank, and how many there are.
    """

    def __init__(self, Exchange exchange, HostVectors vectors, ContributionProtocol contribution,
                 int rank, int size):
        cdef int each
        self.exchange, self.vectors = exchange, vectors
        self.reduction, self.arrival = exchange.reduction, exchange.reduction.arrival
        self.contribution, self.operations = contribution, contribution.operations
        self.rank, self.size = rank, size
        self.space = self.reduction.space
        self.everyone = <int *>zeroed(size, sizeof(int))
        if self.everyone == NULL:
            raise MemoryError
        for each in range(size):
            self.everyone[each] = each

    def __dealloc__(self):
        free(self.everyone)

    # Passes over vectors

    cdef void begin_pass(self, int step, bint moves) noexcept nogil:
        if moves:
            self.unlock_to_copy()

    cdef bint end_pass(self, int step, bint moves) noexcept nogil:
        if moves:
            self.lock_after_copy()
        return True

    cdef void unlock_to_copy(self) noexcept nogil:
        """Release the lock while this thread reads or writes long vectors.

        Other threads drive the collective meanwhile. The application holds the vectors, so nothing
        else reads or writes them.
        """
        self.copying = True
        self.copy_began = now()
        pthread_mutex_unlock(self.lock)

    cdef void lock_after_copy(self) noexcept nogil:
        cdef long long end = now()
        self.copying_ns += end - self.copy_began
        note_if_long(COPY, self.number, self.copy_began, end)
        pthread_mutex_lock(self.lock)
        self.copying = False

    cdef void lock_when_copied(self) noexcept nogil:
        """Take the lock, once no thread and no device accesses the application's buffer."""
        pthread_mutex_lock(self.lock)
        while self.copying or not self.is_here():
            self.yield_lock()

    cdef void yield_lock(self) noexcept nogil:
        """Let another thread have the lock for a moment."""
        pthread_mutex_unlock(self.lock)
        sched_yield()
        pthread_mutex_lock(self.lock)

    cdef bint is_here(self) noexcept nogil:
        return self.arrival.arrays == NULL or self.arrival.handover.arrived()

    cdef bint knows_change(self) noexcept nogil:
        return self.vectors.knows_change()

    cdef void remember(self) noexcept nogil:
        """Vectors that only operations average are never compressed."""

    # Exchanges

    cdef void begin_average(self, long long number) noexcept nogil:
        if not (self.exchange.shares(self.everyone, self.size) and self.begin_shared(number)):
            self.begin_by_messages(
                self.everyone, self.size, self.rank, operation_tag(self.operations.ops), False,
                self.vectors.layout.count)

    cdef bint begin_shared(self, long long number) noexcept nogil:
        """Begin in memory that all ranks share; return whether this average is made there.

        It is on devices, where any MPI will do then.
        """
        if self.space.deferred:
            self.begin_in_ring(
                number, self.vectors.of[X if self.contribution.lent else SCRATCH])
        return self.space.deferred

    cdef void begin_in_ring(self, long long number, char **arrays) noexcept nogil:
        """Begin to average these arrays in place, through the ring."""
        self.in_ring = arrays
        self.exchange.shared.describe(
            False, False, True, self.contribution.weight, self.contribution.weight,
            self.own_count())
        self.exchange.begin_in_memory(
            number, True, self.everyone, self.size, arrays, True, True, False)

    cdef bint has_own(self) noexcept nogil:
        """Return whether the rank contributes a vector, rather than zeros in place of one."""
        return True

    cdef double own_count(self) noexcept nogil:
        """Return the count that travels with the rank's vector: see `protocols.job_count`."""
        return 0

    cdef void begin_by_messages(
        self, const int *members, int size, int me, int tag, bint keeps, int averaged
    ) noexcept nogil:
        self.reduction.own_count = self.own_count()
        self.reduction.has_own = self.has_own()
        self.exchange.begin(
            members, size, me, tag, self.contribution.weight,
            self.vectors.start[self.contribution.source], self.vectors.of[X],
            self.contribution.lent, keeps,
            self.vectors.arrays(self.contribution.target),
            self.vectors.arrays(self.contribution.copy),
            self.vectors.arrays(self.contribution.saved), averaged)

    cdef bint is_exchanged(self) noexcept nogil:
        if not self.exchange.progress():
            return False
        if (self.in_ring != NULL and self.in_ring == self.vectors.of[SCRATCH]
                and self.contribution.copy != NOWHERE and self.reduction.weight != 0):
            self.vectors.copy(self.contribution.copy, SCRATCH)
        self.in_ring = NULL
        return True

    cdef double total_weight(self) noexcept nogil:
        return self.reduction.weight

    cdef void number_from(self, long long first, long long shift) noexcept nogil:
        """Operations are numbered by themselves."""

    cdef void adopt(self) noexcept nogil:
        self.exchange.adopt(self.vectors.arrays(self.kept_in()))

    cdef int kept_in(self) noexcept nogil:
        """Return where the application's part of the mean goes if no other vector has it."""
        return SCRATCH if self.in_ring != NULL else NOWHERE

    cdef void redirect(self) noexcept nogil:
        self.reduction.target = self.vectors.arrays(self.contribution.target)
        self.reduction.copy = self.vectors.arrays(self.contribution.copy)
        self.reduction.saved = self.vectors.arrays(self.contribution.saved)

    cdef void returns(self, bint in_group) noexcept nogil:
        """The caller sees it by `done`."""
        if recording() and not in_group:
            flush(&self.reduction.exchanged, self.number)
            self.note_bytes()
            if self.operation_began:
                note(OPERATION, self.number, self.operation_began, now(), self.operation,
                     self.operation_number, self.operations.version + self.operations.base)
        self.operation_began = 0

    # The timeline

    cdef void entered(self) noexcept nogil:
        """Note which operation the rank has entered, for the timeline."""
        if recording():
            self.operation = self.operations.operation
            self.operation_number = self.operations.ops
            self.operation_began = now()

    cdef void note_bytes(self) noexcept nogil:
        """Record how many bytes of vectors were sent so far."""
        if self.reduction.bytes_sent != self.bytes_noted:
            self.bytes_noted = self.reduction.bytes_sent
            note(BYTES, self.number, now(), now(), self.bytes_noted)


cdef class VersionsPort(EnginePort):
    """Moves the vectors of versions as well, and opens them to the ranks of the node.

    Args:
        groups: the groups of versions.
        window: how many versions have different tags.
        rhythm: what predicts when versions are started.
        others: the other arguments of `EnginePort`.
    """

    def __init__(self, *others, Groups groups, int window, Rhythm rhythm):
        EnginePort.__init__(self, *others)
        self.publishing = self.contribution
        self.groups, self.window, self.rhythm = groups, window, rhythm
        self.members = <int *>zeroed(self.size, sizeof(int))
        if self.members == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.members)

    cdef void remember(self) noexcept nogil:
        self.reduction.remember(self.vectors.start[SNAPSHOT])

    # Exchanges

    cdef void begin_version(self, long long version, long long number) noexcept nogil:
        cdef int me = self.groups.find(version + self.operations.base)
        cdef bint lent = self.publishing.lent
        self.version_began = now()
        self.rhythm.beat(self.version_began)
        if self.exchange.shares(self.groups.members, self.groups.count):
            self.describe()
            self.exchange.begin_in_memory(
                number, False, self.groups.members, self.groups.count,
                self.vectors.of[X] if self.publishing.direct else NULL, lent,
                lent and self.publishing.bypasses_snapshot(), self.publishing.keeps)
        else:
            self.begin_by_messages(
                self.groups.members, self.groups.count, me, version_tag(version, self.window),
                self.publishing.keeps, self.groups.averaged(version + self.operations.base))

    cdef bint begin_shared(self, long long number) noexcept nogil:
        if self.operations.operation == AVERAGE:
            return EnginePort.begin_shared(self, number)
        self.describe()
        self.exchange.begin_in_memory(
            number, True, self.everyone, self.size,
            self.vectors.arrays(self.publishing.copy), self.publishing.lent, False, False)
        return True

    cdef void describe(self) noexcept nogil:
        """Tell other ranks of the node where this rank's mean goes, and its vector's weight."""
        self.exchange.shared.describe(
            self.publishing.is_in_place(), self.publishing.saves_snapshot(), self.has_own(),
            self.publishing.weight, self.publishing.weight_after(), self.own_count())

    cdef bint has_own(self) noexcept nogil:
        return self.publishing.lent or self.publishing.state != UNFILLED

    cdef double own_count(self) noexcept nogil:
        return self.publishing.job.count

    cdef double mean_count(self) noexcept nogil:
        return self.reduction.count

    cdef void number_from(self, long long first, long long shift) noexcept nogil:
        if self.exchange.shared is not None:
            self.exchange.shared.steps.oldest = first
            self.exchange.shared.blocks.shift = shift

    cdef int kept_in(self) noexcept nogil:
        return SNAPSHOT if self.publishing.bypasses_snapshot() else EnginePort.kept_in(self)

    cdef void returns(self, bint in_group) noexcept nogil:
        """Keep the group's members: another version may be executed before the caller reads them.
        """
        EnginePort.returns(self, in_group)
        if in_group:
            self.count = self.groups.count
            memcpy(self.members, self.groups.members, self.count * sizeof(int))

    cdef void executed(self, long long version) noexcept nogil:
        cdef long long staleness = version - self.publishing.published_version
        self.executions += 1
        self.passive += staleness != 0
        self.staleness[min(staleness, MOST_STALENESS)] += 1
        if recording():
            self.note_bytes()
            # Those that others execute for this rank may not be of the group found last.
            record_version(
                &self.reduction.exchanged, self.number, self.version_began, version + self.operations.base, staleness,
                version - self.operations.version, self.groups.members,
                self.groups.count if self.version_began else 0)
        self.version_began = 0

    cdef void find_group(self, long long version) noexcept nogil:
        self.groups.find(version + self.operations.base)

    # Vectors that other ranks may use

    cdef bint is_quiet(self) noexcept nogil:
        return self.space.over(self.space.begun())

    cdef void open(self, long long number) noexcept nogil:
        self.describe()
        self.exchange.shared.steps.open(number)

    cdef long long close(self) noexcept nogil:
        self.kept = self.exchange.shared.steps.close()
        return self.exchange.shared.steps.number

    cdef bint has_begun(self) noexcept nogil:
        return self.kept

    cdef double closed_weight(self) noexcept nogil:
        return self.exchange.shared.part.total

    cdef double closed_count(self) noexcept nogil:
        return self.exchange.shared.part.count

    cdef long long closed_average(self) noexcept nogil:
        return self.exchange.shared.part.average_number

    cdef double closed_average_count(self) noexcept nogil:
        return self.exchange.shared.part.average_count

    cdef bint replaced(self) noexcept nogil:
        return self.exchange.shared.part.replaced

    cdef long long reached(self) noexcept nogil:
        return self.exchange.shared.steps.reached()

    cdef void resume(self) noexcept nogil:
        self.version_began = now()
        self.exchange.resume_in_memory()

    cdef bint needs_messages(self, long long number) noexcept nogil:
        return self.exchange.shared.steps.needs_messages(number)

    cdef bint leaves_to_others(self) noexcept nogil:
        """On devices a rank helps only while its caller waits.

        In its progress thread, the driver or a busy device could delay the blocks that it has
        taken, and the others with them. Whoever needs the version executes it.
        """
        return self.space.deferred and self.waiting_callers[0] == 0

    cdef bint help(self, long long number) noexcept nogil:
        return self.exchange.shared.steps.help(self.rank, number)

    cdef bint awaits_device(self) noexcept nogil:
        """Return whether other ranks wait for blocks that a device still averages for this one."""
        return self.exchange.shared is not None and self.exchange.shared.steps.averaging.count > 0
