"""Operations of all simulated ranks, whose calls are executed by a protocol of their method.

It does what `collectives.engine.collective` does over MPI; all decisions are those of
`collectives.protocols.rank`.
"""

from cpython.buffer cimport PyBUF_WRITABLE

import numpy as np

from collectives.memory.layout cimport Layout, UserVector
from collectives.memory.vectors cimport HostVectors
from collectives.protocols.all_ranks cimport NONE, AllRanksProtocol
from collectives.protocols.contribution cimport SCRATCH, X, ContributionProtocol
from collectives.protocols.rank cimport RankProtocol
from collectives.protocols.rank_port cimport RankPort
from wagma.simulation.core cimport Simulation, placed_allreduce_time
from wagma.simulation.values cimport Average
from wagma.simulation.vectors cimport add_vector

cdef enum:
    # Bytes of a rank's record in the agreement on an operation.
    RECORD = 16


cdef class OperatingRank(RankPort):
    """One rank's part in the operations, whose passes over vectors are part of their time."""

    def __init__(self, Operations all, int rank):
        self.all, self.rank = all, rank
        self.vectors = HostVectors(all.layout)
        add_vector(self.vectors, SCRATCH)
        self.operations = AllRanksProtocol(0)
        self.contribution = ContributionProtocol(self.vectors, self.operations)
        self.steps = RankProtocol(self.operations, self.contribution)
        self.steps.attach(self)

    cdef void begin_pass(self, int step, bint moves) noexcept nogil:
        pass

    cdef bint end_pass(self, int step, bint moves) noexcept nogil:
        return True

    cdef bint is_here(self) noexcept nogil:
        return True

    cdef bint knows_change(self) noexcept nogil:
        return True

    cdef void remember(self) noexcept nogil:
        """Vectors of operations alone are never compressed."""

    cdef void begin_average(self, long long number) noexcept nogil:
        self.exchanged = False
        with gil:
            self.all._join_average()

    cdef bint is_exchanged(self) noexcept nogil:
        return self.exchanged

    cdef double total_weight(self) noexcept nogil:
        return self.total

    cdef void number_from(self, long long first, long long shift) noexcept nogil:
        """Exchanges need no numbers."""

    cdef void returns(self, bint in_group) noexcept nogil:
        with gil:
            self.all.simulation.returns(self.rank)


cdef class Operations:
    """The operations of all ranks of a simulation: agreements and averages.

    Args:
        simulation: the `Simulation`.
        layout: of the vectors averaged.
        nbytes: their length in bytes, that averages take the time of.
        first_kind: of the two kinds of events that are its own.
        sharing: whether the ranks of a node average in memory that they share; it changes the order
            of additions, not the times.

    Attributes:
        layout: as given.
    """

    def __init__(self, Simulation simulation, Layout layout, nbytes, int first_kind,
                 bint sharing=False):
        cdef int ranks = simulation.ranks
        machine = simulation.machine
        nodes = list(simulation.node_of[:ranks])
        self.simulation, self.layout, self.agreed_kind = simulation, layout, first_kind
        self.sharing = sharing and nodes[0] == nodes[ranks - 1]
        self.average = Average(layout, ranks)
        self.agreement_time = placed_allreduce_time(machine, nodes, RECORD)
        self.average_time = placed_allreduce_time(machine, nodes, nbytes)
        self.average_time += 2 * nbytes / machine.staging
        self.ranks = [OperatingRank(self, rank) for rank in range(ranks)]
        self.calls, self.numbers = [0] * ranks, [0] * ranks
        self.records = np.zeros((ranks, 2), np.int64)

    def check(self, vector):
        """Raise ValueError or TypeError if this vector cannot be averaged."""
        UserVector(vector, self.layout, PyBUF_WRITABLE)

    def enter(self, int rank, int operation, vector, weight, long long calls, long long number=0):
        """Enter an operation.

        Args:
            vector, weight: what is averaged; None: nothing, or with the last weight.
            calls: how many calls the rank has made.
            number: the version to load.
        """
        cdef OperatingRank entering = <OperatingRank>self.ranks[rank]
        entering.given = None
        if vector is not None:
            entering.given = UserVector(vector, self.layout, PyBUF_WRITABLE)
            entering.vectors.of[X] = entering.given.arrays
            entering.contribution.give(
                entering.contribution.given_weight if weight is None else weight)
        self.calls[rank], self.numbers[rank] = calls, number
        entering.steps.enter(operation)
        self.entered += 1
        if self.entered == self.simulation.ranks:
            self.entered = 0
            self.simulation.later(self.agreement_time, self.agreed_kind, rank)

    def ended(self, int rank):
        """End a rank's operation; return whether the ranks have entered it together."""
        cdef OperatingRank ending = <OperatingRank>self.ranks[rank]
        cdef bint together = ending.steps.disagreed == NONE
        ending.steps.disagreed = NONE
        ending.contribution.forget()
        ending.given = None
        return together

    def calls_made(self):
        """Return how many calls each rank had made when it entered the last operation."""
        return tuple(self.calls)

    def synchronizations(self, int rank):
        """Return the number of averages from which a rank has gone on."""
        return (<OperatingRank>self.ranks[rank]).steps.synchronizations

    cdef bint happens(self, int kind, int rank):
        """Return whether this event is one of these operations', and handle it."""
        cdef OperatingRank exchanging
        if kind == self.agreed_kind:
            self._agree()
        elif kind == self.agreed_kind + 1:
            exchanging = <OperatingRank>self.ranks[rank]
            exchanging.exchanged = True
            exchanging.steps.advance()
        else:
            return False
        return True

    cdef void _agree(self):
        """Tell every rank what all have entered, and let it begin."""
        cdef bint differ = any(number != self.numbers[0] for number in self.numbers)
        cdef OperatingRank agreeing
        cdef int rank
        for rank, agreeing in enumerate(self.ranks):
            self.records[rank, 0] = agreeing.operations.operation
        for agreeing in self.ranks:
            agreeing.steps.agreed(
                &self.records[0, 0], self.simulation.ranks, self.numbers[0], differ, False)
            if agreeing.steps.disagreed != NONE:
                self.simulation.returns(agreeing.rank)
            agreeing.steps.advance()

    cdef void _join_average(self):
        """Take part in the average over all ranks, which begins once the last rank does."""
        cdef OperatingRank member
        self.joined += 1
        if self.joined < self.simulation.ranks:
            return
        self.joined = 0
        self.average.begin()
        for member in self.ranks:
            self.average.add(
                member.vectors.of[X if member.contribution.lent else member.contribution.source],
                member.contribution.weight, NULL)
        self.average.compute(self.sharing)
        for member in self.ranks:
            member.total = self.average.weight
            self.average.write(
                member.vectors.arrays(member.contribution.target),
                member.vectors.arrays(member.contribution.copy), NULL, NULL, NULL)
            self.simulation.later(self.average_time, self.agreed_kind + 1, member.rank)
