"""Groups that a protocol forms: Partial Reduce's of ready ranks, and those that Ripples generates.

What must hold: with equal weights the mean of all vectors is that of all that ranks have put in,
however many calls each makes. Of Partial Reduce every group is replayed, in the order in which its
members were in it: all have the same mean, bit for bit, with the weights of the paper's formula,
which follow from the iterations of all members' models.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from collectives import GeneratedGroupAllreduce, ReadyGroupAllreduce, dynamic_weights

from .scenario import Scenario
from .vectors import Shape, digest


class Averaged(NamedTuple):
    """What one call of one rank averaged: the group, and this rank's vector before and after."""

    group: tuple[int, ...]
    before: np.ndarray
    after: np.ndarray
    digest: str


class Formed(Scenario):
    """One such collective; all ranks join in the end."""

    def __init__(self, comm, seed, options):
        super().__init__(comm, seed, options)
        plan, size = self.plan, self.size
        self.shape = Shape(plan, size, exact=plan.random() < 0.5)
        self.make, self.given = self._draw_given()
        only = self.given["controller_only"]
        self.idle = self.given["controller_rank"] if only else None
        self.calls = [plan.randint(0, self.rounds) for _ in range(size)]
        if self.idle is not None:
            self.calls[self.idle] = 0
        # The initial model of dynamic weights is to be the same on all ranks.
        own = self.given.get("missing") != "initial"
        self.starts = np.array([np.full(self.shape.width, float(own * r)) for r in range(size)])
        self.steps = [
            [self.shape.draw_change(script) for _ in range(self.rounds + 1)]
            for script in self.scripts
        ]
        changes = np.abs(self.steps).max(initial=0) * (self.rounds + 1) * size
        self.tolerance = 16 * (self.rounds + 2) * self.shape.rounding * (changes + 2 + size)

    def __str__(self):
        return (
            f"{self.make.__name__} {self.given}, {self.settings()}, {self.shape!r}, "
            f"calls {self.calls}"
        )

    def _draw_given(self):
        """Return the class and its arguments."""
        plan, size = self.plan, self.size
        given = {
            "sync_every": plan.choice((1, 1, 1, 2)),
            "controller_rank": plan.randrange(size),
            "controller_only": size > 2 and plan.random() < 0.2,
        }
        members = size - given["controller_only"]
        if plan.random() < 0.5:
            groups = plan.choice(("smart", "smart", "random", "buffered", "static"))
            given |= {"groups": groups, "seed": plan.randrange(100)}
            given["group_size"] = plan.randint(2, max(2, members))
            given["threshold"] = plan.choice((1, 2, 4))
            if groups == "static":
                given["controller_only"] = False
            return GeneratedGroupAllreduce, given
        given["group_size"] = plan.randint(min(2, members), members) if members > 1 else 2
        given["weights"] = plan.choice(("constant", "dynamic", "dynamic-each"))
        if given["weights"] != "constant":
            given["missing"] = plan.choice(("nearest", "initial"))
            given["alpha"] = plan.choice((0.0, 0.5, 0.9))
        return ReadyGroupAllreduce, given

    @property
    def conserves(self):
        return self.given.get("weights", "constant") == "constant"

    def counting(self, rows):
        """Return the rows of ranks that make calls."""
        return np.delete(rows, [] if self.idle is None else self.idle, axis=0)

    def play(self):
        self.x, noted = self.shape.new(self.starts[self.rank]), []
        with self.make(
            self.comm, self.shape.given(self.x), **self.settings(), **self.given
        ) as collective:
            for t in range(self.calls[self.rank]):
                self.pause()
                self.shape.add(self.x, self.steps[self.rank][t])
                before = self.shape.summary(self.x).astype(float)
                result = collective(self.shape.given(self.x))
                self.require(result.version == t == collective.version - 1, t, result)
                self.require(self.rank in result.group, t, result)
                self.require(self.shape.is_even(self.x), t, "elements that changed alike differ")
                after = self.shape.summary(self.x).astype(float)
                noted.append(Averaged(result.group, before, after, digest(self.x)))
            self.pause()
            self.shape.add(self.x, self.steps[self.rank][self.rounds])
            own = self.shape.summary(self.x).astype(float)
            collective.join(self.shape.given(self.x))
            self.note_equal("end", self.x)
        self.counted = sum(len(one.group) > 1 for one in noted)
        if self.conserves:
            self.check_mean(self.starts + self.put_in(), "put in")
        if self.make is ReadyGroupAllreduce:
            self.check_mean(np.array(self.comm.allgather(own)), "left")
            self.replay(self.comm.allgather(noted))

    def put_in(self):
        """Return what each rank has put in."""
        return np.array(
            [
                np.sum([*steps[:calls], steps[self.rounds]], axis=0)
                for steps, calls in zip(self.steps, self.calls)
            ]
        )

    def check_mean(self, rows, what):
        """Compare what all ranks have at the end with the mean of these."""
        mean = self.counting(rows).mean(0)
        self.require_near(self.shape.summary(self.x).astype(float), mean, self.tolerance, what)

    def replay(self, noted):
        """Go through all groups in an order in which each of them can have been."""
        at, iterations = [0] * self.size, [0] * self.size
        while True:
            current = {r: own[at[r]] for r, own in enumerate(noted) if at[r] < len(own)}
            ready = next(
                (
                    one.group
                    for one in current.values()
                    if all(current.get(m) and current[m].group == one.group for m in one.group)
                ),
                None,
            )
            if ready is None:
                break
            self.check_group([current[member] for member in ready], ready, iterations)
            for member in ready:
                at[member] += 1
        self.require(not current, "groups that do not fit together:", current)

    def check_group(self, members, group, iterations):
        """Check one group's mean, and bring its members' iterations up to date."""
        own = [iterations[rank] + 1 for rank in group]
        for rank in group:
            iterations[rank] = max(own)
        if len(group) == 1:
            same = (members[0].before == members[0].after).all()
            self.require(same, group, "a call alone has changed the vector")
            return
        same = len({one.digest for one in members}) == 1
        self.require(same, "the members of", group, "have different means")
        initial, weights = 0.0, np.full(len(group), 1 / len(group))
        if not self.conserves:
            each = self.given["weights"] == "dynamic-each"
            weights, initial = dynamic_weights(
                own, self.given["alpha"], self.given["missing"], each=each
            )
        mean = weights @ [one.before for one in members] + initial * self.starts[0]
        self.require_near(members[0].after, mean, self.tolerance, "group", group, "of", own)

    def what_is_missing(self, counted):
        if self.idle is None and self.size > 1 and min(self.calls) >= 6 and not counted:
            return "no group of several ranks was formed"
        return None
