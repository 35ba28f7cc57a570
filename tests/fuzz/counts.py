"""Which calls of which ranks are in what comes out, by vectors that count them.

Each rank adds 1 to an element of its own in each of its calls. So the averages tell how many of
its calls they contain, and thereby how late each of them was.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import NamedTuple

import numpy as np

from collectives import GroupAllreduce, ParameterServer, PartialAllreduce

from .counters import Counters
from .scenario import NEVER, Scenario

LENGTHS = (0, 100, 2000, 9000, 70_000)  # elements beside those that count
NEAR = 1e-6
EXPIRY = 60.0  # seconds in which a silent rank's part expires; its engine may sleep for a while


class Counted(NamedTuple):
    """What one call gave.

    Attributes:
        call: its number.
        source, timely: of its result.
        counts: of each rank, how many of its calls are in what came out.
    """

    call: int
    source: int
    timely: bool
    counts: np.ndarray


class Counts(Scenario):
    """A collective into which each rank puts its number of calls."""

    def __init__(self, comm, seed, options):
        super().__init__(comm, seed, options)
        self.length = self.size + self.plan.choice(LENGTHS)
        self.place = self.plan.choice((0, self.length - self.size))
        self.given = self._draw_given()

    def __str__(self):
        name = type(self).__name__
        return f"{name} {self.given}, {self.settings()}, {self.length} float64, {self.rounds} calls"

    def _draw_given(self):
        raise NotImplementedError

    def counting(self, vector):
        """Return the elements that count, one of each rank."""
        return vector[self.place : self.place + self.size]

    def counts(self, vector, factor):
        """Return the whole numbers that a vector times a factor has; note where it has others."""
        numbers = self.counting(vector) * factor
        counts = np.rint(numbers).astype(int)
        self.require(np.abs(numbers - counts).max() < NEAR, "not whole:", numbers)
        rest = np.delete(vector, range(self.place, self.place + self.size))
        self.require(not rest.any(), "an element that nobody changed is", rest[rest != 0][:3])
        return counts


class CountedPartial(Counts):
    """`PartialAllreduce`: a contribution that is late for its version is in the next one."""

    def _draw_given(self):
        return {
            "trigger": self.plan.choice(("solo", "solo", "majority")),
            "sync_period": self.plan.choice((2, 5, NEVER, NEVER)),
            "seed": self.plan.randrange(100),
        }

    def play(self):
        vector, total = np.zeros(self.length), np.zeros(self.length)
        noted = []
        with (
            Counters(self.comm) as begun,
            PartialAllreduce(self.comm, vector, **self.settings(), **self.given) as allreduce,
        ):
            for t in range(self.rounds):
                self.pause()
                vector[:] = 0
                self.counting(vector)[self.rank] = 1
                begun.set(t + 1)
                result = allreduce(vector)
                total += vector
                counts = self.counts(total, self.size)
                self.require((counts <= begun.read()).all(), t, "more calls than begun:", counts)
                if result.synchronized:
                    self.require((counts == t + 1).all(), t, "not all calls:", counts)
                noted.append(Counted(t, result.source, result.timely, counts))
            vector[:] = 0
            allreduce.synchronize(vector)
            total += vector
            counts = self.counts(total, self.size)
            self.require((counts == self.rounds).all(), "lost by the end:", counts)
        self.check_all(self.comm.allgather(noted))

    def check_all(self, everyones):
        """Check that each version had the same calls for all, and each call at most a step late."""
        of_version = {}
        for noted in everyones:
            for one in noted:
                counts = of_version.setdefault(one.source, one.counts)
                same = (counts == one.counts).all()
                self.require(same, "version", one.source, "differs:", counts, one.counts)
        versions = sorted(of_version)
        for before, after in itertools.pairwise(versions):
            grown = (of_version[before] <= of_version[after]).all()
            self.require(grown, "version", after, "has fewer calls than", before)
        for rank, noted in enumerate(everyones):
            for one in noted:
                here = of_version[one.source][rank]
                self.require(not one.timely or here == one.call + 1, rank, one, "was not timely")
                late = [v for v in versions if v > one.source and of_version[v][rank] <= one.call]
                self.require(not late, rank, one, "is more than a step late: not in version", late)


class CountedServer(Counts):
    """`ParameterServer`: how often each change counts in each mode."""

    def _draw_given(self):
        mode = self.plan.choice(("bsp", "backup", "backup", "asp", "hete", "hete", "ringmaster"))
        backups = self.plan.randrange(self.size) if mode == "backup" else 0
        given = {"mode": mode, "backups": backups, "server": self.plan.randrange(self.size)}
        if mode == "ringmaster":
            given["max_age"] = self.plan.randint(1, self.size)
        return given

    def play(self):
        mode, backups = self.given["mode"], self.given["backups"]
        x, previous = np.zeros(self.length), np.zeros(self.size)
        with (
            Counters(self.comm) as begun,
            ParameterServer(self.comm, x, **self.settings(ParameterServer), **self.given) as server,
        ):
            for t in range(self.rounds):
                self.pause()
                self.counting(x)[self.rank] += 1
                begun.set(t + 1)
                server(x)
                if mode == "hete":
                    shares = self.counting(x) * self.size
                    own = shares[self.rank] > previous[self.rank]
                    self.require(own, t, "this call has no weight:", shares)
                else:
                    shares = self.counts(x, self.size - backups)
                self.require((shares >= previous - NEAR).all(), t, "fewer than before:", shares)
                self.require((shares <= begun.read() + NEAR).all(), t, "too many:", shares)
                if mode in ("bsp", "asp"):
                    self.require(shares[self.rank] == t + 1, t, "not this call:", shares)
                if mode == "bsp":
                    self.require((shares == t + 1).all(), t, "not all calls:", shares)
                previous = np.array(shares, float)
            server.join(x)
            self.note_equal("end", [x])
            self.check_dropped(server, x)

    def check_dropped(self, server, x):
        """Check that every change is in the model or was dropped."""
        calls = self.size * self.rounds
        dropped = sum(self.comm.allgather(server.dropped))
        if self.given["mode"] in ("backup", "ringmaster"):
            counts = self.counts(x, self.size - self.given["backups"])
            self.require(counts.sum() + dropped == calls, counts, "and dropped", dropped)
        elif self.given["mode"] == "hete":
            shares = self.counting(x) * self.size
            self.require((shares <= self.rounds + NEAR).all(), "too much:", shares)
        else:
            counts = self.counts(x, self.size)
            self.require(counts.sum() == calls and not dropped, counts, "and dropped", dropped)


class CountedGroups(Counts):
    """`GroupAllreduce`: no contribution is older than a period."""

    def _draw_given(self):
        return {
            "group_size": self.plan.randint(1, self.size),
            "sync_period": self.plan.choice((2, 3, 5)),
            "late": self.plan.choice(("conserving", "paper")),
            "groups": self.plan.choice(("changing", "fixed")),
        }

    def play(self):
        period, x = self.given["sync_period"], np.zeros(self.length)
        with (
            Counters(self.comm) as begun,
            GroupAllreduce(self.comm, x, **self.settings(), **self.given) as allreduce,
        ):
            for t in range(self.rounds):
                self.pause()
                self.counting(x)[self.rank] += 1
                begun.set(t + 1)
                result = allreduce(x)
                # A rank can be neither a period ahead of another nor behind it.
                ahead = t // period * period
                self.require((begun.read() >= ahead).all(), t, "the others are at", begun.read())
                if result.synchronized:
                    self.require((begun.read() > t).all(), t, "not all are there:", begun.read())
                    if self.given["late"] == "conserving":
                        sums = self.counting(x) * self.size
                        near = np.abs(sums - (t + 1)).max() < NEAR
                        self.require(near, t, "lost or counted twice:", sums)
            ages = np.flatnonzero(allreduce.statistics().staleness)
            self.require(not len(ages) or ages.max() < period, "contributions of age", ages)
            allreduce.synchronize(x)
            self.note_equal("end", [x])


class CountedLeases(Counts):
    """`GroupAllreduce` at the ranks' own pace: a rank's part is in an average, or it is not.

    Each rank counts its calls in two arrays, and tells now and then how many it has put into the
    second one. In the end one rank is silent, until the others' averages lack its part.
    """

    def __init__(self, comm, seed, options):
        super().__init__(comm, seed, options)
        # Calls after which each rank tells its part, counted from 1.
        self.told = [
            [t for t in range(1, self.rounds) if script.random() < 0.4] + [self.rounds]
            for script in self.scripts
        ]
        self.silent = self.plan.randrange(self.size)

    def _draw_given(self):
        size = self.plan.randint(1, self.size)
        return {
            "pace": "own",
            "group_size": size,
            "sync_period": self.plan.choice((1, 2, 3)),
            "groups": self.plan.choice(("changing", "fixed")),
            "only_all_ranks": self.plan.choice(([], [1])),
            "leased": [1],
        }

    def play(self):
        self.x = [np.zeros(self.length) for _ in range(2)]
        with (
            Counters(self.comm) as self.begun,
            Counters(self.comm) as self.seen,
            GroupAllreduce(self.comm, self.x, **self.settings(), **self.given) as self.collective,
        ):
            for t in range(1, self.rounds + 1):
                self.pause()
                for array in self.x:
                    self.counting(array)[self.rank] += 1
                self.begun.set(t)
                self.call()
                if t in self.told[self.rank]:
                    self.tell(t)
            # Without a progress thread nobody takes part for a rank that makes no calls.
            if self.size > 1 and self.engine != "none":
                self.comm.Barrier()
                self.wait_for_expiry()
            self.collective.synchronize(self.x)
            for array in self.x:
                counts = self.counts(array, self.size)
                self.require((counts == self.rounds).all(), "lost by the end:", counts)
            self.note_equal("end", self.x)

    def tell(self, count):
        """Tell this rank's part, the calls that are counted in the second array."""
        part = [np.zeros(self.length) for _ in range(2)]
        self.counting(part[1])[self.rank] = count
        self.collective.lease(part)

    def call(self):
        """Make a call; return the counts of the second array, None if it was in no average."""
        result = self.collective(self.x)
        of_all = (result.source + 1) % self.given["sync_period"] == 0
        # What a late call returns has its own change, besides.
        if not (result.timely and of_all):
            return None
        counts, parts = (self.counts(array, self.size) for array in self.x)
        begun = self.begun.read()
        self.require((counts <= begun).all(), result, "more calls than begun:", counts)
        for rank, (count, part) in enumerate(zip(counts, parts)):
            expected = self.possible_parts(rank, count)
            self.require(part in expected, result, f"of {rank}:", part, "instead of", expected)
        return parts

    def possible_parts(self, rank, count):
        """Return what a rank may have in the second array, with so many calls in the first."""
        # It may have told what it has put in by this call, or not yet.
        told = [
            max((t for t in self.told[rank] if t <= last), default=0) for last in (count, count - 1)
        ]
        return [count, *(count - each for each in told)]

    def wait_for_expiry(self):
        deadline = time.monotonic() + EXPIRY
        others = np.arange(self.size) != self.silent
        if self.rank == self.silent:
            while not self.seen.read()[others].all() and time.monotonic() < deadline:
                time.sleep(0.001)
            return
        parts = None
        while (parts is None or parts[self.silent]) and not self.problems:
            if time.monotonic() > deadline:
                self.problems.append(f"the part of {self.silent} has not expired: {parts}")
                break
            time.sleep(0.0005)
            found = self.call()
            parts = parts if found is None else found
        self.seen.set(1)


KINDS = (CountedPartial, CountedServer, CountedGroups, CountedLeases)


def make(comm, seed, options):
    """Make a scenario of one of these collectives."""
    return random.Random(f"{seed} counts").choice(KINDS)(comm, seed, options)
