"""Averagers put what they average into windows, without a word from the user."""

from __future__ import annotations

import gc

import pytest
import torch

from collectives.exchange.shared import slots
from collectives.memory import windows
from wagma import optim

pytestmark = [pytest.mark.mpi, pytest.mark.transports()]

METHODS = {
    "WAGMA": (optim.WAGMA, {"sync_period": 4}),
    "WAGMA-state": (
        optim.WAGMA,
        {"sync_period": 4, "average_state": True, "correction": "control-variates"},
    ),
    "LocalSGD": (optim.LocalSGD, {"sync_period": 2}),
    "Allreduce": (optim.Allreduce, {}),
    "EagerSGD": (optim.EagerSGD, {}),
}


def train(comm, method, transport):
    torch.manual_seed(comm.rank)
    model = torch.nn.Sequential(torch.nn.Linear(50, 70), torch.nn.BatchNorm1d(70))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    kind, settings = METHODS[method]
    with kind(model, optimizer, comm=comm, transport=transport, **settings) as averager:
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(20, 50)).square().mean().backward()
            optimizer.step()
        in_place = averager.collective.statistics().in_place
    return comm.allreduce(in_place), model  # one rank may be late in every call


@pytest.fixture
def without_slots():
    """Let short vectors be averaged in windows, as long ones are."""
    slots.set_longest(-1, -1)
    yield
    slots.set_longest()


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_averaged_is_in_windows(comm, without_slots, method):
    """The tensors have memory of their own once the averager is closed."""
    in_place, model = train(comm, method, "shared")
    assert in_place > 0
    gc.collect()
    assert not any(windows.has(value.data_ptr()) for value in model.state_dict().values())
    in_place, model = train(comm, method, "messages")
    assert in_place == 0


@pytest.mark.ranks(4)
def test_one_rank_may_send_messages_by_mistake(comm):
    """Ranks differ in an option: they raise alike, and none waits for windows."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    transport = "messages" if comm.rank == 1 else "shared"
    with pytest.raises(ValueError, match="transport"):
        optim.WAGMA(model, optimizer, comm=comm, transport=transport)
    gc.collect()
    assert not windows.has(model.weight.data_ptr())
