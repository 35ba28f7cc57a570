"""Simulates local SGD whose averages the fastest rank starts, with the engine's protocol."""

import numpy as np

from collectives.topology import activation_peers

from collectives.protocols.all_ranks cimport JOIN, SYNC, TreePort
from collectives.protocols.rank cimport RankPort
from collectives.protocols.triggered_average cimport (
    HeldContribution,
    TriggeredAverageProtocol,
    TriggeredRankProtocol,
)
from wagma.simulation.core cimport Method, mpi_allreduce_time
from wagma.simulation.vectors cimport NoVectors

# Events: an activation has arrived; all ranks have averaged.
cdef enum:
    ACTIVATED
    AVERAGED

cdef enum:
    # Bytes of an activation.
    ACTIVATION = 16


cdef class Activations(TreePort):
    """Sends one rank's activations."""

    cdef TriggeredAveraging method
    cdef int rank

    def __init__(self, TriggeredAveraging method, int rank):
        self.method, self.rank = method, rank

    cdef void send_activation(self, int dimension, long long version, long long ops) noexcept nogil:
        with gil:
            self.method.simulation.send(
                self.rank, self.method.peers[self.rank, dimension], ACTIVATION, ACTIVATED,
                version, dimension)


cdef class AveragingPort(RankPort):
    """Executes one rank's steps: all of an average takes place at the time of its end."""

    cdef TriggeredAveraging method
    cdef int rank

    def __init__(self, TriggeredAveraging method, int rank):
        self.method, self.rank = method, rank

    cdef void begin_pass(self, int step, bint moves) noexcept nogil:
        pass

    cdef bint end_pass(self, int step, bint moves) noexcept nogil:
        return True

    cdef void remember(self) noexcept nogil:
        pass

    cdef void begin_average(self, long long number) noexcept nogil:
        pass

    cdef bint is_exchanged(self) noexcept nogil:
        return True

    cdef double total_weight(self) noexcept nogil:
        return 1

    cdef void number_from(self, long long first, long long shift) noexcept nogil:
        pass

    cdef void returns(self, bint in_group) noexcept nogil:
        with gil:
            self.method._return(self.rank)


cdef class TriggeredAveraging(Method):
    """The ranks of `collectives.TriggeredAverage`, as `wagma.LocalSGD` calls it.

    A rank that has made all its steps takes part at once in averages that the others start.

    Args:
        sync_period: τ.
        nbytes: length of the model, in bytes.
    """

    cdef readonly long long sync_period, nbytes
    cdef list ranks
    cdef int[:, ::1] peers
    cdef int entered, joined
    cdef double average_time

    def __init__(self, sync_period, nbytes):
        self.sync_period, self.nbytes = sync_period, nbytes

    cpdef begin(self):
        cdef int ranks = self.simulation.ranks
        machine = self.simulation.machine
        peers = [[peer for peer, _ in activation_peers(rank, ranks)] for rank in range(ranks)]
        self.peers = np.array(peers, dtype=np.intc).reshape(ranks, -1)
        self.ranks = [self._new_rank(rank) for rank in range(ranks)]
        self.average_time = mpi_allreduce_time(machine, ranks, self.nbytes)
        self.average_time += 2 * self.nbytes / machine.staging

    def _new_rank(self, int rank):
        cdef TriggeredAverageProtocol protocol = TriggeredAverageProtocol(
            self.peers.shape[1], self.sync_period)
        cdef TriggeredRankProtocol deciding = TriggeredRankProtocol(
            protocol, HeldContribution(NoVectors(), protocol))
        protocol.attach(Activations(self, rank))
        deciding.attach(AveragingPort(self, rank))
        return deciding

    cpdef arrives(self, int rank):
        cdef TriggeredRankProtocol deciding = <TriggeredRankProtocol>self.ranks[rank]
        deciding.held.give(1)
        deciding.call()
        if not deciding.done:
            self.entered += 1
            self._begin_if_all_are_there()
        self._send(deciding.triggering)

    cpdef happens(self, int kind, int rank, long long a, long long b):
        cdef TriggeredRankProtocol deciding = <TriggeredRankProtocol>self.ranks[rank]
        cdef long long[2] common
        if kind == ACTIVATED:
            deciding.triggering.activate(a, b)
            self._send(deciding.triggering)
            return
        if not deciding.ranks.joined:
            self.entered -= 1
        # All ranks contribute the same operation and version, so one record stands for all.
        common[0], common[1] = SYNC, deciding.ranks.version
        deciding.agreed(common, 1, 0, False, False)
        deciding.advance()

    cdef void _return(self, int rank):
        """Return from the call; after its last call the rank joins."""
        cdef TriggeredRankProtocol deciding = <TriggeredRankProtocol>self.ranks[rank]
        self.simulation.returns(rank)
        if self.simulation.is_done(rank):
            deciding.enter(JOIN)
            self.joined += 1
            self._begin_if_all_are_there()

    cdef void _begin_if_all_are_there(self):
        """Schedule the average if one has been started and no rank computes."""
        cdef int rank
        if self.entered == 0 or self.entered + self.joined < self.simulation.ranks:
            return
        self.updates += 1
        for rank in range(self.simulation.ranks):
            self.simulation.later(self.average_time, AVERAGED, rank)

    cdef void _send(self, TriggeredAverageProtocol protocol):
        cdef int k
        for k in range(self.peers.shape[1]):
            if protocol.due_on() >> k & 1:
                protocol.send_on(k)
