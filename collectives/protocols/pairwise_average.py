"""AD-PSGD's average of pairs: a rank and a random neighbor both get the mean of their models.

The averages run in the background, and no call waits for one. A rank asks a neighbor. If the
neighbor is free, it grants the average by sending its model, and takes part in no other until it
has received half of the difference, which it adds and the asking rank subtracts. Applications may
add changes to both models in between, and none is lost.

No deadlock can occur, on any graph: a rank that is asked while it asks another lets lower ranks
wait and refuses higher ones. So each waiting rank waits for a higher one, or for one that has been
granted an average and waits for no rank. A rank that was refused asks another neighbor.

Source: Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018,
Algorithm 1, which avoids deadlocks by allowing bipartite graphs only (its appendix).
"""

import array
import hashlib

from collectives.protocols.peers import PeerProtocol

# The kinds of messages.
ASK = 2
GRANT = 3
REFUSE = 4
HALF = 5

# The states of a rank: not averaging, waiting to be granted an average, or waiting for the half.
FREE = 0
ASKING = 1
GRANTED = 2


class PairwiseAverageProtocol(PeerProtocol):
    """One rank of AD-PSGD.

    Args:
        port, rank, size: see `PeerProtocol`.
        neighbors: the ranks that it may ask, and that may ask it.
        seed: determines the neighbors that it draws.

    Attributes:
        state: FREE, ASKING or GRANTED.
        refusals: how often it was refused. `missed`: calls without an average, because all
            neighbors that it asked refused, or one requested earlier was still in progress.
    """

    def __init__(self, port, rank, size, neighbors, seed):
        PeerProtocol.__init__(self, port, rank, size, [])
        self.neighbors = array.array("i", neighbors)
        digest = hashlib.blake2b(f"{seed} {rank}".encode(), digest_size=8).digest()
        self.random = 1 + int.from_bytes(digest, "little") % 2147483646
        self.waiting = array.array("i", [0]) * size
        self.refusals = 0
        self.missed = 0
        self.begin()

    def begin(self):
        self.state = FREE
        self.peer = -1
        self.attempts = 0
        # The ranks that wait to be granted an average, in the order of their requests: a ring.
        self.first_waiting = 0
        self.count_waiting = 0

    def call(self):
        """Publish the change, request another average, and return the model."""
        self.port.publish(1)
        self.calls += 1
        if self.attempts > 0:
            self.missed += 1
        elif len(self.neighbors) > 0:
            self.attempts = len(self.neighbors)
        self.advance()
        self.port.return_model(1)

    def received(self, source, kind, number, weight):
        if kind == ASK:
            if self.state == ASKING and source > self.rank:
                self.answer(source, REFUSE)
            else:
                self.waiting[(self.first_waiting + self.count_waiting) % self.size] = source
                self.count_waiting += 1
        elif kind == GRANT:
            self.port.halve(source, HALF, self.calls)
            self.averagings += 1
            self.attempts = 0
            self.state = FREE
        elif kind == HALF:
            self.port.mix(source, 1, 1)
            self.averagings += 1
            self.passive += 1
            self.state = FREE
        elif kind == REFUSE:
            self.refusals += 1
            self.attempts -= 1
            self.state = FREE
            if self.attempts == 0:
                self.missed += 1

    def proceed(self):
        """Grant an average to the rank that has waited longest, or ask for one."""
        if self.state != FREE:
            return
        if self.count_waiting > 0:
            self.peer = self.waiting[self.first_waiting]
            self.first_waiting = (self.first_waiting + 1) % self.size
            self.count_waiting -= 1
            self.state = GRANTED
            self.port.write_model(GRANT, self.calls, 0)
            self.port.post(self.peer)
        elif self.attempts > 0 and not self.paused:
            self.peer = self.neighbors[self.draw(len(self.neighbors))]
            self.state = ASKING
            self.answer(self.peer, ASK)

    def answer(self, rank, kind):
        """Send a message without a vector."""
        self.port.write(kind, self.calls)
        self.port.post(rank)

    def draw(self, count):
        """Return a random number below `count`, by Park and Miller's generator."""
        self.random = self.random * 48271 % 2147483647
        return self.random % count

    def is_quiet(self):
        return self.state == FREE and (self.attempts == 0 or self.paused)

    def waits_for(self, rank):
        """Return whether this rank is averaging with `rank`: only leaving waits for it, no call."""
        return self.state != FREE and rank == self.peer
