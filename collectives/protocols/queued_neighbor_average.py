"""Hop's average of neighbors, with queues of updates and of tokens, for ranks of unequal speed.

Like D-PSGD's, x_{k+1} = Σ_j W_ij x_k^j + change, except for how far ranks may be apart:

- standard: an iteration needs the update of the same iteration from every rank with an edge to this
  one; W_ij = 1/n, where n counts these updates and the rank's own.
- with b backup workers: it needs n − b of these, its own included; all that have arrived have equal
  weights. Later ones are dropped.
- with a staleness of s: it needs an update of iteration k − s or later from each of these ranks.
  The newest update u that arrived from a rank since the last iteration has the weight
  Iter(u) − (k − s) + 1, the rank's own s + 1; in a simple mean, all have equal weights.
- both (the paper has only a row of Table 1 on this; the rule is ours): it needs such updates from
  n − b ranks.

A rank needs a token from each rank that it has an edge to before it enters an iteration, and gives
one to each rank with an edge to it. So none is more than `max_gap` iterations ahead of a rank that
averages its model. Ranks may have different numbers of backup workers. A rank that holds many
tokens from each of these ranks is behind, and skips iterations. Alternatively, with notify-ack, a
rank sends an update once all receivers have used the one before.

Source: Luo et al., Hop: Heterogeneity-aware Decentralized Training, ASPLOS 2019, Figures 4 and 7 to
9, sections 5 and 6; notify-ack: Kadav and Kruus, ASAP, 2016, in its section 3.3.
"""

import array

import cython

from collectives.protocols.peers import PeerProtocol

# The kinds of messages: a model; that a rank has entered an iteration, which is a token for each
# iteration that it entered or skipped; that a rank has used the updates of an iteration.
UPDATE = 2
TOKEN = 3
ACK = 4


class QueuedNeighborAverageProtocol(PeerProtocol):
    """One rank of Hop; `calls` is its iteration.

    Args:
        port, rank, size: see `PeerProtocol`.
        sources: the ranks whose updates this one averages.
        destinations: those that average this one's updates.
        max_gap: how many iterations it may be ahead of these, at least 1; None: no tokens.
        backup: how many updates may be missing, less than their number with the rank's own.
        staleness: s; None: updates are of the iteration that they are used in.
        mean: "weighted": newer updates count more, with staleness; "simple": all alike.
        max_skip: the largest number of iterations by which a call advances; 0: one.
        skip_trigger: it skips if it is behind all destinations by more than this many iterations.
        mode: "standard", or "notify-ack": without tokens, backups and staleness.
        order: "parallel": an update is the model before the change that its rank computes
            meanwhile; "serial": with that change.
        slots: the number of iterations whose updates are kept; None: as many as can be in flight.

    Attributes:
        dropped: updates that arrived, but were not used.
        withheld: updates that were not sent, because their receiver was past them.
    """

    def __init__(
        self,
        port,
        rank,
        size,
        sources,
        destinations,
        max_gap=5,
        backup=0,
        staleness=None,
        mean="weighted",
        max_skip=0,
        skip_trigger=1,
        mode="standard",
        order="parallel",
        slots=None,
    ):
        PeerProtocol.__init__(self, port, rank, size, {*sources, *destinations})
        count = len(self.awaited)
        self.follows = True
        self.queues = True
        self.tokens = max_gap is not None
        self.max_gap = max_gap or 0
        self.needed = 1 + len(sources) - backup
        self.bounded = staleness is not None
        self.staleness = staleness or 0
        self.weighted = self.bounded and mean == "weighted"
        self.max_skip = max_skip if destinations else 0
        self.skip_trigger = skip_trigger
        self.acknowledges = mode == "notify-ack"
        self.serial = order == "serial"
        if slots is None:
            # Without tokens a rank is ahead by no more than a path has edges (Theorem 1).
            slots = max_gap + 1 if self.tokens else size
        self.slots = 1 if self.bounded else slots
        # For each rank awaited: whether it is a source, a destination. For a source: whether an
        # update is queued, by its iteration modulo the slots; the iteration of its newest update;
        # whether the model last returned includes one.
        self.is_source = array.array("i", [peer in sources for peer in self.awaited])
        self.is_destination = array.array("i", [peer in destinations for peer in self.awaited])
        self.queued = array.array("i", [0]) * (count * self.slots)
        self.newest = array.array("q", [0]) * count
        self.used = array.array("i", [0]) * count
        # For a destination: the iteration that it has entered, and the last one whose updates it
        # has used, as far as this rank knows.
        self.entered = array.array("q", [0]) * count
        self.acknowledged = array.array("q", [0]) * count
        self.sent = False
        self.dropped = 0
        self.withheld = 0

    def begin(self):
        i: cython.int
        for i in range(len(self.queued)):
            self.queued[i] = False
        for i in range(len(self.awaited)):
            self.newest[i] = self.calls - 1
            self.entered[i] = self.calls
            self.acknowledged[i] = self.calls - 1
        self.sent = False
        self.send()

    # Updates

    def send(self):
        """Send this iteration's update, once it is due, to all destinations that may use it."""
        i: cython.int
        written: cython.bint = False
        if self.sent or ((self.leaving or self.serial) and not self.calling):
            return
        if self.acknowledges:
            for i in range(len(self.awaited)):
                if self.is_destination[i] and self.acknowledged[i] < self.calls - 1:
                    return
        self.sent = True
        for i in range(len(self.awaited)):
            if not self.is_destination[i]:
                continue
            if self.entered[i] > self.calls + self.staleness:
                self.withheld += 1
                continue
            if not written:
                self.port.write_model(UPDATE, self.calls, 0)
                written = True
            self.port.post(self.awaited[i])

    def received(self, source, kind, number, weight):
        i: cython.int = self.index_of(source)
        if kind == UPDATE:
            self.enqueue(i, number)
        elif kind == TOKEN:
            self.entered[i] = number
            self.most_calls = max(self.most_calls, number)
        else:
            self.acknowledged[i] = number
            self.most_calls = max(self.most_calls, number + 1)

    def enqueue(self, i, iteration):
        """Keep an update that has arrived, unless it is too old, in place of an older one."""
        slot: cython.int = i * self.slots + iteration % self.slots
        # A rank that sends in its call is about to complete that call.
        self.most_calls = max(self.most_calls, iteration + self.serial)
        if self.bounded and self.queued[slot]:
            self.drop(i)
        self.newest[i] = iteration
        self.queued[slot] = iteration >= self.calls - self.staleness
        if not self.queued[slot]:
            self.drop(i)

    def drop(self, i):
        self.port.drop(self.awaited[i])
        self.dropped += 1

    def has_update(self, i, iteration):
        """Return whether an iteration need not wait for a source's update."""
        if self.bounded:
            return self.newest[i] >= iteration - self.staleness
        return self.queued[i * self.slots + iteration % self.slots] != 0

    def has_enough(self, iteration):
        """Return whether the updates that an iteration needs have arrived."""
        i: cython.int
        count: cython.int = 1
        for i in range(len(self.awaited)):
            if self.is_source[i] and self.has_update(i, iteration):
                count += 1
        return count >= self.needed

    def weight_of(self, i, iteration):
        """Return the weight of a source's update, 0 if none is queued for this iteration."""
        if not self.queued[i * self.slots + iteration % self.slots]:
            return 0
        if self.weighted:
            return self.newest[i] - iteration + self.staleness + 1
        return 1

    def reduce(self, iteration):
        """Average the model, as the rank's own update, with the updates queued for an iteration."""
        i: cython.int
        weight: cython.longlong
        total: cython.double = self.staleness + 1 if self.weighted else 1
        others: cython.double = 0
        for i in range(len(self.awaited)):
            total += self.weight_of(i, iteration)
        for i in range(len(self.awaited)):
            others += self.weight_of(i, iteration) / total
        keep: cython.double = 1 - others
        for i in range(len(self.awaited)):
            weight = self.weight_of(i, iteration)
            if weight > 0:
                self.queued[i * self.slots + iteration % self.slots] = False
                self.used[i] = True
                self.port.mix(self.awaited[i], keep, weight / total)
                keep = 1
        self.averagings += 1

    # Iterations

    def start(self):
        i: cython.int
        self.calling = True
        for i in range(len(self.used)):
            self.used[i] = False
        if self.serial:
            self.port.publish(1)

    def proceed(self):
        """Average, and enter another iteration, once the updates and tokens needed have arrived."""
        iteration: cython.longlong = self.calls
        skipped: cython.longlong
        self.send()
        if not (self.calling and self.sent and self.has_enough(iteration)):
            return
        if not self.may_enter(iteration + 1):
            return
        self.reduce(iteration)
        if not self.serial:
            self.port.publish(1)
        following: cython.longlong = self.next_iteration()
        for skipped in range(iteration + 1, following - 1):
            self.forget(skipped)
        if following > iteration + 1:
            self.reduce(following - 1)
        self.calling = False
        self.enter(following)
        self.port.return_model(1)

    def may_enter(self, iteration):
        """Return whether this rank has the tokens of all destinations for an iteration."""
        i: cython.int
        if self.tokens:
            for i in range(len(self.awaited)):
                if self.is_destination[i] and self.lacks_token(i, iteration):
                    return False
        return True

    def lacks_token(self, i, iteration):
        return self.tokens and self.entered[i] + self.max_gap < iteration

    def next_iteration(self):
        """Return the iteration to enter: the next one, or a later one if this rank is a straggler.

        It is not past that of any destination, so that none needs an update that is skipped. If it
        is a later one, the rank first averages in the iteration before, whose updates have arrived:
        it does not wait for ranks that may be waiting for its tokens (the paper's does).
        """
        i: cython.int
        following: cython.longlong = self.calls + 1
        farthest: cython.longlong = self.calls + self.max_skip
        if not self.tokens:
            return following
        for i in range(len(self.awaited)):
            if self.is_destination[i]:
                if self.entered[i] <= self.calls + self.skip_trigger:
                    return following
                farthest = min(farthest, self.entered[i])
        if not self.bounded:
            farthest = min(farthest, self.calls + self.slots)
        while farthest > following and not self.has_enough(farthest - 1):
            farthest -= 1
        return max(farthest, following)

    def forget(self, iteration):
        """Drop the updates of an iteration that is skipped; call it for the oldest one first."""
        i: cython.int
        for i in range(len(self.awaited)):
            if not self.bounded and self.weight_of(i, iteration) > 0:
                self.queued[i * self.slots + iteration % self.slots] = False
                self.drop(i)

    def enter(self, iteration):
        """Enter an iteration: give tokens for it, and send its update."""
        self.skip(iteration - self.calls - 1)
        self.calls += 1
        self.sent = False
        if self.tokens:
            self.tell_sources(TOKEN, iteration)
        if self.acknowledges:
            self.tell_sources(ACK, iteration - 1)
        self.send()

    def tell_sources(self, kind, number):
        i: cython.int
        self.port.write(kind, number)
        for i in range(len(self.awaited)):
            if self.is_source[i]:
                self.port.post(self.awaited[i])

    def owes(self):
        return self.calling and self.acknowledges and not self.sent

    # Which ranks are waited for

    def is_waited_for_by(self, rank):
        return self.index_of(rank) >= 0

    def lacks_update(self, i):
        """Return whether a source's update is missing, while this iteration needs more."""
        return (
            self.is_source[i] != 0
            and not self.has_update(i, self.calls)
            and not self.has_enough(self.calls)
        )

    def lacks_answer(self, i):
        """Return whether a destination's token is missing, or its ACK of the last update."""
        if not self.is_destination[i]:
            return False
        if self.acknowledges and not self.sent:
            return self.acknowledged[i] < self.calls - 1
        return self.lacks_token(i, self.calls + 1)

    def waits_for(self, rank):
        i: cython.int = self.index_of(rank)
        return self.calling and i >= 0 and (self.lacks_update(i) or self.lacks_answer(i))

    def look_for_missing(self):
        """Set `missing`; with backups only if too few other updates have arrived or can arrive."""
        i: cython.int
        first: cython.int = -1
        count: cython.int = 1
        if not self.calling:
            return
        for i in range(len(self.awaited)):
            if self.is_out(i) and self.lacks_answer(i):
                self.missing = self.awaited[i]
            if self.is_source[i]:
                if self.has_update(i, self.calls) or not self.is_out(i):
                    count += 1
                elif first < 0:
                    first = i
        if first >= 0 and count < self.needed:
            self.missing = self.awaited[first]

    def needs(self):
        if not self.calling:
            return {}
        updates = [peer for i, peer in enumerate(self.awaited) if self.lacks_update(i)]
        answers = [peer for i, peer in enumerate(self.awaited) if self.lacks_answer(i)]
        answer = "a token" if self.tokens else "use of the last update"
        return {f"update {self.calls}": updates, answer: answers}

    def group(self):
        """Return this rank and those whose updates the model last returned includes."""
        i: cython.int
        ranks = [self.rank]
        for i in range(len(self.awaited)):
            if self.used[i]:
                ranks.append(self.awaited[i])
        return tuple(sorted(ranks))
