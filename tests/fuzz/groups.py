"""One to three collectives `GroupAllreduce` at once: everything that ranks may do with them.

What must hold: after every average over all ranks they are equal, bit for bit. `average` gives
what `synchronize` then does. Under rules that lose nothing the average is that of everything that
ranks have put in; in float64, with whole numbers and groups of a power of two, exactly. All
elements that have changed alike are alike, so nothing is torn. Whom a result names is the group of
that version. Of what its versions leave out a call returns what it was given. With `wait="group"`
the same happens again, though perhaps by slots, or no longer by slots.
"""

from __future__ import annotations

import contextlib
import math
import random
from typing import NamedTuple

import numpy as np

from collectives import GroupAllreduce
from collectives.exchange.shared import slots
from collectives.topology import group_of

from .periods import Periods
from .scenario import LONGEST, NEVER, WEIGHTLESS_COUNT_ALIKE, Scenario
from .vectors import ROUNDING, Shape, copied, digest, is_finite

WEIGHTS = (0, 1, 0.5, 3, 7.25, 1e-30, 1e-300, 1e50, 1e100)
# Powers of two, whose sums and shares are exact.
EQUAL_WEIGHTS = (0.5, 2.0, 2.0**-900, 2.0**300)
MANTISSA = 53
PUBLISH, CALL, TOGETHER = "publish", "call", "together"


def is_power_of_two(number):
    return number & (number - 1) == 0


class Step(NamedTuple):
    """What one rank does in one round.

    Attributes:
        publishes: whether it publishes before the call.
        published, change: what changes before that, and before the call.
        weight: of both.
        together: what changes before what all ranks do together before the round.
        poisons: by each of these, the `Poison` in the vector, or None.
    """

    publishes: bool
    published: np.ndarray
    change: np.ndarray
    weight: float
    together: np.ndarray
    poisons: dict

    def put_in(self, what):
        """Return what this changes of what is averaged: nothing where the vector is not finite."""
        changes = {PUBLISH: self.published, CALL: self.change, TOGETHER: self.together}
        counts = not self.poisons[what] and (what != PUBLISH or self.publishes)
        return counts * changes[what]


class Ledger:
    """What all ranks have together, under a rule that loses nothing.

    Attributes:
        values: of each rank, what it has put in since all had the same, and that, as a summary.
        counted: of each rank, whether it counts: one that has joined does not, from the next
            average on.
        expected: what the averages over all ranks are, by when.
        divides_evenly: whether these divide by powers of two alone.
    """

    def __init__(self, starts):
        self.values, self.counted = starts.copy(), np.full(len(starts), True)
        self.expected, self.divides_evenly = {}, True

    def note(self, when, counted):
        """Note the mean of all that these ranks have put in."""
        self.expected[when] = self.values[counted].mean(0)
        self.divides_evenly &= is_power_of_two(int(counted.sum()))

    def average(self, when, counted, calling):
        """Let all ranks have that mean, and those that go on calling count from now on."""
        self.note(when, counted)
        self.values[:], self.counted = self.expected[when], calling


class Average:
    """One collective of a scenario, its vector here, and what must come out of it.

    Args:
        scenario: the scenario.
        name: tells it from others.
        alone: whether it is the only one; ranks may join, or leave early, only then.
    """

    def __init__(self, scenario, name, alone):
        plan, size = scenario.plan, scenario.size
        self.scenario, self.name, self.plan, self.size = scenario, name, plan, size
        self.rank, self.rounds = scenario.rank, scenario.rounds
        self.shape = Shape(plan, size, exact=plan.random() < 0.5)
        self.settings = {
            "group_size": plan.randint(1, size),
            "sync_period": plan.choice((1, 2, 3, 5, 7, NEVER)),
            "groups": plan.choice(("changing", "changing", "fixed")),
            "wait": plan.choice(("nobody", "nobody", "group")),
            "late": plan.choice(("conserving", "conserving", "paper")),
            "wire_dtype": plan.choice((None, None, None, "float16", "bfloat16")),
        }
        self.weights = plan.choice(("one", "one", "equal", "random"))
        self.weight = plan.choice(EQUAL_WEIGHTS) if self.weights == "equal" else 1.0
        self.poison = plan.choice((0, 0, 0.15))
        self.sound = plan.randrange(size)  # the rank all of whose vectors are finite
        chance = random.Random(f"{scenario.seed} {name} periods")
        self.periods = Periods(chance, len(self.shape.lengths), self._may_leave_out())
        self.settings |= self.periods.settings
        self.end = plan.choice(("together", "join", "leave")) if alone else "together"
        self.epochs = 2 if self.end == "join" else 1
        starts = plan.choice((0, 1))
        self.starts = np.array([np.full(self.shape.width, float(starts * r)) for r in range(size)])
        self.operations = [self._draw_operation() for _ in range(self.epochs * self.rounds)]
        self.steps = [self._draw_steps(rank) for rank in range(size)]
        self.calls = [self._draw_calls() for _ in range(self.epochs)]
        self.ledger = self._work_out()
        self.expected = self.ledger.expected if self.conserves else {}
        self.tolerance = self._tolerance()

    def __str__(self):
        told = {
            **self.settings,
            "weights": f"{self.weights} {self.weight:g}",
            "poison": self.poison,
            "end": self.end,
            "operations": self.operations,
            "calls": self.calls,
            "conserves": self.conserves,
            "starts": self.starts[:, 0].tolist(),
        }
        return f"{self.name}: {self.shape!r}; {told}"

    # The plan

    def _may_leave_out(self):
        """Return whether versions may average some arrays only."""
        return self.settings["late"] == "conserving"

    def _draw_operation(self):
        kinds = [None] * 7 + ["average", "synchronize", "synchronize", "load"]
        # Who has joined, or left, takes no part in a load().
        while (kind := self.plan.choice(kinds)) == "load" and self.end != "together":
            pass
        if kind is None or self.end == "leave":
            return None
        return kind, self.plan.choice((0, 3, 50, 10**12)) if kind == "load" else None

    def _draw_steps(self, rank):
        chance = self.scenario.scripts[rank]

        def poison():
            poisoned = chance.random() < self.poison and rank != self.sound
            return self.shape.draw_poison(chance) if poisoned else None

        return [
            Step(
                chance.random() < 0.2,
                self.shape.draw_change(chance),
                self.shape.draw_change(chance),
                chance.choice(WEIGHTS) if self.weights == "random" else self.weight,
                self.shape.draw_change(chance),
                {what: poison() for what in (PUBLISH, CALL, TOGETHER)},
            )
            for _ in range(self.epochs * self.rounds + 1)
        ]

    def _draw_calls(self):
        """Return how many calls each rank makes in an epoch."""
        if self.end == "together":
            return [self.rounds] * self.size
        if self.end == "leave":
            self.settings["sync_period"] = NEVER  # which waits for all
        return [self.plan.randint(0, self.rounds) for _ in range(self.size)]

    @property
    def conserves(self):
        """Whether nothing is lost, and each rank's changes count the same."""
        if self.weights == "random":
            return False
        if self.settings["late"] == "conserving":
            return not self.poison or self.settings["wait"] == "nobody"
        return self.settings["wait"] == "group" and not self.poison and self.end == "together"

    def _is_synchronous(self, version):
        return (version + 1) % self.settings["sync_period"] == 0

    def _work_out(self):
        """Return a ledger in which everything has been put in and averaged."""
        ledger, version = Ledger(self.starts), 0
        for epoch, calls in enumerate(np.array(self.calls)):
            for t in range(max(calls)):
                calling = calls > t
                self._put_in(ledger, calls == t, TOGETHER, epoch, t)  # they join
                kind, detail = self.operations[self._index(epoch, t)] or (None, None)
                if kind == "load":
                    ledger.values, version = self._loaded(), detail
                elif kind == "average":
                    ledger.note((epoch, t, kind), ledger.counted)
                elif kind == "synchronize":
                    self._put_in(ledger, calling, TOGETHER, epoch, t)
                    ledger.average((epoch, t, kind), ledger.counted, calling)
                self._put_in(ledger, calling, PUBLISH, epoch, t)
                self._put_in(ledger, calling, CALL, epoch, t)
                if self._is_synchronous(version):
                    ledger.average((epoch, t, "call"), ledger.counted, calling)
                version += 1
            last = calls == max(calls)
            self._put_in(ledger, last, TOGETHER, epoch, max(calls))
            ledger.average((epoch, "end"), ledger.counted | last, np.full(self.size, True))
        return ledger

    def _put_in(self, ledger, ranks, what, epoch, t):
        for rank in np.flatnonzero(ranks):
            ledger.values[rank] += self.steps[rank][self._index(epoch, t)].put_in(what)

    def _loaded(self):
        """Return the summaries of what ranks load."""
        return 2.0 + np.array([np.full(self.shape.width, 3.0 * r) for r in range(self.size)])

    def _index(self, epoch, t):
        return epoch * self.rounds + t

    @property
    def bound(self):
        """Return what no number of any vector can exceed: averaging makes none larger."""
        given = [
            np.abs([step.published, step.change, step.together]).max(1).sum()
            for steps in self.steps
            for step in steps
        ]
        return sum(given) + 2 + 3 * self.size

    def _tolerance(self):
        """Return how far numbers may be from what they would be without rounding."""
        size, group_size = self.size, self.settings["group_size"]
        # Every average appends so many binary digits, up to the next synchronization.
        digits = (self.rounds + 1) * math.log2(group_size) + 2 * math.log2(size)
        wire = ROUNDING.get(self.settings["wire_dtype"], 0.0)
        evenly = self.ledger.divides_evenly and is_power_of_two(group_size)
        exact = (self.shape.rounding == 2.0**-MANTISSA).all() and not wire and evenly
        if exact and digits + math.log2(self.bound) <= MANTISSA:
            return np.zeros(self.shape.width)
        steps = 4 * (self.rounds + 2) * self.epochs
        return steps * np.maximum(self.shape.rounding, wire) * self.bound

    # What this rank does

    def open(self, stack):
        """Make the collective, to be closed by an `ExitStack`."""
        scenario = self.scenario
        self.shape.prepare(self.scenario.comm, self.scenario.way)
        self.x = self.shape.new(self.starts[self.rank])
        self.handle = self.result = None
        self.version = self.made = self.timely = 0
        self.history = []
        self.collective = stack.enter_context(
            GroupAllreduce(
                scenario.comm,
                self.shape.given(self.x),
                **scenario.settings(),
                **self.settings,
            )
        )
        if self.weights == "equal":
            # At first it is 1.
            self.collective.publish(self.shape.given(self.x), weight=self.weight)
            scenario.comm.Barrier()

    def require(self, condition, *what):
        self.scenario.require(condition, self.name, *what)

    def together(self, epoch, t):
        """Do what all ranks do together before this round."""
        kind, detail = self.operations[self._index(epoch, t)] or (None, None)
        when = epoch, t, kind
        if kind == "load":
            self.x = self.shape.new(self._loaded()[self.rank])
            self.collective.load(self.shape.given(self.x), detail)
            self.version = detail
            self.require(self.collective.version == detail, when, self.collective.version)
        elif kind == "average":
            shown, before = copied(self.x), digest(self.x)
            self.collective.average(self.shape.given(shown))
            self.require(digest(self.x) == before, when, "has changed the vector")
            self.check_mean(shown, *when)
        elif kind == "synchronize":
            self.synchronize(epoch, t, *when)

    def synchronize(self, epoch, t, *when):
        """Average what this rank gives now over all, once to look at it and once for good."""
        self._change_together(epoch, t)
        shown = copied(self.x)
        self.collective.average(self.shape.given(shown))
        self.scenario.pause()
        self.collective.synchronize(self.shape.given(self.x))
        self.require(digest(shown) == digest(self.x), when, "is not what average() said")
        self.check_mean(self.x, *when)

    def _change_together(self, epoch, t):
        step = self.steps[self.rank][self._index(epoch, t)]
        self.shape.add(self.x, step.together)
        self.shape.poison(self.x, step.poisons[TOGETHER])

    def begin(self, epoch, t):
        """Begin this round's call; finish it as well, where nobody can be kept waiting by that."""
        step = self.steps[self.rank][self._index(epoch, t)]
        given = {} if self.weights == "one" else {"weight": step.weight}
        if step.publishes:
            self.publish(step, given)
        self.before = copied(self.x)
        self.shape.add(self.x, step.change)
        self.shape.poison(self.x, step.poisons[CALL])
        self.finite, self.given = is_finite(self.x), copied(self.x)
        waits = self.settings["wait"] == "group" or self._is_synchronous(self.version)
        if self.scenario.chance.random() < 0.5 and not (waits and self.scenario.several):
            self.result = self.collective(self.shape.given(self.x), **given)
        else:
            self.handle = self.collective.start(self.shape.given(self.x), **given)

    def publish(self, step, given):
        x = copied(self.x)
        self.shape.add(x, step.published)
        self.shape.poison(x, step.poisons[PUBLISH])
        self.collective.publish(self.shape.given(x), **given)
        if not step.poisons[PUBLISH]:
            self.x = x

    def complete(self, patient):
        """Return whether this round's call is complete; wait for that if `patient`."""
        if self.handle is None:
            return True
        if patient or self.handle.test():
            self.result, self.handle = self.handle.wait(), None
        return self.handle is None

    def check_call(self, epoch, t):
        """Check this round's result and vector."""
        result, version, when = self.result, self.version, (epoch, t, "call")
        self.version += 1
        self.made += 1
        self.timely += result.timely
        self.history.append(digest(self.x))
        synchronous = self._is_synchronous(version)
        self.require(result.version == version == self.collective.version - 1, when, result)
        self.require(result.synchronized == synchronous, when, result)
        if synchronous:
            self.require(result.group == tuple(range(self.size)), when, result)
            self.require((result.source, result.timely) == (version, self.finite), when, result)
            self.check_mean(self.x, *when, weight=result.weight)
        else:
            self.check_group_result(result, when)
            self.check_vector(self.x, *when)
            self.check_left_out(result, when)
        self.check_weight(result, epoch, t)

    def check_group_result(self, result, when):
        period, fixed = self.settings["sync_period"], self.settings["groups"] == "fixed"
        source = 0 if fixed else result.source
        group = group_of(self.rank, self.size, self.settings["group_size"], source)
        self.require(result.group == group, when, result, "not of the group", group)
        self.require(result.source >= result.version, when, result)
        same_period = result.source // period == result.version // period
        self.require(same_period and not self._is_synchronous(result.source), when, result)
        self.require(result.source == result.version or not result.timely, when, result)
        self.require(self.finite or not result.timely, when, result)
        if self.settings["wait"] == "group":
            self.require(result.source == result.version, when, result)
            self.require(result.timely == self.finite, when, result)

    def check_left_out(self, result, when):
        """Check the arrays that none of the versions averages that this call has caught up with."""
        waits = self.settings["wait"] == "group"
        if waits and not self.finite and result.weight == 0:
            return  # no member gives anything, and the rank goes on from what it has published
        indices = self.periods.left_out(range(result.version, result.source + 1))
        # A change that is not finite is not made. A vector that counts in one version only may be
        # left as it is, unless the rank has published another one.
        kept = [self.given] if self.finite else [self.before, *([self.given] if waits else [])]
        if waits or result.timely:
            possible = [digest([arrays[i] for i in indices]) for arrays in kept]
            same = digest([self.x[i] for i in indices]) in possible
            self.require(same, when, indices, "left out, have changed")
        else:
            these = self.shape.numbers_of(indices)
            self.scenario.require_near(
                self.shape.summary(self.x)[these],
                self.shape.summary(kept[0])[these],
                self.tolerance[these],
                *(self.name, *when, indices, "left out, have changed"),
            )

    def check_weight(self, result, epoch, t):
        """Check a result's weight, where it is known or bounded."""
        steps = [steps[self._index(epoch, t)] for steps in self.steps]
        waits = self.settings["wait"] == "group"
        # Who has joined, or has closed where others wait for it, has weight 0.
        known = not self.poison and (self.end == "together" or (self.end == "leave" and not waits))
        if known and (waits or result.synchronized):
            expected = sum(steps[rank].weight for rank in result.group)
        elif known and self.weights != "random":
            expected = self.weight * len(result.group)
        else:
            most = max(WEIGHTS) if self.weights == "random" else self.weight
            most *= len(result.group) * (1 + 1e-9)
            self.require(0 <= result.weight <= most, (epoch, t), result, "above", most)
            return
        near = math.isclose(result.weight, expected, rel_tol=1e-9)
        self.require(near, (epoch, t), result, "the weights' sum is", expected)

    def check_vector(self, x, *when):
        """Check what holds for every vector that is returned."""
        self.require(self.shape.is_even(x), when, "elements that changed alike differ")
        sizes = np.abs(self.shape.summary(x))
        high = np.isfinite(sizes) & (sizes > self.bound * (1 + 1e-6) + self.tolerance)
        self.require(not high.any(), when, "is too large:", sizes, self.bound)
        kept = not WEIGHTLESS_COUNT_ALIKE and self.weights == "random"
        waits = self.settings["wait"] == "group"
        if self.settings["late"] == "conserving" and not waits and not kept:
            self.require(is_finite(x), when, "is not finite")

    def check_mean(self, x, *when, weight=None):
        """Check a vector that all ranks have alike."""
        self.check_vector(x, *when)
        weightless = weight == 0 or (weight is None and self.weights == "random")
        if WEIGHTLESS_COUNT_ALIKE or not (weightless or self.poison):
            self.scenario.note_equal((self.name, *when), x)
        if when in self.expected:
            self.scenario.require_near(
                self.shape.summary(x), self.expected[when], self.tolerance, self.name, *when
            )

    def finish(self, epoch):
        """Do what comes after an epoch's calls."""
        last = max(self.calls[epoch])
        if self.end == "leave":
            return
        if self.end == "together":
            self.synchronize(epoch, last, epoch, "end")
            return
        self._change_together(epoch, self.calls[epoch][self.rank])
        self.collective.join(self.shape.given(self.x))
        self.version += last - self.calls[epoch][self.rank]
        self.require(self.collective.version == self.version, epoch, "join", self.collective)
        self.check_mean(self.x, epoch, "end")
        self.history.append(digest(self.x))

    def check_closed(self):
        """Check what remains of a collective that has been closed."""
        statistics = self.collective.statistics()
        self.require(statistics.calls == self.made, "closed after", statistics)
        self.require(statistics.timely == self.timely, "closed after", statistics)
        if self.end == "leave":
            last = max(self.calls[0])
            self.require(self.collective.executed == last, self.collective.executed, last)


class Groups(Scenario):
    """Several of them at once."""

    def __init__(self, comm, seed, options):
        super().__init__(comm, seed, options)
        count = self.plan.choice((1, 1, 1, 2, 3))
        self.several = count > 1
        self.averages = [Average(self, f"#{i}", alone=count == 1) for i in range(count)]

    def __str__(self):
        what = [f"{self.settings()}, {self.rounds} rounds", *map(str, self.averages)]
        return "\n  ".join(what)

    def play(self):
        self.play_once()
        repeats = [one for one in self.averages if one.settings["wait"] == "group"]
        histories = [one.history for one in repeats]
        if repeats and self.plan.random() < 0.5:
            slots.set_longest(*random.Random(f"{self.seed} slots again").choice(LONGEST))
            self.play_once()
            for one, history in zip(repeats, histories):
                calls = enumerate(zip(one.history, history))
                others = [call for call, (again, before) in calls if again != before]
                one.require(not others, "does not repeat, in its calls", others[:3])

    def play_once(self):
        with contextlib.ExitStack() as stack:
            for average in self.averages:
                average.open(stack)
            for epoch in range(self.averages[0].epochs):
                for t in range(self.averages[0].calls[epoch][self.rank]):
                    self.play_round(epoch, t)
                for average in self.averages:
                    self.pause()
                    average.finish(epoch)
        for average in self.averages:
            average.check_closed()

    def play_round(self, epoch, t):
        for average in self.averages:
            self.pause()
            average.together(epoch, t)
        for average in self.shuffled():
            self.pause()
            average.begin(epoch, t)
        self.pause()
        under_way = self.averages
        while under_way:
            under_way = [
                average
                for average in self.shuffled()
                if average in under_way and not average.complete(self.chance.random() < 0.3)
            ]
        for average in self.averages:
            average.check_call(epoch, t)

    def shuffled(self):
        return self.chance.sample(self.averages, len(self.averages))
