"""Calls of all kinds that a signal handler's exception ends at a random moment.

What must hold: the rank goes on, nobody hangs, and at the next average over all ranks that nothing
interrupts all are equal. With `GroupAllreduce`, under the conserving rule, nothing has been lost
and nothing counts twice; where some vectors are not finite, nothing is returned but what others, or
the rank, have put in. With the collectives whose ranks send each other vectors what changes in
a call that is interrupted, or from there to the next one, may be left out, and nothing else; and
where all close after as many calls, nobody is told that another has closed.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time

import numpy as np

from collectives import (
    CollectiveError,
    GroupAllreduce,
    NeighborAverage,
    PairwiseAverage,
    PushSum,
    QueuedNeighborAverage,
)

from .periods import Periods
from .scenario import NEVER, Scenario
from .vectors import Shape, copied

SOON = 0.0001  # seconds after which a signal that came too early comes again
LATE = 0.13  # seconds that the others wait for one rank: the engine looks for signals each 0.1 s
SEGMENTS = 3  # each ends by an average over all ranks that nothing interrupts
# What all vectors are near to where some are not finite, and how near: no mean of 8 with a 0 is so.
FAR, NEAR = 2.0**20, 2.0**16


class Interrupted(Exception):
    """What the signal's handler raises."""


class Interrupter:
    """Interrupts what is done by `attempt` by a signal, inside `with`."""

    def __init__(self):
        self.armed, self.may_now = False, None

    def __enter__(self):
        self.previous = signal.signal(signal.SIGALRM, self.handle)
        return self

    def __exit__(self, *exception):
        signal.signal(signal.SIGALRM, self.previous)

    def attempt(self, operation, seconds, may_now=lambda: True):
        """Carry out an operation; return what it returns, and whether it was interrupted.

        Args:
            operation: function without arguments.
            seconds: when the signal comes; 0: never.
            may_now: function that says whether it may interrupt now; else it tries again soon.
        """
        self.may_now = may_now
        try:
            try:
                self.armed = True
                signal.setitimer(signal.ITIMER_REAL, seconds)
                return operation(), False
            finally:
                self.armed = False
        except Interrupted:
            return None, True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def handle(self, *_):
        if self.armed and not self.may_now():
            signal.setitimer(signal.ITIMER_REAL, SOON)
        elif self.armed:
            self.armed = False
            raise Interrupted


class InterruptedScenario(Scenario):
    """A scenario in which a rank interrupts itself."""

    may_use_threads = False  # signals come to the main one

    def play(self):
        with Interrupter() as self.interrupter:
            self.play_interrupted()

    def attempt(self, operation, may_now=lambda: True, waits=False):
        """Carry out an operation, and perhaps interrupt it: see `Interrupter.attempt`.

        Args:
            waits: whether to interrupt it while it waits for a rank that is `LATE`.
        """
        moment = self.chance.choice((0, 0.00001, 0.0003, 0.003)) * self.chance.random()
        if waits and self.chance.random() < 0.7:
            moment = LATE / 10
        return self.interrupter.attempt(operation, moment, may_now)


class InterruptedGroups(InterruptedScenario):
    """One `GroupAllreduce` of float64, in any operation of which ranks are interrupted."""

    def __init__(self, comm, seed, options):
        super().__init__(comm, seed, options)
        plan, size = self.plan, self.size
        self.shape = Shape(plan, size, exact=True)
        powers_of_two = [s for s in range(1, size + 1) if s & (s - 1) == 0]
        self.given = {
            "group_size": plan.choice(powers_of_two),
            "sync_period": plan.choice((3, 5, NEVER, NEVER)),
            "wait": plan.choice(("nobody", "nobody", "group")),
            "late": plan.choice(("conserving", "conserving", "conserving", "paper")),
        }
        conserves = self.given["late"] == "conserving"
        poison = random.Random(f"{seed} poison")
        self.poison = poison.choice((0, 0, 0.4))
        if self.poison:
            self.given["wait"] = poison.choice(("nobody", "group", "group"))
        self.poison_chance = random.Random(f"{seed} {self.rank} poison")
        chance = random.Random(f"{seed} periods")
        self.given |= Periods(chance, len(self.shape.lengths), conserves).settings
        self.rounds = plan.choice((3, 4))
        # Where there are other synchronizations, who has joined counts no more after them.
        self.joins = self.given["sync_period"] == NEVER and plan.random() < 0.5
        kinds = [None] * 5 + ["average", "synchronize", "load"]
        drawn = [[plan.choice(kinds) for _ in range(self.rounds)] for _ in range(SEGMENTS)]
        self.operations = [*drawn[:-1], [None] * self.rounds] if self.joins else drawn
        self.calls = [[self.rounds] * size for _ in range(SEGMENTS)]
        if self.joins:
            self.calls[-1] = [plan.randint(0, self.rounds) for _ in range(size)]
        # In each segment the others wait for one rank, in what all do together or in a call.
        self.late_rank = [plan.randrange(size) for _ in range(SEGMENTS)]
        self.late_round = [plan.randrange(self.rounds) for _ in range(SEGMENTS)]
        if self.given["wait"] == "nobody":
            for operations, late in zip(drawn, self.late_round):
                operations[late] = plan.choice(kinds[5:])
        self.steps = [
            [(script.random() < 0.2, self.shape.draw_change(script)) for _ in range(16)]
            for script in self.scripts
        ]
        # Every average appends so many binary digits, up to the next synchronization.
        digits = (self.rounds + 1) * np.log2(self.given["group_size"]) + 2 * np.log2(size) + 12
        exact = size in powers_of_two and digits <= 53
        self.tolerance = 0.0 if exact else 2.0**-53 * 1000 * SEGMENTS * self.rounds

    def __str__(self):
        return (
            f"interrupted {self.given}, {self.settings()}, {self.shape!r}, joins {self.joins}, "
            f"{self.rounds} rounds, operations {self.operations}, calls {self.calls}, "
            f"poison {self.poison}, "
            f"late {list(zip(self.late_rank, self.late_round))}"
        )

    def vectors(self, factor):
        """Return all ranks' summaries, of a multiple of their number each."""
        least = FAR if self.poison else 0.0
        return np.array([np.full(self.shape.width, least + factor * r) for r in range(self.size)])

    def step(self, rank, segment, t):
        return self.steps[rank][segment * self.rounds + t]

    def play_interrupted(self):
        values, self.version = self.vectors(1.0), 0
        self.shape.prepare(self.comm, self.way)
        self.x = self.shape.new(values[self.rank])
        with GroupAllreduce(
            self.comm, self.shape.given(self.x), **self.settings(), **self.given
        ) as self.collective:
            for segment in range(SEGMENTS):
                self.play_segment(segment)
                self.put_in(values, segment)
                self.collective.synchronize(self.shape.given(self.x))
                self.check(values.mean(0), segment)

    def play_segment(self, segment):
        joins = self.joins and segment == SEGMENTS - 1
        first = self.version
        for t in range(self.calls[segment][self.rank]):
            waits = t == self.late_round[segment] and not joins
            self.come_late(waits, segment)
            operation = self.operations[segment][t]
            self.together(operation, waits)
            self.pause()
            self.change_and_call(*self.step(self.rank, segment, t), waits and not operation)
        if joins:
            self.come_late(True, segment)
            x = self.shape.given(self.x)
            self.attempt_within("join()", lambda: self.collective.join(x), True)
            self.version = first + max(self.calls[segment])

    def come_late(self, waits, segment):
        if waits and self.rank == self.late_rank[segment]:
            time.sleep(LATE)

    def put_in(self, values, segment):
        """Add what all ranks put in in a segment, from a load() on if there is one."""
        for t, operation in enumerate(self.operations[segment]):
            if operation == "load":
                values[:] = self.vectors(3.0)
            for rank, calls in enumerate(self.calls[segment]):
                values[rank] += self.step(rank, segment, t)[1] if t < calls else 0

    def check(self, expected, segment):
        """Check what all ranks have after what nothing interrupts."""
        self.require(self.collective.version == self.version, segment, self.collective.version)
        self.note_equal(segment, self.x)
        if self.poison:
            # A call that has given nothing may be interrupted while it takes the mean.
            self.check_near(segment)
            return
        self.require(self.shape.is_even(self.x), segment, "elements that changed alike differ")
        if self.given["late"] == "conserving":
            self.require_near(self.shape.summary(self.x), expected, self.tolerance, segment)

    def check_near(self, *when):
        """Check that all elements are near to what ranks have put in."""
        near = all((np.abs(array - FAR) <= NEAR).all() for array in self.x)
        self.require(near, *when, "some elements are what nobody has put in")

    def attempt_within(self, name, operation, waits):
        """Carry out what all ranks do together; interrupt it only once it has been entered.

        One cannot see afterwards whether it had been.
        """
        native = self.collective.native
        return self.attempt(operation, lambda: name in native._waits_in()[0], waits)

    def together(self, operation, waits):
        """Do what all ranks do together before a round."""
        if operation == "load":
            # Whether an interrupted one has taken the vector one cannot see: it is repeated.
            x, version = self.shape.new(self.vectors(3.0)[self.rank]), self.version
            given = self.shape.given(x)
            self.attempt_within("load()", lambda: self.collective.load(given, version), waits)
            self.x = x
            self.collective.load(given, version)
        elif operation == "average":
            given = self.shape.given(copied(self.x))
            self.attempt_within("average()", lambda: self.collective.average(given), waits)
        elif operation == "synchronize":
            given = self.shape.given(self.x)
            self.attempt_within("synchronize()", lambda: self.collective.synchronize(given), waits)

    def change_and_call(self, publishes, change, waits):
        """Make one call, in one of the ways there are, and again if it was not made."""
        self.shape.add(self.x, change)
        if self.poison_chance.random() < self.poison:
            self.shape.poison(self.x, self.shape.draw_poison(self.poison_chance))
        x = self.shape.given(self.x)
        if publishes:
            self.attempt(lambda: self.collective.publish(x))
        synchronous = (self.version + 1) % self.given["sync_period"] == 0
        if synchronous:
            name = "a periodic synchronization"
            result, _ = self.attempt_within(name, lambda: self.collective(x), waits)
        elif self.chance.random() < 0.6:
            result, _ = self.attempt(lambda: self.collective(x), waits=waits)
        else:
            result = self.start_and_wait(x, waits)
        # A synchronous one before it that was interrupted may still be under way.
        if result is None and not synchronous and self.collective.version <= self.version:
            result = self.collective(x)
        self.require(result is None or result.version == self.version, self.version, result)
        if self.poison:
            self.replace_poison()
        self.version += 1

    def replace_poison(self):
        """Replace what is not finite in what a call has left, and check the rest."""
        for array in self.x:
            array[~np.isfinite(array)] = FAR
        self.check_near(self.version)

    def start_and_wait(self, x, waits):
        """Start a call and complete it; return its result, None where an interrupt took it."""
        handle, interrupted = self.attempt(lambda: self.collective.start(x))
        if interrupted:
            # If it was started, what follows completes it, but its handle is lost.
            self.collective.publish(x)
            return None
        self.pause()
        result, interrupted = self.attempt(handle.wait, waits=waits)
        if interrupted:
            with contextlib.suppress(CollectiveError):  # "the call was interrupted"
                result = handle.wait()
        return result


class InterruptedPeers(InterruptedScenario):
    """One of the collectives whose ranks send each other vectors; in the end all join, or close."""

    KINDS = {
        "neighbors": NeighborAverage,
        "push-sum": PushSum,
        "pairs": PairwiseAverage,
        "queues": QueuedNeighborAverage,
    }

    def __init__(self, comm, seed, options):
        super().__init__(comm, seed, options)
        self.kind = self.plan.choice(tuple(self.KINDS))
        self.shape = Shape(self.plan, self.size, exact=True)
        chance = random.Random(f"{seed} ending")
        self.closes = chance.random() < 0.4
        self.given = {
            "neighbors": {"clock": chance.choice(("neighbors", "global"))},
            "queues": {"mode": chance.choice(("standard", "notify-ack"))},
        }.get(self.kind, {})
        # Only more, so that what may have been left out makes the sum less.
        self.steps = [
            [np.abs(self.shape.draw_change(script)) for _ in range(self.rounds + 1)]
            for script in self.scripts
        ]

    def __str__(self):
        return (
            f"interrupted {self.kind} {self.given}, {self.settings()}, {self.shape!r}, "
            f"{self.rounds} rounds, closes {self.closes}"
        )

    def play_interrupted(self):
        self.shape.prepare(self.comm, self.way)
        self.x = self.shape.new(np.zeros(self.shape.width))
        uncertain = np.zeros(self.shape.width)
        make = self.KINDS[self.kind]
        settings = {**self.settings(make), **self.given}
        with make(self.comm, self.shape.given(self.x), **settings) as collective:
            x, leaves_out = self.shape.given(self.x), False
            for change in self.steps[self.rank]:
                self.shape.add(self.x, change)
                self.pause()
                begun = self.begun(collective)
                _, interrupted = self.attempt(lambda: collective(x))
                if self.closes and self.begun(collective) == begun:  # the signal came before it
                    collective(x)
                uncertain += change * (interrupted or leaves_out)
                leaves_out = interrupted
            if self.closes:
                return
            self.shape.add(self.x, np.ones(self.shape.width))
            uncertain += leaves_out
            collective.join(x)
            self.require(self.shape.is_even(self.x), "elements that changed alike differ")
            self.note_equal("end", self.x)
            self.counted = uncertain

    def begun(self, collective):
        """Return how many calls this rank has begun."""
        exchanging = collective.native.exchanging
        return exchanging.calls + exchanging.calling

    def what_is_missing(self, counted):
        """Compare the sum with what was put in for certain, and with all, where all join."""
        if self.closes:
            return None
        most = np.sum(self.steps, axis=(0, 1)) + self.size
        got = self.shape.summary(self.x) * self.size
        wrong = (got > most + 1e-9) | (got < most - counted - 1e-9)
        if wrong.any():
            return f"the sum is {got}, not from {most - counted} to {most}"
        return None


def make(comm, seed, options):
    """Make a scenario with one kind of collective or the other."""
    kind = InterruptedPeers if random.Random(seed).random() < 0.2 else InterruptedGroups
    return kind(comm, seed, options)
