"""torch's test device: it computes as the CPU does, and sees what is not in order."""

import copy
import io
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import stand_in
import torch
import torch_device
from torch import nn

# The device may have to be compiled.
pytestmark = [pytest.mark.torch_device, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def device():
    return torch_device.require()


def trained(device, make):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 8), nn.Tanh()
    ).to(device)
    optimizer = make(model.parameters())
    inputs = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        (model(inputs) - 1).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    ],
    ids=["sgd", "adam"],
)
def test_it_trains_to_the_bits_of_the_cpu(device, make):
    expected, found = trained("cpu", make).state_dict(), trained(device, make).state_dict()
    assert all(found[name].device.type == "standin" for name in found)
    assert all(torch.equal(found[name].cpu(), expected[name]) for name in expected)


def test_state_is_copied_and_saved(device):
    state = {"a": torch.arange(5.0, device=device), "b": torch.ones(2, 3, device=device).half()}
    file = io.BytesIO()
    torch.save(copy.deepcopy(state), file)
    for place in (device, "cpu"):
        file.seek(0)
        loaded = torch.load(file, map_location=place)
        assert all(torch.equal(loaded[name].cpu(), state[name].cpu()) for name in state)


def test_reads_on_the_host_are_counted(device):
    values = torch.arange(3.0, device=device)
    before = torch_device.reads()
    total = (values * 2).sum()
    assert torch_device.reads() == before
    assert total.item() == 6
    assert values.cpu().tolist() == [0, 1, 2]
    assert torch_device.reads() == before + 2


def test_the_host_cannot_touch_a_tensor(device):
    code = """
        import ctypes, torch, torch_device
        values = torch.zeros(2000, device=torch_device.require())
        ctypes.string_at(values.data_ptr() + 4096, 1)
    """
    assert exit_status(code) == stand_in.HOST_ACCESS


def test_streams_that_nothing_orders_end_the_process(device):
    code = """
        import torch, torch_device
        device = torch_device.require()
        values, others = torch.zeros(2000, device=device), torch.ones(2000, device=device)
        values.copy_(others)
        stream = torch.Stream(device)
        {}
        with stream:
            values.copy_(others)
    """
    assert exit_status(code.format("pass")) == stand_in.DISORDER
    assert exit_status(code.format("stream.wait_stream(torch.accelerator.current_stream())")) == 0


def exit_status(code):
    """Run a program beside the tests' modules, and return how it ended."""
    head = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    done = subprocess.run([sys.executable, "-c", head + textwrap.dedent(code)], timeout=60)
    return done.returncode
