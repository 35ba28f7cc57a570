"""A CUDA-aware MPI on the stand-in for the driver (make test-cuda-mpi); skipped on any other."""

import numpy as np
import pytest
import stand_in
from mpi4py import MPI

from collectives import cuda_aware
from collectives.cuda_aware import Answer
from collectives.memory import probe
from wagma import info

pytestmark = [pytest.mark.mpi, pytest.mark.transports()]

if not stand_in.is_mpi_s_driver():
    pytest.skip("the stand-in is not MPI's driver: make test-cuda-mpi", allow_module_level=True)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.delenv("WAGMA_CUDA_AWARE", raising=False)


@pytest.fixture(params=["job", "pairs"])
def ranks(request, comm):
    """All ranks, or two of them each."""
    part = comm.Split(comm.rank // 2 if request.param == "pairs" else 0)
    yield part
    part.Free()


@pytest.mark.parametrize("size", probe.SIZES)
@pytest.mark.parametrize("shift", [1, -1])
def test_device_memory_goes_to_another_rank(ranks, device, size, shift):
    stream = device.create_stream()
    values = [np.random.default_rng(rank).random(size // 8) for rank in range(ranks.size)]
    sent = device.array(values[ranks.rank], stream)
    received = device.array(np.zeros(size // 8), stream)
    device.synchronize(stream)
    buffers = [
        [MPI.buffer.fromaddress(array.address, size), MPI.BYTE] for array in (sent, received)
    ]
    source = (ranks.rank - shift) % ranks.size
    target = (ranks.rank + shift) % ranks.size
    MPI.Request.Waitall([ranks.Isend(buffers[0], target), ranks.Irecv(buffers[1], source)])
    np.testing.assert_array_equal(received.get(), values[source])
    np.testing.assert_array_equal(sent.get(), values[ranks.rank])


@pytest.mark.parametrize("size", probe.SIZES)
def test_device_memory_goes_to_the_host_s_and_back(ranks, device, size):
    values = np.arange(size // 8) * (ranks.rank + 1.0)
    array = device.array(values)
    device.synchronize()
    memory = [MPI.buffer.fromaddress(array.address, size), MPI.BYTE]
    last, first = ranks.size - 1, 0
    if ranks.rank == first:
        ranks.Send(memory, last)
        ranks.Recv(memory, last)
        np.testing.assert_array_equal(array.get(), np.arange(size // 8) * -1.0)
    elif ranks.rank == last:
        found = np.empty(size // 8)
        ranks.Recv(found, first)
        np.testing.assert_array_equal(found, np.arange(size // 8))
        ranks.Send(-found, first)


def test_it_is_aware_but_waits_for_the_default_stream(ranks, device, monkeypatch):
    assert cuda_aware.query() is None
    assert cuda_aware.try_alone(0) is None
    monkeypatch.setattr(cuda_aware, "HOLDS", (0.05, 0.3))
    assert cuda_aware.ask(ranks) == Answer(False, cuda_aware.WAITS)
    assert info.cuda_awareness(ranks) == f"no: {cuda_aware.WAITS}"


def test_beside_work_on_another_stream_it_is_aware(ranks, device, monkeypatch):
    monkeypatch.setattr(probe, "DEFAULT_STREAM", device.create_stream())
    answer, reason = cuda_aware.ask(ranks)
    assert answer, reason
