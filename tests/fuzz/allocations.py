"""Collectives of which some ranks run out of memory, in the constructor or later.

What must hold: a collective is made on all ranks or on none; where memory is short in calls, an
error is the consequence on any rank or on none, and all can close.
"""

from __future__ import annotations

import random

import numpy as np

import collectives
from collectives import CollectiveError
from collectives.memory.allocation import fail_after

from .constructions import NAMES
from .scenario import Scenario

LENGTHS = (1, 3000, 70_000, 300_000, 800_000)
MOST_ALLOCATIONS = {"constructor": 120, "calls": 60}


class Allocations(Scenario):
    """Several of them, one after another."""

    count = 10

    def __init__(self, comm, seed, options):
        super().__init__(comm, seed, options)
        self.drawn = [self._draw() for _ in range(self.count)]
        chance = random.Random(f"{seed} leases")
        self.leases = [chance.random() < 0.5 for _ in self.drawn]

    def __str__(self):
        return f"{self.drawn} {self.settings()}, leases {self.leases}"

    def _draw(self):
        """Return a class, a length, the ranks that lack memory, where, from when on, and how."""
        plan = self.plan
        ranks = plan.sample(range(self.size), plan.choice((1, 1, plan.randint(1, self.size))))
        where = plan.choice(("constructor", "calls", "calls"))
        successes = int(MOST_ALLOCATIONS[where] ** plan.random()) - 1
        return (
            plan.choice(NAMES),
            plan.choice(LENGTHS),
            ranks,
            where,
            successes,
            plan.random() < 0.5,
        )

    def play(self):
        for number, drawn in enumerate(self.drawn):
            try:
                self.play_one(number, *drawn)
            finally:
                fail_after(-1)

    def play_one(self, number, name, length, ranks, where, successes, once):
        x, what = np.ones(length), (number, name, length, ranks, where, successes, once)
        short, leases = self.rank in ranks, self.leases[number] and name == "GroupAllreduce"
        if short and where == "constructor":
            fail_after(successes, once)
        error = collective = None
        try:
            make = getattr(collectives, name)
            given = {"pace": "own", "leased": [0]} if leases else {}
            collective = make(self.comm, x, **self.settings(make), **given)
        except (MemoryError, RuntimeError) as caught:  # the latter where memory must be shared
            error = caught
        failed = fail_after(-1) == -2
        made = self.comm.allgather(collective is not None)
        self.require(len(set(made)) == 1, *what, "was made on some ranks only", made)
        if collective is not None:
            if short and where == "calls":
                fail_after(successes, once)
            error = self.use(collective, x, leases)
            failed = fail_after(-1) == -2 or failed
            self.require(collective.closed, *what, "is not closed")
        everyones = self.comm.allgather((failed, error and repr(error)))
        any_failed, errors = any(one[0] for one in everyones), [one[1] for one in everyones]
        self.require(any_failed or not any(errors), *what, errors)
        self.counted += any_failed

    def use(self, collective, x, leases):
        """Make calls, tell parts if this rank `leases`, and close; return the error, or None."""
        try:
            with collective:
                for _ in range(self.rounds):
                    self.pause()
                    x += 1
                    collective(x)
                    if leases:
                        collective.lease(x)
                collective.synchronize(x)
        except (CollectiveError, MemoryError) as error:
            return error
        return None
