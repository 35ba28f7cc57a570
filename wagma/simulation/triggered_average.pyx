# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Simulates local SGD whose averages the fastest rank starts, with the engine's protocol."""

import numpy as np

from collectives.topology import activation_peers

from collectives.protocols.all_ranks cimport JOIN, SYNC, TreePort
from collectives.protocols.triggered_average cimport TriggeredAverageProtocol
from wagma.simulation.core cimport Method, mpi_allreduce_time

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


cdef class TriggeredAveraging(Method):
    """The ranks of `collectives.TriggeredAverage`, as `wagma.LocalSGD` calls it.

    A rank that has made all its steps takes part at once in averages that the others start.

    Args:
        sync_period: τ.
        nbytes: length of the model, in bytes.
    """

    cdef readonly long long sync_period, nbytes
    cdef list protocols
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
        self.protocols = [
            TriggeredAverageProtocol(self.peers.shape[1], self.sync_period) for _ in range(ranks)
        ]
        for rank in range(ranks):
            (<TriggeredAverageProtocol>self.protocols[rank]).attach(Activations(self, rank))
        self.average_time = mpi_allreduce_time(machine, ranks, self.nbytes)
        self.average_time += 2 * self.nbytes / machine.staging

    cpdef arrives(self, int rank):
        cdef TriggeredAverageProtocol protocol = <TriggeredAverageProtocol>self.protocols[rank]
        if protocol.call():
            protocol.enter(SYNC)
            self.entered += 1
            self._begin_if_all_are_there()
        else:
            self._return(rank, protocol)
        self._send(protocol)

    cpdef happens(self, int kind, int rank, long long a, long long b):
        cdef TriggeredAverageProtocol protocol = <TriggeredAverageProtocol>self.protocols[rank]
        cdef bint joined = protocol.joined
        cdef long long[2] common
        if kind == ACTIVATED:
            protocol.tell(a, b)
            self._send(protocol)
            return
        # All ranks contribute the same operation and version, so one record stands for all.
        common[0], common[1] = SYNC, protocol.version
        protocol.agreed(common, 1)
        protocol.reduced()
        if not joined:
            self.entered -= 1
            self._return(rank, protocol)

    cdef void _return(self, int rank, TriggeredAverageProtocol protocol):
        """Return from the call; after its last call the rank joins."""
        self.simulation.returns(rank)
        if self.simulation.is_done(rank):
            protocol.enter(JOIN)
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
