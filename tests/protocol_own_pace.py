"""What must hold at the ranks' own pace, as seen from outside all ranks of `protocol_network`."""

from __future__ import annotations

from bisect import bisect_right

from protocol_messages import Invariant, require


class OwnPace:
    """The changes that ranks publish, and which of them have reached which ranks' snapshots.

    The snapshots with which ranks begin a version are those between it and the one before it. So
    their sum is that of what ranks had at first and of the changes that each has published until
    it began.

    Args:
        initial: each rank's first snapshot.
        period: versions from one whose group is all ranks to the next.

    Attributes:
        put_in: of each rank, its first snapshot and all that it has published.
        work: of each rank, the work of what it has published.
        first_in: of each rank, in which version each of its changes is first.
        known: of each rank, how many changes of each rank its snapshot contains.
        begun: by what is averaged, of each rank that has begun it, what it knew then, and by how
            much its snapshot exceeded what it had put in, its count exceeded its work, and that.
        common: the snapshot that all ranks have after a version over all of them.
    """

    def __init__(self, initial, period):
        self.put_in = list(initial)
        self.work = [0] * len(initial)
        self.period = period
        self.first_in = [[] for _ in initial]
        self.known = [[0] * len(initial) for _ in initial]
        self.begun = {}
        self.common = {}

    def publish(self, rank, change, version, work):
        """A rank has added a change, of so much work, to its snapshot before this version."""
        self.put_in[rank] += change
        self.work[rank] += work
        self.first_in[rank].append(version)
        self.known[rank][rank] = len(self.first_in[rank])

    def load(self, rank, snapshot, version):
        """A rank has replaced its snapshot, as all do before this version."""
        self.put_in[rank], self.work[rank] = snapshot, 0
        self.first_in = [[max(first, version) for first in changes] for changes in self.first_in]
        self.publish(rank, 0, version, 0)

    def begin(self, rank, label, snapshot, count):
        """A rank contributes its snapshot and its count to what this label names."""
        begun = self.begun.setdefault(label, {})
        work = self.work[rank]
        begun[rank] = self.known[rank].copy(), snapshot - self.put_in[rank], count - work, work
        return begun

    def begin_version(self, rank, label, snapshot, count):
        begun = self.begin(rank, label, snapshot, count)
        if len(begun) == len(self.put_in):
            missing = sum(excess for _, excess, *_ in begun.values())
            require(missing == 0, Invariant.CONSERVED, label, missing)
            missing = sum(excess for *_, excess, _ in begun.values())
            require(missing == 0, Invariant.COUNTED, label, missing)

    def learn(self, rank, label, parts):
        """A rank's snapshot has become the mean of these parts."""
        begun = self.begun[label]
        known = zip(*(begun[part.rank][0] for part in parts))
        self.known[rank] = [max(counts) for counts in known]

    def end_version(self, rank, label, parts, snapshot, mean, of_all):
        """A rank has executed a version, which is `of_all` ranks or not.

        Args:
            mean: that of all counts that the rank knows then, if it is of all.
        """
        version = label[1]
        self.learn(rank, label, parts)
        for other, changes in enumerate(self.first_in):
            due = bisect_right(changes, version + 1 - self.period)
            known = self.known[rank][other]
            details = f"rank {rank} knows {known} changes of rank {other} after {version}"
            require(known >= due, Invariant.SPREAD, details, changes)
        if of_all:
            first = self.common.setdefault(version, snapshot)
            require(first == snapshot, Invariant.COMMON, version, rank, first, snapshot)
            work = sum(work for *_, work in self.begun[label].values())
            total = mean * len(self.put_in)
            require(total == work, Invariant.COUNTED, version, rank, total, "not", work)
