"""Push-sum, the average on directed graphs of stochastic gradient push (SGP).

Each rank has a numerator X and a weight w. A call divides both among the rank itself and the ranks
that it has edges to at this time, and adds the shares received; X / w tends to ΣX / Σw, on any
graph that is connected over time, and the two sums never change.

Source: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, Algorithm
1; the graphs that change with the call are those of its appendix A.
"""

import array
import itertools

import cython

from collectives.protocols.peers import PeerProtocol

# The kind of a message with a share of a numerator and of a weight.
SHARE = 2


class PushSumProtocol(PeerProtocol):
    """One rank of push-sum.

    Args:
        port, rank, size: see `PeerProtocol`.
        destinations, sources: lists of the ranks that this one sends to and receives from, one list
            for each of the phases through which the graph goes, call by call.
        weight: w at the start, when X is w times the model.

    Attributes:
        weight: w.
    """

    def __init__(self, port, rank, size, destinations, sources, weight):
        PeerProtocol.__init__(self, port, rank, size, set().union(*sources))
        self.follows = True
        self.phases = len(destinations)
        self.destinations = array.array("i", [peer for phase in destinations for peer in phase])
        self.sources = array.array("i", [peer for phase in sources for peer in phase])
        # Where the ranks of each phase begin.
        self.first_destination = starts(destinations)
        self.first_source = starts(sources)
        self.initial = weight
        self.weight = weight
        self.phase = 0

    def begin(self):
        self.weight = self.initial
        self.port.scale(self.weight)

    def start(self):
        """Divide X and w among this rank and its destinations in this phase."""
        i: cython.int
        self.phase = self.calls % self.phases
        first: cython.int = self.first_destination[self.phase]
        last: cython.int = self.first_destination[self.phase + 1]
        share: cython.double = 1 / (1 + cython.cast(cython.double, last - first))
        self.port.publish(1)
        self.port.scale(share)
        self.weight *= share
        if last > first:
            self.port.write_model(SHARE, self.calls, self.weight)
        for i in range(first, last):
            self.port.post(self.destinations[i])
        self.calling = True

    def received(self, source, kind, number, weight):
        self.messages[self.index_of(source)] += 1
        self.most_calls = max(self.most_calls, number + 1)

    def proceed(self):
        """Add the shares received, once all that the call waits for have arrived."""
        i: cython.int
        source: cython.int
        if not self.calling:
            return
        first: cython.int = self.first_source[self.phase]
        last: cython.int = self.first_source[self.phase + 1]
        for i in range(first, last):
            if self.messages[self.index_of(self.sources[i])] == 0:
                return
        for i in range(first, last):
            source = self.sources[i]
            self.messages[self.index_of(source)] -= 1
            self.weight += self.port.mix(source, 1, 1)
        self.averagings += 1
        self.calls += 1
        self.calling = False
        self.port.return_model(self.factor())

    def factor(self):
        return 1 / self.weight

    def is_waited_for_by(self, rank):
        i: cython.int
        for i in range(self.first_destination[self.phases]):  # noqa: SIM110
            if self.destinations[i] == rank:
                return True
        return False

    def waits_for(self, rank):
        i: cython.int
        if not self.calling:
            return False
        for i in range(self.first_source[self.phase], self.first_source[self.phase + 1]):
            if self.sources[i] == rank:
                return self.messages[self.index_of(rank)] == 0
        return False


def starts(phases):
    """Return where each of these lists begins in their concatenation, and where the last ends."""
    return array.array("i", itertools.accumulate(map(len, phases), initial=0))
