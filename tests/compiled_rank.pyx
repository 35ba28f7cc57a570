"""A compiled rank whose port, vectors and tree are Python objects, by `compiled.of_python`."""

from libc.stdlib cimport free, malloc

from collectives.protocols.own_pace cimport OwnPaceProtocol
from collectives.protocols.snapshots cimport SnapshotProtocol
from collectives.protocols.versions cimport VersionsProtocol
from collectives.protocols.wait_avoiding cimport WaitAvoidingProtocol

from collectives.protocols.late_rules import late_rule


cdef class CompiledRank:
    """One rank; see `test_rank.SourceRank`."""

    cdef readonly WaitAvoidingProtocol versions
    cdef readonly SnapshotProtocol publishing
    cdef readonly VersionsProtocol driven

    def __init__(self, port, dimensions, group_size, sync_period, passive, late, seed,
                 shares, own_pace):
        kind = OwnPaceProtocol if own_pace else WaitAvoidingProtocol
        self.versions = kind(dimensions, group_size, sync_period, passive)
        self.versions.attach(PythonTreePort(port))
        if seed is not None:
            self.versions.draw(0, 1 << dimensions, seed)
        self.publishing = SnapshotProtocol(
            PythonVectors(port), self.versions, late_rule(late))
        self.driven = VersionsProtocol(self.versions, self.publishing)
        self.driven.attach(PythonRankPort(port))
        self.publishing.replace()
        self.publishing.count_once()
        self.publishing.lease.begin(1)
        self.driven.begin(shares)

    def give(self, double weight):
        self.publishing.give(weight)

    def forget(self):
        self.publishing.forget()

    def call(self):
        self.driven.call()

    def hold(self, int purpose):
        self.driven.hold(purpose)

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
