"""`PartialAllreduce`: what ranks put in comes out once on each, up to every synchronization."""

from __future__ import annotations

import numpy as np

from collectives import PartialAllreduce

from .scenario import NEVER, Scenario
from .vectors import Shape, copied


class Sums(Scenario):
    """One such collective, into which every rank puts whole numbers."""

    def __init__(self, comm, seed, options):
        super().__init__(comm, seed, options)
        plan = self.plan
        self.shape = Shape(plan, self.size, exact=plan.random() < 0.5)
        self.joins = plan.random() < 0.3
        self.given = {
            "trigger": plan.choice(("solo", "majority")),
            # While all of a period's ranks are there the means are over all of them.
            "sync_period": NEVER if self.joins else plan.choice((1, 2, 3, 5, NEVER)),
            "seed": plan.randrange(100),
        }
        self.poison = plan.choice((0, 0, 0.15))
        kinds = [None] * 6 + ["average", "synchronize", "load"]
        drawn = [plan.choice(kinds) for _ in range(self.rounds)]
        self.operations = [None] * self.rounds if self.joins else drawn
        calls = [plan.randint(0, self.rounds) for _ in range(self.size)]
        self.calls = calls if self.joins else [self.rounds] * self.size
        self.steps = [self._draw_steps(script) for script in self.scripts]
        self.tolerance = 8 * self.rounds * self.shape.rounding * (self.rounds + 1) * self.size * 6

    def __str__(self):
        return (
            f"sums {self.given}, {self.settings()}, {self.shape!r}, poison {self.poison}, "
            f"operations {self.operations}, calls {self.calls}, joins {self.joins}"
        )

    def _draw_steps(self, script):
        """Return what one rank puts in: in each call, and in what comes before, or at the end."""

        def draw():
            poison = self.shape.draw_poison(script) if script.random() < self.poison else None
            return self.shape.draw_change(script), poison

        return [(draw(), draw()) for _ in range(self.rounds + 1)]

    def put_in(self, rank, t, which):
        """Return what a rank puts in, which is nothing if it is not finite."""
        change, poison = self.steps[rank][t][which]
        return 0 * change if poison else change

    def vector(self, t, which):
        """Return what this rank puts in, as a vector."""
        change, poison = self.steps[self.rank][t][which]
        vector = self.shape.new(change)
        self.shape.poison(vector, poison)
        return vector

    def play(self):
        with PartialAllreduce(
            self.comm,
            self.shape.given(self.shape.new(np.zeros(self.shape.width))),
            **self.settings(),
            **self.given,
        ) as self.collective:
            self.begin_period()
            for t in range(self.calls[self.rank]):
                self.together(t)
                self.pause()
                self.call(t)
            self.pause()
            if self.joins:
                self.expect_all()
            self.finish("join" if self.joins else "synchronize", self.rounds)

    def begin_period(self):
        self.expected = np.zeros(self.shape.width)
        self.got = np.zeros(self.shape.width)

    def expect(self, t, which):
        """Note what all ranks put in at a time."""
        everyones = [self.put_in(rank, t, which) for rank in range(self.size)]
        self.expected += np.mean(everyones, axis=0)

    def expect_all(self):
        """Note what all ranks put in, however many calls they make."""
        self.expected[:] = 0
        for rank, calls in enumerate(self.calls):
            for t in range(calls):
                self.expected += self.put_in(rank, t, 0) / self.size

    def together(self, t):
        """Do what all ranks do together before this round."""
        operation = self.operations[t]
        if operation == "load":
            self.collective.load(3 * t)
            self.require(self.collective.version == 3 * t, operation, self.collective.version)
            self.begin_period()
        elif operation == "average":
            # A vector that is not finite does not count; all ranks' are finite here.
            vector = self.shape.new(self.steps[self.rank][t][1][0])
            self.collective.average(self.shape.given(vector))
            mean = np.mean([steps[t][1][0] for steps in self.steps], axis=0)
            self.require_near(self.shape.summary(vector), mean, self.tolerance, t, operation)
            self.note_equal((t, operation), vector)
        elif operation == "synchronize":
            self.finish(operation, t)

    def call(self, t):
        vector, version = self.vector(t, 0), self.collective.version
        result = self.collective(self.shape.given(vector))
        self.take(vector, t, "call")
        self.expect(t, 0)
        synchronous = (version + 1) % self.given["sync_period"] == 0
        self.require((result.version, result.synchronized) == (version, synchronous), t, result)
        self.require(result.group == tuple(range(self.size)), t, result)
        self.require(result.source >= version == self.collective.version - 1, t, result)
        if synchronous:
            self.end_period(t, "call")

    def finish(self, operation, t):
        """Put something in with an operation after which all has come out."""
        vector = self.vector(t, 1)
        getattr(self.collective, operation)(self.shape.given(vector))
        self.take(vector, t, operation)
        self.expect(t, 1)
        self.end_period(t, operation)

    def take(self, vector, *when):
        even = self.shape.is_even(vector)
        self.require(even, when, "elements that changed alike differ")
        self.got += self.shape.summary(copied(vector))

    def end_period(self, *when):
        self.require_near(self.got, self.expected, self.tolerance, *when)
        self.begin_period()
