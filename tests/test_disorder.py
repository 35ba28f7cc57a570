"""Ranks do what they may in a random order, then one fails, leaves or joins: everything ends."""

import contextlib
import itertools
import random
import time

import numpy as np
import pytest
from together import NEVER, RULES, Interrupted, interrupt, signalled

from collectives import ClosedError, CollectiveError, GroupAllreduce, RankFailedError

pytestmark = pytest.mark.mpi

ENDS = ("close", "early", "join", "fail", "fail twice", "interrupt")


class Plan:
    """What all ranks agree on, drawn from a seed; each rank fills it in by chance of its own."""

    def __init__(self, seed, size):
        chance = random.Random(seed)
        self.end = chance.choice(ENDS)
        self.steps = chance.randint(1, 30)
        self.length = chance.choice([1, 100, 100_000])
        self.settings = {
            "group_size": chance.randint(1, size),
            "sync_period": chance.choice([1, 2, 5, NEVER]),
            "wait": chance.choice(["nobody", "group"]),
            "late": chance.choice(RULES),
        }
        operations = [None, None, None, "average", "synchronize", "load"]
        self.operations = [chance.choice(operations) for _ in range(self.steps)]
        ranks = chance.sample(range(size), min(size, 2))
        self.failing = ranks[: 2 if self.end == "fail twice" else 1]
        self.moment = chance.randrange(self.steps)
        self.slow = chance.randrange(size)

    def __repr__(self):
        return f"{vars(self)}"


class Rank:
    """One rank that follows a plan."""

    def __init__(self, average, plan, chance):
        self.average, self.plan, self.chance = average, plan, chance
        self.mine = np.zeros(plan.length)
        self.scale = 0.002 * (1 + 3 * (average.rank == plan.slow))

    def pause(self):
        if self.chance.random() < 0.5:
            time.sleep(self.chance.random() * self.scale)

    def step(self, t):
        """Make one call, in one of the ways there are, with what belongs before it."""
        operation = self.plan.operations[t]
        self.pause()
        if self.chance.random() < 0.2:
            self.average.publish(self.mine)
        if operation == "load":
            self.average.load(self.mine, 2 * t)
        elif operation:
            getattr(self.average, operation)(self.mine)
        way = self.chance.choice(["call", "wait", "test", "forget"])
        if way == "call":
            self.average(self.mine)
            return
        handle = self.average.start(self.mine)
        self.pause()
        if way == "wait":
            handle.wait()
        elif way == "test":
            while not handle.test():
                self.pause()

    def do_something_wrong(self):
        """Give a vector that is none, in any of the methods that take one."""
        wrong = np.zeros(self.plan.length + 1)
        name = self.chance.choice(
            ["__call__", "start", "publish", "average", "synchronize", "join", "load"]
        )
        arguments = [wrong, 0] if name == "load" else [wrong]
        with pytest.raises(ValueError, match="elements"):
            getattr(self.average, name)(*arguments)

    def run(self):
        """Follow the plan to its end; the collective is closed by the caller."""
        plan, rank = self.plan, self.average.rank
        steps = plan.steps
        if plan.end == "early" and rank in plan.failing:
            steps = plan.moment
        elif plan.end == "join":
            # The plan's operations need all ranks' calls: whoever ends early skips none of them.
            plan.operations = [None] * plan.steps
            steps = self.chance.randint(0, plan.steps)
        for t in range(steps):
            if plan.end.startswith("fail") and rank in plan.failing and t >= plan.moment:
                self.do_something_wrong()
                return
            self.step(t)
        if plan.end == "join":
            self.average.join(self.mine)


def follow(comm, seed, engine="adaptive"):
    """Let all ranks follow a plan; return it and what this rank was told at the end."""
    plan = Plan(seed, comm.size)
    chance = random.Random(f"{seed} {comm.rank}")
    told = None
    average = GroupAllreduce(comm, np.zeros(plan.length), engine=engine, **plan.settings)
    interrupts = plan.end == "interrupt" and comm.rank in plan.failing
    seconds = 0.001 + chance.random() * 0.05 if interrupts else 0
    try:
        with contextlib.suppress(Interrupted), signalled(interrupt, seconds):
            Rank(average, plan, chance).run()
    except CollectiveError as error:
        told = error
    average.close()
    return plan, told


def check(plan, told, rank):
    """See that only those heard of an error who should, and the right one."""
    if plan.end in ("close", "join"):
        assert told is None, told
    elif plan.end.startswith("fail"):
        if told is not None:
            assert isinstance(told, RankFailedError), told
            assert any(f"rank {other} failed" in str(told) for other in plan.failing)
    elif told is not None:
        assert isinstance(told, ClosedError), told


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("seed", range(6))
def test_whatever_ranks_do_everything_ends(comm, seed):
    check(*follow(comm, seed), comm.rank)


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("seed", range(4))
def test_an_exception_ends_whatever_several_collectives_do(comm, seed):
    fail_in_two(comm, seed)


def fail_in_two(comm, seed):
    """One rank leaves the block of two collectives by an exception, at a moment of the plan's."""
    plan = Plan(seed, comm.size)
    chance = random.Random(f"{seed} {comm.rank}")
    vectors = np.zeros(plan.length), np.zeros(5)
    failing = plan.failing[0]
    first = GroupAllreduce(comm, vectors[0], **plan.settings)
    plan.settings["sync_period"] = 3
    second = GroupAllreduce(comm, vectors[1], **plan.settings)
    kind = Interrupted if comm.rank == failing else RankFailedError
    with pytest.raises(kind) as caught, first, second:
        for t in itertools.count():
            for average, vector in zip((first, second), vectors):
                if chance.random() < 0.5:
                    time.sleep(chance.random() * 0.002)
                if (comm.rank, t) == (failing, plan.moment):
                    raise Interrupted
                average(vector)
    assert comm.rank == failing or "Interrupted" in str(caught.value)
    assert first.closed and second.closed
