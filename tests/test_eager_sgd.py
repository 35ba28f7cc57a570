"""EagerSGD beside the mathematics: every gradient is in every rank's model once."""

import time

import numpy as np
import pytest
import torch
from together import same_everywhere
from torch import nn

from wagma.optim import EagerSGD

pytestmark = pytest.mark.mpi


class Run:
    """A model whose gradients are given, and what they come to: SGD with a rate of 1."""

    def __init__(self, comm, trigger, sync_period):
        self.comm = comm
        self.model = nn.Linear(3, 2).double()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.local = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.averager = EagerSGD(
            self.model, self.local, comm=comm, trigger=trigger, sync_period=sync_period
        )
        self.generator = np.random.default_rng(comm.rank)
        self.put_in = np.zeros(8)

    def step(self, weight=1.0):
        time.sleep(self.generator.random() * 0.004 + 0.004 * (self.comm.rank == 1))
        gradient = self.generator.integers(-100, 100, 8).astype(float)
        self.put_in += weight * gradient
        parts = torch.from_numpy(gradient).split([6, 2])
        for parameter, part in zip(self.model.parameters(), parts):
            parameter.grad = part.reshape(parameter.shape).clone()
        self.averager.weight = weight
        self.local.step()

    @property
    def parameters(self):
        return torch.cat([value.detach().flatten() for value in self.model.parameters()]).numpy()

    def check(self):
        expected = -self.comm.allreduce(self.put_in) / self.comm.size
        np.testing.assert_allclose(self.parameters, expected, rtol=1e-12, atol=1e-9)
        assert same_everywhere(self.comm, self.parameters.tobytes())


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize("trigger", ("solo", "majority"))
def test_after_each_period_every_gradient_has_been_taken_once_everywhere(comm, trigger):
    run = Run(comm, trigger, sync_period=5)
    with run.averager:
        for step in range(15):
            run.step(weight=2.0 if comm.rank == 0 else 0.5)
            assert run.averager.result.synchronized == (step % 5 == 4)
            if step % 5 == 4:
                run.check()
            if step == 7:
                with run.averager.averaged():
                    assert same_everywhere(comm, run.parameters.tobytes())
    assert run.averager.settings == {"trigger": trigger, "sync_period": 5}


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("trigger", ("solo", "majority"))
def test_ranks_that_make_fewer_steps_end_with_the_model_of_the_others(comm, trigger):
    run = Run(comm, trigger, sync_period=100)
    with run.averager:
        with run.averager.join():
            for _ in range(3 * comm.rank):
                run.step()
        assert run.averager.collective.version == 3 * (comm.size - 1)
        run.check()
