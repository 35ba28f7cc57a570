"""`TriggeredAverage`: averages that any rank starts, of ranks that make any numbers of calls.

What must hold: every average is the weighted mean of what the ranks had, each with the weight of
its work; all have it, bit for bit the same. Which calls an average was of depends on the timing, so
each rank notes what it gave to which average, and that is put together afterwards.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import numpy as np

from collectives import TriggeredAverage

from .scenario import Scenario
from .vectors import ROUNDING, Shape, copied, is_finite

WEIGHTS = (0, 1, 0.5, 3)
CONTRACTION = 0.75


class Given(NamedTuple):
    """What a rank gives to an average: the summary of its vector, its weight, whether finite."""

    summary: np.ndarray
    weight: float
    finite: bool


class Triggered(Scenario):
    """One such collective: each rank calls as often as it likes, and joins the others."""

    def __init__(self, comm, seed, options):
        super().__init__(comm, seed, options)
        plan, size = self.plan, self.size
        self.shape = Shape(plan, size, exact=plan.random() < 0.5)
        self.given = {
            "sync_period": plan.choice((1, 2, 3, 5)),
            "weights": plan.choice(("given", "work", "wp")),
            "contraction": CONTRACTION,
        }
        # A number of its own, so that other scenarios stay as they are.
        wires = random.Random(f"{seed} wire")
        self.given["wire_dtype"] = wires.choice((None, None, "float16", "bfloat16"))
        self.epochs = plan.choice((1, 2, 3))
        self.ends = [plan.choice(("join", "synchronize")) for _ in range(self.epochs)]
        self.between = [plan.choice((None, None, "average", "load")) for _ in range(self.epochs)]
        self.poison = plan.choice((0, 0, 0.15))
        self.sound = plan.randrange(size)  # the rank all of whose vectors are finite
        self.notes, self.means = {}, {}
        self.work, self.last_weight, self.largest = 0.0, 1.0, 0.0

    def __str__(self):
        return (
            f"triggered {self.given}, {self.settings()}, {self.shape!r}, poison {self.poison}, "
            f"ends {self.ends}, between {self.between}"
        )

    @property
    def weight(self):
        """What this rank's vector weighs now."""
        if self.given["weights"] == "given":
            return self.last_weight
        if self.given["weights"] == "work":
            return self.work
        return CONTRACTION ** (self.given["sync_period"] - self.work)

    def note(self, when):
        """Note what this rank gives to an average."""
        finite = is_finite(self.x)
        summary = self.shape.summary(self.x) if finite else np.zeros(self.shape.width)
        self.largest = max(self.largest, np.abs(summary).max())
        self.notes[when] = Given(summary.astype(float), self.weight, finite)

    def note_mean(self, when):
        """Note what came out of it."""
        self.require(self.shape.is_even(self.x), when, "elements that changed alike differ")
        self.note_equal(when, self.x)
        self.means[when] = self.shape.summary(self.x).astype(float)
        self.work = 0.0

    def play(self):
        self.x = self.shape.new(np.zeros(self.shape.width))
        with TriggeredAverage(
            self.comm, self.shape.given(self.x), **self.settings(), **self.given
        ) as self.collective:
            for epoch in range(self.epochs):
                for _ in range(self.chance.randint(0, self.rounds)):
                    self.pause()
                    self.call(epoch)
                self.pause()
                self.finish(epoch)
                self.together(epoch)
        self.check_all()

    def call(self, epoch):
        version, chance = self.collective.version, self.chance
        self.shape.add(self.x, self.shape.draw_change(chance))
        if self.rank != self.sound and chance.random() < self.poison:
            self.shape.poison(self.x, self.shape.draw_poison(chance))
        weight = 1 if self.rank == self.sound else chance.choice(WEIGHTS)
        self.work += weight
        self.last_weight = weight
        self.note((epoch, version))
        before = copied(self.x)
        result = self.collective(self.shape.given(self.x), weight=weight)
        self.require(result.version == version == result.source, version, result)
        self.require(self.collective.version == version + result.synchronized, version, result)
        if result.synchronized:
            self.require(result.group == tuple(range(self.size)), result)
            self.note_mean((epoch, version))
            return
        self.require(self.given["sync_period"] > 1, version, "no average was started")
        self.require(result.group == (self.rank,), result)
        same = all(np.array_equal(*pair, equal_nan=True) for pair in zip(before, self.x))
        self.require(same, version, "a call alone has changed the vector")

    def finish(self, epoch):
        """Let the others go on without this rank, and have what all have then."""
        self.note((epoch, self.collective.version))
        getattr(self.collective, self.ends[epoch])(self.shape.given(self.x))
        self.note_mean((epoch, "end"))
        self.last = self.collective.version

    def together(self, epoch):
        """Do what all ranks do together between epochs."""
        if self.between[epoch] == "load":
            self.x = self.shape.new(np.full(self.shape.width, float(self.rank)))
            self.collective.load(self.shape.given(self.x), 100 * (epoch + 1))
            reached = self.collective.version
            self.require(reached == 100 * (epoch + 1), "load", reached)
        elif self.between[epoch] == "average":
            shown = copied(self.x)
            self.shape.add(shown, np.full(self.shape.width, float(self.rank)))
            self.collective.average(self.shape.given(shown), weight=1.0)
            expected = self.shape.summary(self.x) + (self.size - 1) / 2
            limit = 16 * self.shape.rounding * (np.abs(expected) + self.size)
            self.require_near(self.shape.summary(shown), expected, limit, epoch, "average")

    def check_all(self):
        """Work out every average of what all ranks have noted, and compare."""
        everyones = self.comm.allgather(self.notes)
        largest = max(self.comm.allgather(self.largest)) + 1
        wire = ROUNDING.get(self.given["wire_dtype"], 0.0)
        tolerance = 8 * self.size * np.maximum(self.shape.rounding, wire) * largest
        for epoch in range(self.epochs):
            found = {
                version: [notes.get((epoch, version)) for notes in everyones]
                for version in sorted({v for notes in everyones for e, v in notes if e == epoch})
            }
            mean = None
            for version, given in found.items():
                # Who has joined before has the last average, which weighs nothing.
                given = [each or Given(mean, 0.0, True) for each in given]
                counting = [each for each in given if each.finite]
                weights = [each.weight for each in counting]
                if not math.fsum(weights):
                    weights = [1.0] * len(counting)
                summaries = [each.summary for each in counting]
                mean = np.average(summaries, axis=0, weights=weights)
                got = self.means.get((epoch, version))
                if version == max(found) and got is None:
                    got = self.means[epoch, "end"]
                if got is not None:
                    self.require_near(got, mean, tolerance, epoch, version)
