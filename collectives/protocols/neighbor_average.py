"""D-PSGD's average of neighbors: x_{k+1} = Σ_j W_ij x_k^j + change.

Every rank sends its model as soon as it is computed, while its application computes the change; a
call waits only for the models of the ranks with edges to this one.

Source: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017,
Algorithm 1. With the `global_clock` a call waits for all ranks, as in WAGMA-SGD's comparison.
"""

import array

import cython

from collectives.protocols.peers import PeerProtocol

# The kinds of messages: a model, and from CLOCK on the rounds of a barrier.
MODEL = 2
CLOCK = 3


class NeighborAverageProtocol(PeerProtocol):
    """One rank of D-PSGD.

    Args:
        port, rank, size: see `PeerProtocol`.
        sources, shares: the ranks whose models this one averages, and their weights.
        own: the weight of its own.
        destinations: the ranks that average this one's model.
        global_clock: whether each call waits for the same call of all ranks.
    """

    def __init__(self, port, rank, size, sources, shares, own, destinations, global_clock):
        # The number of rounds of the barrier (dissemination); `ticks` counts each one's messages.
        self.rounds = (size - 1).bit_length() if global_clock else 0
        before = [(rank - (1 << number)) % size for number in range(self.rounds)]
        PeerProtocol.__init__(self, port, rank, size, {*sources, *before})
        self.follows = True
        self.sources = array.array("i", sources)
        self.shares = array.array("d", shares)
        self.own = own
        self.destinations = array.array("i", destinations)
        self.ticks = array.array("q", [0] * (self.rounds + 1))
        self.round = 0

    def begin(self):
        r: cython.int
        for r in range(self.rounds):
            self.ticks[r] = 0
        self.round = 0
        self.distribute()

    def distribute(self):
        """Send the model to all that average it."""
        i: cython.int
        self.port.write_model(MODEL, self.calls, 0)
        for i in range(len(self.destinations)):
            self.port.post(self.destinations[i])

    def start(self):
        self.calling = True
        if self.rounds > 0:
            self.tick(0)

    def tick(self, number):
        """Begin a round of the barrier."""
        self.round = number
        self.port.write(CLOCK + number, self.calls)
        self.port.post((self.rank + (1 << number)) % self.size)

    def received(self, source, kind, number, weight):
        if kind == MODEL:
            self.messages[self.index_of(source)] += 1
            self.most_calls = max(self.most_calls, number)
        else:
            self.ticks[kind - CLOCK] += 1
            self.most_calls = max(self.most_calls, number + 1)

    def proceed(self):
        """Average, once all messages that the call waits for have arrived."""
        i: cython.int
        source: cython.int
        keep: cython.double = self.own
        if not self.calling:
            return
        while self.round < self.rounds and self.ticks[self.round] > 0:
            self.ticks[self.round] -= 1
            if self.round + 1 < self.rounds:
                self.tick(self.round + 1)
            else:
                self.round = self.rounds
        if self.round < self.rounds:
            return
        for i in range(len(self.sources)):
            if self.messages[self.index_of(self.sources[i])] == 0:
                return
        for i in range(len(self.sources)):
            source = self.sources[i]
            self.messages[self.index_of(source)] -= 1
            self.port.mix(source, keep, self.shares[i])
            keep = 1
        self.port.publish(1)
        self.averagings += 1
        self.calls += 1
        self.calling = False
        self.distribute()
        self.port.return_model(1)

    def owes(self):
        return self.calling and self.round + 1 < self.rounds

    def is_waited_for_by(self, rank):
        i: cython.int
        for i in range(self.rounds):
            if (self.rank + (1 << i)) % self.size == rank:
                return True
        for i in range(len(self.destinations)):  # noqa: SIM110
            if self.destinations[i] == rank:
                return True
        return False

    def waits_for(self, rank):
        i: cython.int
        if not self.calling:
            return False
        if self.round < self.rounds and (rank + (1 << self.round)) % self.size == self.rank:
            return True
        for i in range(len(self.sources)):
            if self.sources[i] == rank:
                return self.messages[self.index_of(rank)] == 0
        return False
