"""Ranks in simulated time have the bits of real ones, in groups and in averages that any starts."""

import os

import numpy as np
import pytest
import torch
from methods import backward, make_model, momentum_sgd
from trainings import compute, real_and_simulated

from collectives import TriggeredAverage
from collectives.formed_groups import FormedGroupCollective
from collectives.protocols.formed_groups import Group
from collectives.protocols.scripted import ScriptedGroupProtocol
from wagma import optim
from wagma.simulation.ranks import Communicator

STEPS = 20
METHODS = {
    "ripples": (optim.Ripples, {"groups": "static", "ranks_per_node": 2}),
    "partial reduce": (optim.PartialReduce, {"group_size": 4}),
    "partial reduce, dynamic": (optim.PartialReduce, {"group_size": 4, "weights": "dynamic"}),
    "local SGD, solo": (optim.LocalSGD, {"sync_period": 1, "trigger": "solo"}),
    "local SGD, work": (optim.LocalSGD, {"sync_period": 4, "weights": "work"}),
    "local SGD, wp": (optim.LocalSGD, {"sync_period": 4, "weights": "wp", "wire_dtype": "float16"}),
    "eager-SGD": (optim.EagerSGD, {"sync_period": 1}),
    "WAGMA, wp": (
        optim.WAGMA,
        {"sync_period": 4, "group_size": 3, "wait": "group", "weights": "wp", "late": "conserving"},
    ),
    "WAGMA, overlap": (
        optim.WAGMA,
        {"sync_period": 4, "wait": "group", "overlap": True, "wire_dtype": torch.bfloat16},
    ),
}
# Bytes of an array; only the long ones are averaged in slices by messages.
SHORT, LONG = 200, 600 << 10
SIZES = SHORT, pytest.param(LONG, marks=(pytest.mark.extra, pytest.mark.long))
KINDS = ("float16", "float32", "float64")

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(4)]


class Rotating:
    """Groups of 2, 3 and 4 ranks in turn, of weights that differ, and of which some are 0."""

    passive = False

    def __init__(self, port, rank, size):
        self.port, self.rank, self.size = port, rank, size
        self.calls, self.calling, self.leaving, self.due = 0, False, False, 2**62

    def call(self):
        self.calling = True
        first, count = self.calls % self.size, 2 + self.calls % 3
        members = [(first + i) % self.size for i in range(count)]
        if self.rank in members:
            weights = [(self.calls + member) % 4 / 3 for member in members]
            self.port.reduce(Group(self.calls, members, weights))
        self.port.return_model()

    def returned(self):
        self.calling = False
        self.calls += 1

    def leave(self):
        self.leaving = True

    def is_quiet(self):
        return not self.calling

    def ignore(self, *event):
        pass

    waits_for = begin = passed = arrived = reduced = overdue = pause = resume = restart = ignore


class RotatingAverage(FormedGroupCollective):
    """Averages in these groups."""

    def __init__(self, comm, like, **options):
        def plan():
            return {}, lambda *rank: ScriptedGroupProtocol(*rank, Rotating)

        super().__init__(comm, like, plan, **options)


def trained(comm, name):
    """Train; yield the model after each step, some averages, and the result of the last step."""
    kind, settings = METHODS[name]
    model = make_model(comm.rank)
    weighed = kind in (optim.WAGMA, optim.LocalSGD)
    optimizer = momentum_sgd(model.parameters())
    with kind(model, optimizer, comm=comm, **settings) as averager:
        for step in range(STEPS):
            compute(comm)
            backward(model, comm.rank, step)
            averager.weight = 1 + (comm.rank + step) % 3 / 2 if weighed else 1
            optimizer.step()
            yield list(model.state_dict().values())
            if step % 7 == 6:
                with averager.averaged():
                    yield list(model.state_dict().values())
        yield averager.result
        averager.synchronize()
        yield list(model.state_dict().values())


def called(comm, kind, size, **options):
    """Call with vectors of several dtypes, and changes of which some are not finite."""
    generator = np.random.default_rng(comm.rank)
    vector = [np.zeros(size // np.dtype(dtype).itemsize + 1, dtype) for dtype in KINDS]
    with kind(comm, vector, **options) as collective:
        for t in range(STEPS):
            compute(comm)
            for array in vector:
                array += generator.normal(size=array.size).astype(array.dtype)
            if t % 6 == comm.rank:
                vector[1][t] = np.nan
            weight = {"weight": t % 3 * comm.rank / 2} if kind is TriggeredAverage else {}
            yield collective(vector, **weight), vector
            if not np.isfinite(vector[1][t]):
                vector[1][t] = t
        yield collective.statistics().left_out
        collective.average(vector)
        yield vector


@pytest.mark.transports("shared")
@pytest.mark.parametrize("name", METHODS)
def test_a_simulated_training_has_the_bits_of_a_real_one(comm, name):
    real, simulated = real_and_simulated(comm, trained, name, steps=STEPS)
    assert simulated == real


@pytest.mark.parametrize("size", SIZES)
def test_simulated_groups_have_the_bits_of_real_ones(comm, size):
    real, simulated = real_and_simulated(comm, called, RotatingAverage, size, steps=STEPS)
    assert simulated == real


@pytest.mark.transports("messages")
@pytest.mark.parametrize("options", ({}, {"weights": "work"}, {"wire_dtype": "float16"}))
@pytest.mark.parametrize("size", SIZES)
def test_simulated_averages_of_all_have_the_bits_of_real_ones(comm, size, options):
    real, simulated = real_and_simulated(
        comm, called, TriggeredAverage, size, steps=STEPS, sync_period=1, **options
    )
    assert simulated == real


@pytest.mark.transports("messages")
@pytest.mark.parametrize("kind", (RotatingAverage, TriggeredAverage))
def test_another_order_of_additions_is_noticed(comm, kind):
    """Simulated ranks average as if they shared memory: rounding tells."""

    def play(comm):
        options = {"sync_period": 1} if kind is TriggeredAverage else {}
        if isinstance(comm, Communicator):
            os.environ["WAGMA_TRANSPORT"] = "shared"
        yield from called(comm, kind, SHORT, **options)

    real, simulated = real_and_simulated(comm, play, steps=STEPS)
    assert comm.rank > 0 or all(one != other for one, other in zip(real, simulated))
