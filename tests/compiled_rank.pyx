"""A compiled rank whose port, vectors and tree are Python objects: see test_rank.py."""

from libc.stdlib cimport free, malloc

from collectives.protocols.all_ranks cimport TreePort
from collectives.protocols.contribution cimport Vectors
from collectives.protocols.rank_port cimport RankPort
from collectives.protocols.snapshots cimport SnapshotProtocol
from collectives.protocols.versions cimport VersionsProtocol
from collectives.protocols.wait_avoiding cimport WaitAvoidingProtocol

from collectives.protocols.late_rules import late_rule


cdef class PythonTree(TreePort):
    cdef object port

    cdef void send_failure(self, int dimension, int rank) noexcept nogil:
        with gil:
            self.port.send_failure(dimension, rank)

    cdef void send_activation(self, int dimension, long long version, long long ops) noexcept nogil:
        with gil:
            self.port.send_activation(dimension, version, ops)

    cdef void send_free(self, int dimension, long long ops) noexcept nogil:
        with gil:
            self.port.send_free(dimension, ops)

    cdef void send_fin(self, int dimension) noexcept nogil:
        with gil:
            self.port.send_fin(dimension)


cdef class PythonVectors(Vectors):
    cdef object port

    cdef void copy(self, int to, int source) noexcept nogil:
        with gil:
            self.port.copy(to, source)

    cdef void zero(self, int vector) noexcept nogil:
        with gil:
            self.port.zero(vector)

    cdef bint all_finite(self, int vector) noexcept nogil:
        with gil:
            return self.port.all_finite(vector)

    cdef bint is_change_finite(self) noexcept nogil:
        with gil:
            return self.port.is_change_finite()

    cdef void add_change(self, int to) noexcept nogil:
        with gil:
            self.port.add_change(to)

    cdef void absorb(self, double own, double total) noexcept nogil:
        with gil:
            self.port.absorb(own, total)


cdef class PythonPort(RankPort):
    cdef object port

    cdef void begin_pass(self, int step, bint moves) noexcept nogil:
        with gil:
            self.port.begin_pass(step, moves)

    cdef bint end_pass(self, int step, bint moves) noexcept nogil:
        with gil:
            return self.port.end_pass(step, moves)

    cdef bint is_here(self) noexcept nogil:
        with gil:
            return self.port.is_here()

    cdef bint knows_change(self) noexcept nogil:
        with gil:
            return self.port.knows_change()

    cdef void remember(self) noexcept nogil:
        with gil:
            self.port.remember()

    cdef void begin_average(self, long long number) noexcept nogil:
        with gil:
            self.port.begin_average(number)

    cdef bint is_exchanged(self) noexcept nogil:
        with gil:
            return self.port.is_exchanged()

    cdef double total_weight(self) noexcept nogil:
        with gil:
            return self.port.total_weight()

    cdef void number_from(self, long long first, long long shift) noexcept nogil:
        with gil:
            self.port.number_from(first, shift)

    cdef void adopt(self) noexcept nogil:
        with gil:
            self.port.adopt()

    cdef void redirect(self) noexcept nogil:
        with gil:
            self.port.redirect()

    cdef void returns(self, bint in_group) noexcept nogil:
        with gil:
            self.port.returns(in_group)

    cdef void begin_version(self, long long version, long long number) noexcept nogil:
        with gil:
            self.port.begin_version(version, number)

    cdef void executed(self, long long version) noexcept nogil:
        with gil:
            self.port.executed(version)

    cdef void find_group(self, long long version) noexcept nogil:
        with gil:
            self.port.find_group(version)

    cdef bint is_quiet(self) noexcept nogil:
        with gil:
            return self.port.is_quiet()

    cdef void open(self, long long number) noexcept nogil:
        with gil:
            self.port.open(number)

    cdef long long close(self) noexcept nogil:
        with gil:
            return self.port.close()

    cdef bint has_begun(self) noexcept nogil:
        with gil:
            return self.port.has_begun()

    cdef long long reached(self) noexcept nogil:
        with gil:
            return self.port.reached()

    cdef double closed_weight(self) noexcept nogil:
        with gil:
            return self.port.closed_weight()

    cdef bint replaced(self) noexcept nogil:
        with gil:
            return self.port.replaced()

    cdef void resume(self) noexcept nogil:
        with gil:
            self.port.resume()

    cdef bint needs_messages(self, long long number) noexcept nogil:
        with gil:
            return self.port.needs_messages(number)

    cdef bint leaves_to_others(self) noexcept nogil:
        with gil:
            return self.port.leaves_to_others()

    cdef bint help(self, long long number) noexcept nogil:
        with gil:
            return self.port.help(number)


cdef class CompiledRank:
    """One rank; see `test_rank.SourceRank`."""

    cdef readonly WaitAvoidingProtocol versions
    cdef readonly SnapshotProtocol publishing
    cdef readonly VersionsProtocol driven

    def __init__(self, port, dimensions, group_size, sync_period, passive, late, seed,
                 shares):
        cdef PythonTree tree = PythonTree()
        cdef PythonVectors vectors = PythonVectors()
        cdef PythonPort executing = PythonPort()
        tree.port = vectors.port = executing.port = port
        self.versions = WaitAvoidingProtocol(dimensions, group_size, sync_period, passive)
        self.versions.attach(tree)
        if seed is not None:
            self.versions.draw(0, 1 << dimensions, seed)
        self.publishing = SnapshotProtocol(vectors, self.versions, late_rule(late))
        self.driven = VersionsProtocol(self.versions, self.publishing)
        self.driven.attach(executing)
        self.publishing.replace()
        self.publishing.count_once()
        self.driven.begin(shares)

    def give(self, double weight):
        self.publishing.give(weight)

    def forget(self):
        self.publishing.forget()

    def call(self):
        self.driven.call()

    def publish(self):
        self.driven.publish()

    def join(self):
        self.driven.join()

    def enter(self, int operation):
        self.driven.enter(operation)

    def agreed(self, records, long long loading, bint differ):
        cdef int each
        cdef long long *copied = <long long *>malloc(len(records) * sizeof(long long))
        for each in range(len(records)):
            copied[each] = records[each]
        self.driven.agreed(copied, len(records) // 2, loading, differ, False)
        free(copied)

    def activate(self, long long version, long long ops, int dimension):
        self.versions.activate(version, ops, dimension)

    def notice(self, int rank, int dimension):
        self.versions.notice(rank, dimension)

    def send(self, int dimension):
        if self.versions.due_on() >> dimension & 1:
            self.versions.send_on(dimension)

    def advance(self):
        return self.driven.advance()

    def passed(self):
        self.driven.passed()

    def interrupt(self, bint ended):
        self.driven.interrupt()
        self.driven.interrupted(ended)
