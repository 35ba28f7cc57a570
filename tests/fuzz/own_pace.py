"""`GroupAllreduce` whose ranks are at their own pace: each makes any number of calls.

What must hold: at the next average over all ranks all are equal, and have the mean of everything
that ranks have put in, also in calls that were late, interrupted, or followed by nothing; and all
know how many calls these were. Whom a result names is the group of that version, in which each
counts alike. An average that ranks keep is the same on all. All execute as many versions. Parts of
arrays that ranks tell are in what all have together whenever all publish, whichever have expired.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

from collectives import GroupAllreduce
from collectives.topology import group_of

from .interrupts import InterruptedGroups, InterruptedScenario
from .periods import Periods, draw_leased
from .scenario import NEVER, Scenario
from .vectors import ROUNDING, Poison, Shape, copied, is_finite


class Step(NamedTuple):
    """What a rank does besides one call: what changes before it, and makes that not finite."""

    change: np.ndarray
    publishes: bool
    poison: Poison | None


class OwnPace(Scenario):
    """One such collective; what all do together ends each segment."""

    poisons = (0, 0, 0.15)
    # Whether no vector is partly averaged, between what all ranks do together.
    whole = True

    def __init__(self, comm, seed, options):
        super().__init__(comm, seed, options)
        plan, size = self.plan, self.size
        self.shape = Shape(plan, size, exact=plan.random() < 0.7)
        self.given = {
            "pace": "own",
            "group_size": plan.randint(1, size),
            "sync_period": plan.choice((1, 2, 3, 5, NEVER)),
            "groups": plan.choice(("changing", "changing", "fixed")),
            "wire_dtype": plan.choice((None, None, None, "float16", "bfloat16")),
        }
        chance, count = random.Random(f"{seed} arrays"), len(self.shape.lengths)
        self.periods = Periods(chance, count)
        self.given |= {**self.periods.settings, "leased": draw_leased(chance, count)}
        self.lease_chance = random.Random(f"{seed} {self.rank} leases")
        ends = ("join", "synchronize", "average", "load")
        self.ends = [plan.choice(ends) for _ in range(plan.choice((1, 2, 3)))]
        self.ends.append(plan.choice(("join", "synchronize", "leave")))
        self.poison = plan.choice(self.poisons)
        self.keeps = random.Random(f"{seed} {self.rank} keeps").random() < 0.3
        self.steps = [[self._draw_steps(script) for _ in self.ends] for script in self.scripts]
        digits = np.maximum(self.shape.rounding, ROUNDING.get(self.given["wire_dtype"], 0))
        changes = sum(len(steps) for own in self.steps for steps in own)
        self.tolerance = 8 * (changes + 4) ** 2 * digits

    def _draw_steps(self, script):
        def poison():
            return self.shape.draw_poison(script) if script.random() < self.poison else None

        count = script.randint(0, self.rounds)
        return [
            Step(self.shape.draw_change(script), script.random() < 0.2, poison())
            for _ in range(count + 1)
        ]

    def __str__(self):
        counts = [[len(steps) - 1 for steps in own] for own in self.steps]
        return (
            f"{type(self).__name__} {self.given}, {self.settings()}, {self.shape!r}, "
            f"poison {self.poison}, ends {self.ends}, calls {counts}"
        )

    def play(self):
        self.play_interrupted()

    def attempt(self, operation, **_):
        """Carry out an operation; return what it returns, and whether it was interrupted."""
        return operation(), False

    def numbers(self, factor):
        """Return all ranks' summaries, of a multiple of their number each."""
        return np.array([np.full(self.shape.width, factor * r) for r in range(self.size)])

    def play_interrupted(self):
        values, self.made = self.numbers(1.0), 0
        # Calls that count since the last load: complete ones at least, all at the most.
        self.finished = np.zeros(2)
        self.shape.prepare(self.comm, self.way)
        self.x = self.shape.new(values[self.rank])
        with GroupAllreduce(
            *(self.comm, self.shape.given(self.x)),
            keep_average=self.keeps,
            **self.settings(),
            **self.given,
        ) as self.collective:
            for segment, end in enumerate(self.ends):
                self.segment = segment
                for rank, own in enumerate(self.steps):
                    values[rank] += sum(
                        step.change for step in own[segment][:-1] if not step.poison
                    )
                for step in self.steps[self.rank][segment][:-1]:
                    self.pause()
                    self.change_and_call(step)
                    if self.given["leased"] and self.lease_chance.random() < 0.5:
                        self.lease()
                    if self.keeps and self.chance.random() < 0.3:
                        self.look_at_the_last_average()
                self.pause()
                values = self.end(end, segment, values)
        executed = np.array([self.collective.executed])
        self.note_equal("executed", [executed])
        calls = self.collective.statistics().calls
        self.require(calls >= self.made, calls, "calls instead of", self.made)

    def change_and_call(self, step):
        before = copied(self.x) if step.publishes else None
        given = self.shape.summary(self.x)
        self.shape.add(self.x, step.change)
        given = given if step.poison else self.shape.summary(self.x)
        if step.publishes:
            x = copied(self.x)
            self.shape.poison(x, step.poison)
            self.attempt(lambda: self.collective.publish(self.shape.given(x)))
            self.x = before if step.poison else x
        else:
            self.shape.poison(self.x, step.poison)
        finite, x = is_finite(self.x), self.shape.given(self.x)
        if self.chance.random() < 0.6:
            result, _ = self.attempt(lambda: self.collective(x))
        else:
            result = self.start_and_wait(x)
        even = not self.whole or self.shape.is_even(self.x)
        self.require(even, "elements that changed alike differ")
        self.finished += (finite and result is not None), finite
        if result is not None:
            self.made += 1
            self.check_call(result, finite)
            self.check_left_out(result, given)

    def lease(self):
        """Tell some vector as this rank's part."""
        part = copied(self.x)
        if self.lease_chance.random() < 0.5:
            part = self.shape.new(self.shape.draw_change(self.lease_chance))
        self.attempt(lambda: self.collective.lease(self.shape.given(part)))

    def look_at_the_last_average(self):
        shown = copied(self.x)
        kept, _ = self.attempt(lambda: self.collective.last_average(self.shape.given(shown)))
        if kept is not None:
            even = not self.whole or self.shape.is_even(shown)
            self.require(even, kept, "elements that changed alike differ")
            version, total = kept
            # What ends a segment averages over all ranks, too, and is of no version of its own.
            self.note_equal((self.segment, "version", version), [*shown, np.array([total])])

    def check_count(self, when):
        """Check that all know how many calls have put in what they have averaged."""
        total = self.collective.total_calls
        low, high = self.comm.allreduce(self.finished)
        self.require(low <= total <= high, when, total, "calls, not from", low, "to", high)
        self.note_equal((when, "calls"), [np.array([total])])

    def start_and_wait(self, x):
        handle = self.collective.start(x)
        self.pause()
        return handle.wait()

    def check_call(self, result, finite):
        group = tuple(range(self.size))
        if (result.source + 1) % self.given["sync_period"]:
            number = 0 if self.given["groups"] == "fixed" else result.source
            group = group_of(self.rank, self.size, self.given["group_size"], number)
        self.require(result.group == group, result, "not of the group", group)
        self.require(result.weight == len(group), result, "each member counts alike")
        self.require(result.version == result.source, result)
        self.require(finite or not result.timely, result, "is not finite")
        self.require(is_finite(self.x), "is not finite")

    def check_left_out(self, result, given):
        """Check what only averages over all ranks average, where there are none."""
        if self.given["sync_period"] < NEVER:
            return
        these = self.shape.numbers_of(self.given["only_all_ranks"])
        self.require_near(
            self.shape.summary(self.x)[these],
            given[these],
            self.tolerance[these],
            *(result, "what is left out has changed"),
        )

    def end(self, end, segment, values):
        """Do what ends a segment; return what all ranks have put in from then on."""
        last = [own[segment][-1].change for own in self.steps]
        mean = values.mean(0) + np.mean(last, 0)
        if end == "leave":
            return values
        if end == "load":
            self.x = self.shape.new(self.numbers(3.0)[self.rank])
            number = 7 * segment
            self.collective.load(self.shape.given(self.x), number)
            self.require(self.collective.version == number, "load", self.collective.version)
            self.finished[:] = 0
            return self.numbers(3.0)
        if end == "average":
            # It publishes nothing, so that what changes before it is forgotten.
            shown = copied(self.x)
            self.shape.add(shown, last[self.rank])
            self.collective.average(self.shape.given(shown))
            self.check(shown, segment, mean)
            self.check_count(segment)
            return values
        self.shape.add(self.x, last[self.rank])
        getattr(self.collective, end)(self.shape.given(self.x))
        self.check(self.x, segment, mean)
        self.check_count(segment)
        return np.tile(mean, (self.size, 1))

    def check(self, x, segment, expected):
        """Check what all ranks have alike."""
        self.note_equal(segment, x)
        self.require(self.shape.is_even(x), segment, "elements that changed alike differ")
        self.require_near(self.shape.summary(x), expected, self.tolerance, segment)


class InterruptedOwnPace(InterruptedScenario, OwnPace):
    """The same, where an exception may end any call, also in its average, and any publication."""

    poisons = (0,)
    whole = False

    def start_and_wait(self, x):
        return InterruptedGroups.start_and_wait(self, x, False)


def make(comm, seed, options):
    """Make a scenario with interrupts or without."""
    interrupted = random.Random(f"{seed} own pace").random() < 0.4
    return (InterruptedOwnPace if interrupted else OwnPace)(comm, seed, options)
