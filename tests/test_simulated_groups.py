"""Collectives that average in groups or over all ranks, on ranks in simulated time."""

import dataclasses
import re
from collections import defaultdict

import numpy as np
import pytest
from bits import CASES, digest, expected

from collectives import (
    GeneratedGroupAllreduce,
    GroupAllreduce,
    PartialAllreduce,
    ReadyGroupAllreduce,
    TriggeredAverage,
)
from collectives.ready_groups import dynamic_weights
from wagma.methods import METHODS
from wagma.methods.method import load
from wagma.simulation import FREE, MACHINES, Settings
from wagma.simulation.core import Simulation
from wagma.simulation.formed_groups import FormedGroupMethod
from wagma.simulation.ranks import Job, Ranks, TimeIsOver
from wagma.simulation.triggered_average import TriggeredAveraging
from wagma.simulation.wait_avoiding import GroupAveraging

# Without those for which ranks join, publish or load, or leave before others.
PLAYED = [
    name
    for name in CASES
    if re.match("groups|partial|train (WAGMA|EagerSGD).*, exact", name)
    and not re.search("join|operations|close early|nobody waits", name)
]
# Passes over vectors take time as well, and so does their way to an accelerator.
MACHINE = dataclasses.replace(MACHINES["10gbe"], memory=1e8, staging=5e7)
LENGTH = 1000
CALLS = 15

KINDS = {
    "partial-reduce": ReadyGroupAllreduce,
    "ripples": GeneratedGroupAllreduce,
    "local-sgd": TriggeredAverage,
    "wagma": GroupAllreduce,
    "eager-sgd": PartialAllreduce,
}
RUNS = [
    ("partial-reduce", {}),
    ("partial-reduce", {"group_size": 2, "sync_every": 2}),
    *[("ripples", {"groups": groups}) for groups in ("smart", "random", "buffered", "static")],
    ("local-sgd", {"sync_period": 3, "trigger": "solo"}),
    *[
        ("wagma", {"group_size": 4, "sync_period": 5, "wait": wait, "late": late})
        for wait in ("nobody", "group")
        for late in ("paper", "conserving")
    ],
    *[
        ("wagma", {"group_size": size, "sync_period": 5, "pace": "own", "groups": groups})
        for size, groups in ((4, "changing"), (1, "changing"), (2, "fixed"))
    ],
    ("eager-sgd", {"sync_period": 5, "trigger": "solo"}),
    ("eager-sgd", {"sync_period": 5, "trigger": "majority"}),
]


def uneven(count, ranks, seed=0):
    """Return seconds of steps, of which those of rank 1 are the longest."""
    times = np.random.default_rng(seed).uniform(0.5, 1.5, (count, ranks))
    times[:, 1] *= 3
    return times


def play(function, steps, machine=MACHINE, seconds=None):
    return Ranks(Job(machine, steps, seconds)).run(function)


def make(name, comm, vector, options):
    """Make a method's collective with the options of a simulation."""
    chosen = dict(options)
    if name == "local-sgd":
        del chosen["trigger"]
    return KINDS[name](comm, vector, **chosen)


# Bits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 4) for name in PLAYED), *((name, 8) for name in sorted(PLAYED)[::3])],
)
def test_the_bits_are_the_fixtures(name, size, monkeypatch):
    transports = CASES[name].transports
    if size == 8:
        transports = transports[PLAYED.index(name) % len(transports) :][:1]
    for transport in transports:
        monkeypatch.setenv("WAGMA_TRANSPORT", transport)
        machine = dataclasses.replace(MACHINES["hdr"], ranks_per_node=size)
        played = play(lambda comm: digest(name, comm), np.ones((1, size)), machine)
        assert played == [expected(size, name, transport, rank) for rank in range(size)]


def test_most_cases_of_groups_are_played():
    assert len(PLAYED) == 37


# Times


class Applications:
    """Ranks that call after each step, without vectors, and note when each call has ended."""

    def __init__(self, method, steps):
        self.ended = [[] for _ in steps[0]]
        self.simulation = Simulation(method, MACHINE, steps, None, self)
        for rank in range(len(self.ended)):
            self.simulation.compute(rank)
        self.simulation.run()

    def computed(self, rank):
        self.simulation.call(rank)

    def returned(self, rank):
        self.ended[rank].append(self.simulation.now)
        if len(self.ended[rank]) < CALLS:
            self.simulation.compute(rank)
            return
        method = self.simulation.method
        if isinstance(method, FormedGroupMethod):
            method.port(rank).leave()
        elif isinstance(method, TriggeredAveraging):
            method.leave(rank)
        self.simulation.finish(rank)


def without_values(name, options):
    if name == "eager-sgd":  # the optimizer averages models as well
        majority = options["trigger"] == "majority"
        return GroupAveraging(8, options["sync_period"], 4 * LENGTH, drawing=majority)
    return load(METHODS[name].simulated)(Settings(4 * LENGTH, **options), 8)


@pytest.mark.parametrize(("name", "options"), RUNS)
def test_calls_take_the_time_that_they_take_without_values(name, options):
    steps = uneven(CALLS, 8)

    def function(comm):
        vector = np.full(LENGTH, comm.rank, np.float32)
        ended = []
        with make(name, comm, vector, options) as collective:
            for _ in range(CALLS):
                comm.ranks.compute(comm.rank)
                vector += 1
                collective(vector)
                ended.append(comm.ranks.now())
        return ended

    assert play(function, steps) == Applications(without_values(name, options), steps).ended


@pytest.mark.parametrize(("name", "options"), RUNS)
def test_ranks_end_when_the_time_is_over(name, options):
    def function(comm):
        vector = np.zeros(LENGTH, np.float32)
        with make(name, comm, vector, options) as collective:
            try:
                while True:
                    comm.ranks.compute(comm.rank)
                    collective(vector)
            except TimeIsOver:
                return comm.ranks.now()

    assert play(function, uneven(100, 4), seconds=7) == [7] * 4


# Groups


WEIGHTS = {
    "constant": ({}, lambda iterations: (np.full(len(iterations), 1 / len(iterations)), 0)),
    "dynamic": ({"weights": "dynamic"}, dynamic_weights),
    "initial": (
        {"weights": "dynamic", "missing": "initial"},
        lambda iterations: dynamic_weights(iterations, missing="initial"),
    ),
    "each": (
        {"weights": "dynamic-each"},
        lambda iterations: dynamic_weights(iterations, each=True),
    ),
}


def grouped(comm, options):
    """Call; return for each call its members, its end, and the iteration and vectors of it."""
    generator = np.random.default_rng(comm.rank)
    vector = np.ones(50)
    calls, iteration = [], 0
    with ReadyGroupAllreduce(comm, vector, group_size=3, **options) as collective:
        for _ in range(CALLS):
            comm.ranks.compute(comm.rank)
            vector += generator.normal(size=50)
            before = iteration + 1, vector.copy()
            result = collective(vector)
            iteration = collective.native.queue.protocol.iteration
            calls.append((result.group, comm.ranks.now(), *before, vector.copy()))
    return calls


@pytest.mark.parametrize("weights", WEIGHTS)
def test_members_of_a_group_get_the_mean_of_their_vectors(weights):
    options, weights_of = WEIGHTS[weights]
    groups = defaultdict(list)
    for calls in play(lambda comm: grouped(comm, options), uneven(CALLS, 8), MACHINES["hdr"]):
        for members, ended, *others in calls:
            groups[members, ended].append(others)
    assert max(len({iteration for iteration, *_ in each}) for each in groups.values()) == 3
    for (members, _), vectors in groups.items():
        iterations, before, after = zip(*vectors)
        assert len(vectors) == len(members)
        own, initial = weights_of(iterations)
        np.testing.assert_allclose(after[0], own @ np.array(before) + initial, rtol=1e-12)
        assert len({vector.tobytes() for vector in after}) == 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ReadyGroupAllreduce, {}),
        (ReadyGroupAllreduce, {"controller_only": True}),
        (GeneratedGroupAllreduce, {"groups": "smart"}),
        (GeneratedGroupAllreduce, {"groups": "random", "controller_only": True}),
        (GeneratedGroupAllreduce, {"groups": "static"}),
    ],
)
def test_ranks_average_and_load_and_join_with_any_numbers_of_calls(kind, options):
    def function(comm):
        vector = np.full(50, comm.rank, np.float32)
        seen = []
        with kind(comm, vector, **options) as collective:
            for epoch in range(2):
                calls = collective.participates * (3 + 2 * comm.rank)
                for _ in range(calls):
                    comm.ranks.compute(comm.rank)
                    vector += 1
                    collective(vector)
                shown = vector.copy()
                if epoch:
                    collective.average(shown)
                    collective.synchronize(vector)
                    seen += [shown.tobytes(), vector.tobytes()]
                collective.load(vector, 3)
                collective.join(vector)
                seen += [vector.tobytes(), collective.version]
        return seen

    seen = play(function, uneven(40, 4), MACHINES["hdr"])
    assert seen == seen[:1] * 4
    assert seen[0][1] == 3 and seen[0][2] == seen[0][3]


# Averages that the fastest rank starts


@pytest.mark.parametrize(("weights", "last"), [("work", 28 / 3 + 20), ("given", 12 + 10)])
def test_the_first_rank_with_enough_calls_starts_an_average_of_what_others_have(weights, last):
    """Rank 0 makes 4 calls and leaves; rank 1 averages with what it has left, if that counts."""

    def function(comm):
        vector = np.zeros(3)
        with TriggeredAverage(comm, vector, sync_period=2, weights=weights) as collective:
            for _ in range(4):
                comm.ranks.compute(comm.rank)
                vector += 10**comm.rank
                collective(vector)
                seen = comm.ranks.now(), vector[0]
        return seen

    [first, second] = play(function, np.tile([1.0, 3.0], (4, 1)), FREE)
    assert first == (6, pytest.approx(28 / 3 if weights == "work" else 12))
    assert second == (12, pytest.approx(last))


def test_ranks_of_triggered_averages_join_and_load():
    def function(comm):
        vector = np.full(50, comm.rank, np.float32)
        seen = []
        with TriggeredAverage(comm, vector, sync_period=3) as collective:
            for _ in range(2):
                for _ in range(4 + 3 * comm.rank):
                    comm.ranks.compute(comm.rank)
                    vector += 1
                    collective(vector)
                collective.synchronize(vector)
                shown = vector + comm.rank
                collective.average(shown)
                seen += [vector.tobytes(), shown.tobytes(), collective.version]
                collective.load(vector, 20)
                seen.append(collective.version)
        return seen

    seen = play(function, uneven(40, 4), MACHINES["hdr"])
    assert seen == seen[:1] * 4
    assert seen[0][3] == 20
