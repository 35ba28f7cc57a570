"""Collectives that are made and closed, one after another, also with arguments that are refused.

What must hold: what is wrong on one rank is an error on all; a call with a vector that is wrong
ends the others' calls with an error, and all can close. What a process has open, and how much
memory it has, does not grow with the number of collectives.
"""

from __future__ import annotations

import os

import numpy as np
import psutil

import collectives
from collectives import CollectiveError

from .scenario import Scenario

NAMES = (
    *("GroupAllreduce", "PartialAllreduce", "TriggeredAverage", "ReadyGroupAllreduce"),
    *("GeneratedGroupAllreduce", "NeighborAverage", "PairwiseAverage", "PushSum"),
    *("QueuedNeighborAverage", "ParameterServer"),
)
WRONG = ("empty", "list", "length", "dtype", "shape", "option")
LENGTHS = (1, 10, 3000)
MOST_MEMORY = 64 * 2**20  # bytes that a process may grow by in a scenario


class Constructions(Scenario):
    """Many of them; each is called once or not at all."""

    count = 25

    def __init__(self, comm, seed, options):
        super().__init__(comm, seed, options)
        self.drawn = [self._draw() for _ in range(self.count)]

    def __str__(self):
        return f"{self.count} constructions {self.settings()}"

    def _draw(self):
        """Return a class, a length, what is wrong and on which rank, and whether it is called."""
        plan = self.plan
        wrong = plan.choice(WRONG) if plan.random() < 0.3 else None
        call = plan.choice(("none", "good", "good", "empty"))
        return plan.choice(NAMES), plan.choice(LENGTHS), wrong, plan.randrange(self.size), call

    def play(self):
        process, before = psutil.Process(), None
        for number, drawn in enumerate(self.drawn):
            if number == 5:  # what is made once is there
                before = len(os.listdir("/proc/self/fd")), process.memory_info().rss
            self.play_one(number, *drawn)
        if before:
            after = len(os.listdir("/proc/self/fd")), process.memory_info().rss
            # Sockets of the launcher's may be opened at any time.
            self.require(after[0] <= before[0] + 3, "open files", before[0], after[0])
            self.require(after[1] <= before[1] + MOST_MEMORY, "memory", before[1], after[1])

    def play_one(self, number, name, length, wrong, rank, call):
        make = getattr(collectives, name)
        x, options = np.ones(length), self.settings(make)
        if wrong and rank == self.rank:
            x, options = self.spoiled(x, options, wrong)
        try:
            with make(self.comm, x, **options) as collective:
                self.require(not wrong or self.alone(wrong), number, name, wrong, "was accepted")
                self.call(collective, number, name, x, rank, call)
        except (TypeError, ValueError) as error:
            self.require(wrong, number, name, repr(error))
            self.require(f"{rank}" in str(error) or self.rank == rank, number, name, repr(error))
        except CollectiveError as error:
            # close() says so, too, where a call has failed before.
            self.require(call == "empty", number, name, repr(error))

    def alone(self, wrong):
        """Return whether what is wrong is so beside other ranks alone."""
        return self.size == 1 and wrong in ("length", "dtype")

    def spoiled(self, x, options, wrong):
        """Return arguments with something wrong."""
        return {
            "empty": (np.zeros(0), options),
            "list": ([], options),
            "length": (np.ones(len(x) + 1), options),
            "dtype": (x.astype(np.float32), options),
            "shape": (np.ones((2, 3)), options),
            "option": (x, options | {"engine": "fast"}),
        }[wrong]

    def call(self, collective, number, name, x, rank, call):
        if call == "none":
            return
        if call == "empty" and rank == self.rank:
            try:
                collective(np.zeros(0))
            except ValueError:
                return
            except CollectiveError as error:
                self.problems.append(f"{number} {name}: {error!r} instead of a ValueError")
                return
            self.problems.append(f"{number} {name}: an empty vector was accepted")
            return
        try:
            collective(x)
        except CollectiveError as error:
            self.require(call == "empty", number, name, repr(error))


class ManyConstructions(Constructions):
    """A thousand of them."""

    count = 1000
