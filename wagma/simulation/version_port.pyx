"""One rank of a simulated wait-avoiding method: its activations, its steps and its vectors.

It does what `collectives.engine.ports` does over MPI.
"""

from cpython.buffer cimport PyBUF_WRITABLE

from collectives.memory.layout cimport Layout, UserVector
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.contribution cimport NOWHERE, RESULT, SCRATCH, SNAPSHOT, X
from collectives.protocols.rank cimport CONTRIBUTE, RETURN
from collectives.protocols.snapshots cimport UNFILLED, SnapshotProtocol
from collectives.protocols.versions cimport PUBLISH
from wagma.simulation.values cimport Average
from wagma.simulation.vectors cimport add_vector


cdef class VersionsMethod(Method):
    """The method of all ranks, as their ports see it: a base class."""

    cdef void join_group(self, int rank, long long version):
        """Take part in an exchange, which begins once the last member of the group does."""
        raise NotImplementedError

    cdef void join_all(self):
        """Take part in the average over all ranks, which begins once the last rank does."""
        raise NotImplementedError

    cdef void count_version(
        self, long long version, SnapshotProtocol contribution, dict counts
    ):
        """Count a version by the age of what a rank contributed."""
        raise NotImplementedError

    cdef void end_call(self, int rank, SnapshotProtocol contribution, bint in_group):
        """Return from the application's call."""
        raise NotImplementedError


cdef class SimulatedTree(TreePort):
    """Sends one rank's activations."""

    def __init__(self, VersionsMethod method, int rank):
        self.method, self.rank = method, rank

    cdef void send_activation(self, int dimension, long long version, long long ops) noexcept nogil:
        with gil:
            self.method.simulation.send(
                self.rank, self.method.peers[self.rank, dimension], ACTIVATION, ACTIVATED,
                version, ops << 8 | dimension)

    cdef void send_free(self, int dimension, long long ops) noexcept nogil:
        with gil:
            self.method.simulation.send(
                self.rank, self.method.peers[self.rank, dimension], ACTIVATION, FREED,
                ops, dimension)


cdef class WrittenVectors(Vectors):
    """A simulated rank's vectors: each pass that writes one takes time.

    Attributes:
        passes: how many passes have written one.
        values: the vectors of a rank that trains; None: they have no values.
        given: the application's vector, whose memory it keeps alive.
    """

    def __init__(self, Layout layout):
        if layout is not None:
            self.values = HostVectors(layout)
            layout.zero_vector(add_vector(self.values, SNAPSHOT))
            layout.zero_vector(add_vector(self.values, RESULT))
            layout.zero_vector(add_vector(self.values, SCRATCH))

    cdef int give(self, vector) except -1:
        """Set the application's vector, X."""
        self.given = UserVector(vector, self.values.layout, PyBUF_WRITABLE)
        self.values.of[X] = self.given.arrays
        return 0

    cdef void copy(self, int to, int source) noexcept nogil:
        self.passes += 1
        if self.values is not None:
            self.values.copy(to, source)

    cdef void zero(self, int vector) noexcept nogil:
        self.passes += 1
        if self.values is not None:
            self.values.zero(vector)

    cdef bint all_finite(self, int vector) noexcept nogil:
        return self.values is None or self.values.all_finite(vector)

    cdef bint is_change_finite(self) noexcept nogil:
        return self.values is None or self.values.is_change_finite()

    cdef void add_change(self, int to) noexcept nogil:
        self.passes += 1
        if self.values is not None:
            self.values.add_change(to)

    cdef void absorb(self, double own, double total) noexcept nogil:
        self.passes += 1
        if self.values is not None:
            self.values.absorb(own, total)


    cdef void keep_part(self) noexcept nogil:
        self.passes += 1
        if self.values is not None:
            self.values.keep_part()

    cdef void take_out_part(self) noexcept nogil:
        self.passes += 1
        if self.values is not None:
            self.values.take_out_part()

    cdef void put_back_part(self) noexcept nogil:
        self.passes += 1
        if self.values is not None:
            self.values.put_back_part()


cdef class SimulatedPort(RankPort):
    """Executes one rank's steps, each of which takes the time that the machine's model gives.

    Attributes:
        publishing, vectors: the rank's.
        exchanged: whether its exchange is complete.
        total, count: the weight of the mean of that, and the mean of the members' counts.
        copies_after: seconds that it needs after an exchange to copy its mean, or what that
            replaces.
        group: the members of the group that the last call returned the mean of.
        staleness: number of versions executed with a contribution of each age.
    """

    def __init__(self, VersionsMethod method, int rank, SnapshotProtocol publishing,
                 WrittenVectors vectors):
        self.method, self.rank = method, rank
        self.publishing, self.vectors = publishing, vectors
        self.total = 1
        self.staleness = {}

    cdef void begin_pass(self, int step, bint moves) noexcept nogil:
        """The time is that of the passes that follow."""

    cdef bint end_pass(self, int step, bint moves) noexcept nogil:
        """A late call publishes and takes the newest result at once.

        The mean of a timely call is written directly to the application's buffer.
        """
        cdef double staging = self.method.staging_time
        cdef double writing = self.vectors.passes * self.method.copy_time
        self.vectors.passes = 0
        if step != PUBLISH and step != RETURN and (step != CONTRIBUTE or writing == 0):
            return True
        with gil:
            if step == CONTRIBUTE:
                staging = 0
            elif step == RETURN and not self.publishing.versions.timely:
                staging = 2 * staging
            self.method.simulation.later(writing + staging, PASSED, self.rank)
        return False

    cdef bint is_here(self) noexcept nogil:
        return True

    cdef bint knows_change(self) noexcept nogil:
        return True

    cdef void remember(self) noexcept nogil:
        if self.reference is not None:
            self.vectors.values.layout.space.copy(
                self.reference.address, self.vectors.values.start[SNAPSHOT],
                self.vectors.values.layout.size)

    cdef void begin_version(self, long long version, long long number) noexcept nogil:
        """Begin the rank's part of an exchange, once a lent vector that it keeps is copied."""
        self._begin_exchange()
        with gil:
            if self.publishing.lent and self.publishing.keeps:
                self.method.simulation.later(self.method.copy_time, READY, self.rank, version)
            else:
                self.method.join_group(self.rank, version)

    cdef void begin_average(self, long long number) noexcept nogil:
        self._begin_exchange()
        with gil:
            self.method.join_all()

    cdef void _begin_exchange(self) noexcept nogil:
        self.exchanged = False
        self.copies_after = self.method.copy_time * (
            (self.publishing.copy != NOWHERE) + (self.publishing.saved != NOWHERE))

    cdef bint is_exchanged(self) noexcept nogil:
        return self.exchanged

    cdef double total_weight(self) noexcept nogil:
        return self.total

    cdef double mean_count(self) noexcept nogil:
        return self.count

    cdef char *referred(self) noexcept nogil:
        return NULL if self.reference is None else self.reference.address

    cdef void contribute(self, Average average) noexcept nogil:
        """Add what its exchange averages to the average."""
        cdef int source = X if self.publishing.lent else self.publishing.source
        if self.publishing.lent and self.publishing.keeps:
            self.vectors.values.copy(self.publishing.source, X)
        average.add(
            self.vectors.values.of[source], self.publishing.weight, self.referred())
        average.count += self.publishing.job.count

    cdef void take(self, Average average) noexcept nogil:
        """Store the mean where it goes; until its exchange is complete nothing else is there."""
        cdef char **own = NULL
        if self.publishing.lent or self.publishing.state != UNFILLED:
            own = self.vectors.values.of[X if self.publishing.lent else self.publishing.source]
        self.total, self.count = average.weight, average.count / average.size
        average.write(
            self.vectors.values.arrays(self.publishing.target),
            self.vectors.values.arrays(self.publishing.copy),
            self.vectors.values.arrays(self.publishing.saved), own, self.referred())

    cdef void number_from(self, long long first, long long shift) noexcept nogil:
        """Exchanges need no numbers."""

    cdef void executed(self, long long version) noexcept nogil:
        with gil:
            self.method.count_version(version, self.publishing, self.staleness)

    cdef void returns(self, bint in_group) noexcept nogil:
        with gil:
            self.method.end_call(self.rank, self.publishing, in_group)
