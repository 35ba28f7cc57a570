"""PartialReduce on several ranks, whose groups are smaller than the job."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from methods import backward, bits, checkpoint, floats, make_model, momentum_sgd, restore
from together import same_everywhere, wait_until

from wagma.optim import PartialReduce

pytestmark = pytest.mark.mpi


def make(comm, seed=0, **settings):
    model = make_model(seed)
    chosen = {"group_size": min(2, max(comm.size, 2)), **settings}
    optimizer = momentum_sgd(model.parameters())
    return model, optimizer, PartialReduce(model, optimizer, comm=comm, **chosen)


def train(comm, model, optimizer, steps):
    for step in steps:
        time.sleep(0.002 * np.random.default_rng((comm.rank, step)).random())
        backward(model, comm.rank, step)
        optimizer.step()


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("weights", ["constant", "dynamic"])
def test_ranks_with_any_numbers_of_steps_join(comm, weights):
    """Whoever is left over by the others' groups goes on."""
    model, optimizer, averager = make(comm, comm.rank, weights=weights)
    with averager:
        for epoch in range(3):
            steps = [3, 9, 4, 6][(comm.rank + epoch) % comm.size]
            with averager.join():
                train(comm, model, optimizer, range(steps))
            most = max([3, 9, 4, 6][: comm.size])
            assert averager.collective.version == most * (epoch + 1)
            assert same_everywhere(comm, bits(model.parameters()))
        report = averager.report()
        assert (report["rho"] is not None) == (
            comm.rank == 0 and comm.size > 1 and weights == "constant"
        )
        assert "initial_share_of_rank" not in report
    assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.ranks(3, 4)
def test_the_average_of_all_lets_go_on_who_is_left_over(comm):
    model, optimizer, averager = make(comm, comm.rank)
    with averager:
        train(comm, model, optimizer, range(7))
        with averager.averaged():
            averaged = floats(model)
            assert same_everywhere(comm, averaged.tobytes())
        train(comm, model, optimizer, range(7, 10))
        with averager.averaged():
            pass
        expected = np.mean(comm.allgather(floats(model)), axis=0)
        with averager.averaged():
            np.testing.assert_allclose(floats(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(3, 4)
def test_training_goes_on_from_its_state(comm):
    model, optimizer, averager = make(comm, comm.rank, weights="dynamic")
    with averager:
        train(comm, model, optimizer, range(5))
        saved = checkpoint(model, optimizer, averager)
    model, optimizer, averager = make(comm, 17, weights="dynamic")
    with averager:
        restore(saved, model, optimizer, averager)
        assert averager.collective.version == 5
        with averager.join():
            train(comm, model, optimizer, range(5, 8 + comm.rank))
        assert averager.collective.version == 7 + comm.size
        assert same_everywhere(comm, bits(model.parameters()))


@pytest.mark.ranks(3, 4)
def test_with_the_initial_model_a_rank_says_how_much_of_it_was_mixed_in(comm):
    """One rank is far behind in its groups."""
    model, optimizer, averager = make(comm, weights="dynamic", missing="initial")
    with averager:
        with averager.join():
            if comm.rank == 1:
                wait_until(lambda: comm.iprobe(source=0))
                comm.recv(source=0)
            for step in range(3 if comm.rank == 1 else 30):
                train(comm, model, optimizer, [step])
                if comm.rank == 0 and step == 9:
                    comm.send(None, dest=1)
                    comm.recv(source=1)
                if comm.rank == 1 and step == 0:
                    comm.send(None, dest=0)
            share = averager.report()["initial_share_of_rank"]
        assert 0 <= share < 0.5
        assert max(comm.allgather(share)) > 0


@pytest.mark.ranks(4)
def test_its_settings_are_said_as_they_were_chosen(comm):
    model, _optimizer, averager = make(comm, group_size=None)
    with averager:
        assert averager.settings == {
            "group_size": 3,
            "weights": "constant",
            "alpha": 0.5,
            "missing": "nearest",
            "history": 6,
            "sync_every": 1,
            "controller_rank": 0,
            "controller_only": False,
        }
        with pytest.raises(ValueError, match="weight is 2, but all ranks have the same weight"):
            averager.step(weight=2)
    with pytest.raises(ValueError, match="group_size is 1, not between 2 and 4"):
        make(comm, group_size=1)
    torch.testing.assert_close(model[0].weight, make_model()[0].weight)
