"""Ranks in simulated time have the bits of real ones, where those repeat."""

import numpy as np
import pytest
from methods import backward, make_model, momentum_sgd
from trainings import compute, real_and_simulated

from collectives import NeighborAverage, PushSum, QueuedNeighborAverage, graphs
from wagma import optim
from wagma.simulation.ranks import Communicator

STEPS = 20
METHODS = {
    "d-psgd": (optim.DPSGD, {}),
    "d-psgd, global": (optim.DPSGD, {"clock": "global"}),
    "sgp": (optim.SGP, {}),
    "hop": (optim.Hop, {}),
    "hop, serial": (optim.Hop, {"order": "serial"}),
    "hop, notify-ack": (optim.Hop, {"mode": "notify-ack"}),
}
COLLECTIVES = (NeighborAverage, PushSum, QueuedNeighborAverage)

pytestmark = [pytest.mark.mpi, pytest.mark.transports(), pytest.mark.ranks(4)]


def trained(comm, name):
    """Train; yield the model after each step, some averages, and the last step's result."""
    kind, settings = METHODS[name]
    model = make_model(comm.rank)
    optimizer = momentum_sgd(model.parameters())
    with kind(model, optimizer, comm=comm, **settings) as averager:
        for step in range(STEPS):
            compute(comm)
            backward(model, comm.rank, step)
            optimizer.step()
            yield list(model.state_dict().values())
            if step % 7 == 6:
                with averager.averaged():
                    yield list(model.state_dict().values())
        yield averager.result
        averager.synchronize()
        yield list(model.state_dict().values())


def called(comm, kind):
    """Call with vectors of several dtypes, and changes of which some are not finite."""
    generator = np.random.default_rng(comm.rank)
    vector = [generator.normal(size=50).astype(dtype) for dtype in ("float16", "float64")]
    with kind(comm, vector, transport="messages") as peers:  # which bytes are counted of
        for t in range(STEPS):
            compute(comm)
            for array in vector:
                array += generator.normal(size=array.size).astype(array.dtype)
            if t % 6 == comm.rank:
                vector[1][t] = np.nan
            yield peers(vector), vector
        yield peers.statistics().left_out, peers.native.mailbox.bytes_sent
        peers.average(vector)
        yield vector


@pytest.mark.parametrize("name", METHODS)
def test_a_simulated_training_has_the_bits_of_a_real_one(comm, name):
    real, simulated = real_and_simulated(comm, trained, name, steps=STEPS, one_node=False)
    assert simulated == real


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_simulated_calls_have_the_bits_of_real_ones(comm, kind):
    real, simulated = real_and_simulated(comm, called, kind, steps=STEPS, one_node=False)
    assert simulated == real


def test_another_order_of_additions_is_noticed(comm, monkeypatch):
    """Simulated ranks add their neighbors' models in another order: rounding tells."""
    sources = graphs.sources

    def play(comm):
        if isinstance(comm, Communicator):
            monkeypatch.setattr(graphs, "sources", lambda *given: sources(*given)[::-1])
        yield from trained(comm, "d-psgd")

    real, simulated = real_and_simulated(comm, play, steps=STEPS, one_node=False)
    assert comm.rank > 0 or all(one != other for one, other in zip(real, simulated))
