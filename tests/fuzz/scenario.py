"""What all scenarios share: what is drawn, what is noted, and what a failure says."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import traceback
from dataclasses import dataclass, fields

import numpy as np
from mpi4py import MPI

from collectives.exchange.shared import slots
from collectives.peers import PeerCollective

from .vectors import WAYS, digest

NEVER = 10**9  # a period that no scenario has all the calls of
MOST_PROBLEMS = 3  # of one rank that are printed
STALL = 20.0  # seconds after which a collective says who is missing
# The longest vectors of two members, and of more, that they average by slots in shared memory;
# (): as long as by default.
LONGEST = ((), (), (-1, -1), (1 << 30, 1 << 30), (1 << 30, -1))
# What a synchronization gives where all ranks' weights are 0: finite vectors count alike, so that
# all ranks are equal after it. Else each rank keeps its own.
WEIGHTLESS_COUNT_ALIKE = True


class Failed(AssertionError):
    """A check has failed, on this rank or another."""


@dataclass(frozen=True)
class Options:
    """What is not drawn but given, to narrow the scenarios."""

    transport: str | None = None
    engine: str | None = None

    def __str__(self):
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return "".join(f" --{name} {value}" for name, value in given.items() if value)


class Scenario:
    """One run, planned from its seed alone: what each rank gives does not depend on the timing.

    Args:
        comm: the ranks that take part.
        seed, options: of the scenario.

    Attributes:
        plan: random numbers that all ranks have alike.
        scripts: of each rank, by which any other knows what it gives.
        chance: those of this rank, for all that is not in its script.
        seed: that given.
        problems: what is wrong on this rank, in words.
        equal: digests of vectors that all ranks must have alike, by when they got them.
        counted: what this rank has counted, for `what_is_missing`.
        forks: whether ranks fork now and then.
        threads: None; "other", if what a rank does is done by another thread than the main one; or
            "beside", if another thread of the user's communicates meanwhile.
        longest: one of `LONGEST`.
    """

    may_use_threads = True

    def __init__(self, comm, seed, options):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.seed, self.plan = seed, random.Random(seed)
        self.scripts = [random.Random(f"{seed} {rank}") for rank in range(comm.size)]
        self.problems, self.equal, self.counted = [], {}, 0
        engines = ["adaptive", "adaptive", "adaptive", "none"] + ["dedicated"] * (comm.size <= 4)
        engine, transport = (
            self.plan.choice(engines),
            self.plan.choice((None, "messages", "shared")),
        )
        self.engine, self.transport = options.engine or engine, options.transport or transport
        self.rounds = self.plan.choice((4, 8, 12))
        self.nap = self.plan.choice((0, 0.0003, 0.002))
        if self.plan.randrange(comm.size) == comm.rank:
            self.nap *= 4
        circumstances = random.Random(f"{seed} circumstances")
        self.forks = circumstances.random() < 0.15
        self.threads = circumstances.choice((None,) * 6 + ("other", "beside"))
        if not self.may_use_threads or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            self.threads = None
        self.way = circumstances.choice(WAYS)
        self.longest = random.Random(f"{seed} slots").choice(LONGEST)
        self.fork_chance = random.Random(f"{seed} {comm.rank} forks")

    @property
    def chance(self):
        return self.scripts[self.rank]

    def settings(self, kind=None):
        """Return the options of all collectives of the scenario that are of this class."""
        options = {"engine": self.engine, "transport": self.transport, "stall": STALL}
        if kind is not None and issubclass(kind, PeerCollective):
            del options["transport"]
        return options

    def pause(self):
        """Sleep, compute, or do neither, for a random time; fork, where ranks do."""
        if self.forks and self.fork_chance.random() < 0.05:
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        seconds, way = self.chance.random() * self.nap, self.chance.random()
        if way < 0.4:
            time.sleep(seconds)
        elif way < 0.6:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                pass

    def require(self, condition, *what):
        """Note a problem unless the condition holds."""
        if not condition:
            self.problems.append(" ".join(map(str, what)))

    def note_equal(self, when, arrays):
        """Note a vector that all ranks have alike at this time."""
        self.equal[when] = digest(arrays)

    def require_near(self, got, expected, tolerance, *when):
        """Compare two summaries."""
        with np.errstate(invalid="ignore"):
            wrong = np.flatnonzero(~(np.abs(got - expected) <= tolerance))
        if len(wrong):
            self.problems.append(
                f"{' '.join(map(str, when))}: {got[wrong[0]]!r} instead of "
                f"{expected[wrong[0]]!r} (± {np.broadcast_to(tolerance, got.shape)[wrong[0]]:g}), "
                f"number {wrong[0]} of the summary"
            )

    def play(self):
        """Do it, and note what is wrong."""
        raise NotImplementedError

    def what_is_missing(self, counted):
        """Return what is wrong with the sum of what all ranks have counted, or None."""

    def carry_out(self):
        """Play, in the thread that is drawn, and note an exception as a problem."""
        slots.set_longest(*self.longest)
        try:
            if self.threads == "other":
                thread = threading.Thread(target=self._carry_out)
                thread.start()
                thread.join()
            elif self.threads == "beside":
                with communicating(self.comm):
                    self._carry_out()
            else:
                self._carry_out()
        finally:
            slots.set_longest()

    def _carry_out(self):
        try:
            self.play()
        except Exception:
            self.problems.append(traceback.format_exc())


@contextlib.contextmanager
def communicating(comm):
    """Send messages from another thread, on a communicator of its own, inside the block."""
    own, ended, problems = comm.Dup(), threading.Event(), []

    def communicate():
        sent, got = np.arange(1000.0), np.zeros(1000)
        while not ended.is_set():
            own.Sendrecv(sent, own.rank, 0, got, own.rank, 0)
            if (got != sent).any():
                problems.append(got)
            time.sleep(0.0005)

    thread = threading.Thread(target=communicate)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        own.Free()
    if problems:
        raise AssertionError(f"another thread got {problems[0]}")


@contextlib.contextmanager
def some_of(comm, seed):
    """Give a communicator: all ranks, all in another order, or the part that this rank is in."""
    chance = random.Random(f"{seed} ranks")
    order, way = chance.sample(range(comm.size), comm.size), chance.random()
    if way < 0.6 or comm.size == 1:
        yield comm
        return
    in_first_part = comm.size > 2 and way > 0.8 and order[comm.rank] < comm.size // 2
    part = comm.Split(int(in_first_part), order[comm.rank])
    yield part
    part.Free()


def differing(everyones):
    """Return what is wrong with what ranks have noted as equal: {when: digest} of each."""
    problems = []
    for when in dict.fromkeys(when for noted in everyones for when in noted):
        found = {noted[when] for noted in everyones if when in noted}
        if len(found) > 1:
            digests = [noted.get(when, "-") for noted in everyones]
            problems.append(f"{when}: the ranks' vectors differ: {' '.join(digests)}")
    return problems


def by_problem(everyones):
    """Return each problem once, with the ranks that have noted it."""
    ranks = {}
    for rank, problems in enumerate(everyones):
        for problem in problems:
            ranks.setdefault(problem, {})[str(rank)] = True
    return [f"on rank {', '.join(those)}: {problem}" for problem, those in ranks.items()]


def play(kind, make, comm, seed, options, begun=lambda facts: None):
    """Make and carry out a scenario; where a check fails on any rank raise on all alike.

    Args:
        kind: name of the scenarios.
        make: their class.
        comm: all ranks, on each of which this is called.
        begun: function that is told what is played, in words.
    """
    with some_of(comm, seed) as part:
        scenario = make(part, seed, options)
        how = f"forks {scenario.forks}, thread {scenario.threads}, slots {scenario.longest}"
        facts = f"{part.size} ranks, {how}; {scenario}"
        begun(facts)
        scenario.carry_out()
        everyones = part.allgather((scenario.problems, scenario.equal, scenario.counted))
        problems = differing([equal for _, equal, _ in everyones])[:MOST_PROBLEMS]
        problems += by_problem([own[:MOST_PROBLEMS] for own, _, _ in everyones])
        missing = scenario.what_is_missing(sum(counted for _, _, counted in everyones))
        problems += [missing] if missing and not problems else []
    # Of each part once.
    told = comm.allgather((facts, problems) if scenario.rank == 0 else None)
    failed = [one for one in told if one and one[1]]
    if failed:
        lines = [line for facts, problems in failed for line in (facts, *problems)]
        said = [f"failed: {command(kind, comm.size, seed, options)}", *lines]
        raise Failed("\n".join(said if comm.rank == 0 else said[:1]))


def command(kind, size, seed, options):
    """Return what replays a scenario."""
    return f"python -m tests.fuzz --kind {kind} --ranks {size} --seed {seed}{options}"
