"""Device memory that ranks of a node map: when they do, and that nobody is needed for it."""

import signal

import numpy as np
import pytest
import stand_in
from devices import CASES
from launch import Signal
from together import NEVER, compute_until, same_everywhere, wait_until

from collectives import CudaError, GroupAllreduce, TriggeredAverage, cuda_ipc, process
from collectives.memory import device_memory
from collectives.node import Node

mpi = pytest.mark.mpi
shared = pytest.mark.transports("shared")


# Whether they do


@mpi
@shared
@pytest.mark.parametrize("wrong", ["variable", "bytes", "error", "kernel", None])
def test_memory_is_mapped_where_all_ranks_find_the_others_bytes(comm, direct, monkeypatch, wrong):
    if comm.rank == 1 and wrong == "variable":
        monkeypatch.setenv(cuda_ipc.VARIABLE, "0")
    if comm.rank == 1 and wrong == "bytes":
        monkeypatch.setattr(cuda_ipc, "_content", lambda rank: bytes(cuda_ipc.SIZE))
    if comm.rank == 1 and wrong == "error":

        def fail(*_):
            raise CudaError("cuIpcOpenMemHandle returned CUDA_ERROR_INVALID_CONTEXT")

        monkeypatch.setattr(device_memory, "holds", fail)
    if comm.rank == 1 and wrong == "kernel":
        monkeypatch.setattr(device_memory, "write_by_kernel", lambda *_: None)
    why_not = cuda_ipc.why_not(comm, 0)
    words = {
        "variable": "WAGMA_CUDA_IPC is 0",
        "bytes": "different content",
        "kernel": "what a kernel of another process has written to device memory is not there",
        "error": "cuIpcOpenMemHandle returned CUDA_ERROR_INVALID_CONTEXT",
    }
    assert same_everywhere(comm, why_not)
    assert why_not is None if wrong is None else words[wrong] in why_not


@mpi
@shared
@pytest.mark.parametrize("case", ["group", "triggered", "ready"])
def test_where_memory_can_then_not_be_mapped_vectors_are_staged(
    comm, direct, stream, monkeypatch, case
):
    share = Node.share

    def fails_on_devices(node, memory):
        failure = share(node, memory)
        on_devices = memory.handles[0][1] is not None
        if on_devices and failure is None:
            memory.unmap()
            comm.Barrier()
        return "no more" if on_devices and comm.rank else failure

    monkeypatch.setattr(Node, "share", fails_on_devices)
    vector = direct.array(np.full(1000, float(comm.rank)), stream)
    before = direct.counts().device_bytes
    with CASES[case].make(comm, vector) as collective:
        assert (collective.path, collective.transport) == ("staged", "shared")
        assert "no more" in collective.path_reason
        assert direct.counts().device_bytes == before
        collective.synchronize(vector)
        np.testing.assert_allclose(vector.get(), (comm.size - 1) / 2)


@mpi
@shared
@pytest.mark.parametrize("kind", [GroupAllreduce, TriggeredAverage])
def test_a_device_without_memory_is_one_error_on_all_ranks(comm, direct, monkeypatch, kind):
    class Fails:
        def __init__(self, **_):
            raise CudaError("cuMemAlloc returned CUDA_ERROR_OUT_OF_MEMORY")

    name = "GroupVersions" if kind is GroupAllreduce else "TriggeredAverages"
    if comm.rank == 1:
        monkeypatch.setattr(process.native(), name, Fails)
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        kind(comm, direct.array(np.zeros(100)))


@mpi
@shared
@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", [GroupAllreduce, TriggeredAverage])
def test_ranks_with_two_devices_average_on_both(comm, direct, kind):
    device = stand_in.Device(comm.rank % 2)
    stream = device.create_stream()
    vector = device.array(np.full(100_000, float(comm.rank)), stream)
    with kind(comm, vector, sync_period=1) as average:
        assert (average.path, average.transport) == ("direct", "shared")
        for _ in range(3):
            average(vector, stream=stream)
    assert set(vector.get()) == {1.5}
    device.reset()


# Averages over all ranks that publish nothing go by way of it, too


@mpi
@shared
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("kind", [GroupAllreduce, TriggeredAverage])
def test_average_has_the_host_s_bits_where_a_rank_has_joined(comm, direct, stream, kind):
    values = np.random.default_rng(comm.rank).normal(size=5000)

    def run(vector, write, read):
        got = []
        settings = {"wait": "group", "sync_period": NEVER}
        if kind is TriggeredAverage:
            settings = {"sync_period": 1}
        with kind(comm, vector, **settings) as average:
            for t in range(2 + (comm.rank != 1)):
                write(vector, values * (t + 1))
                average(vector)
            if comm.rank != 1:
                average.average(vector)
                got.append(read(vector).tobytes())
            average.join(vector)
            got.append(read(vector).tobytes())
        return got

    array = direct.array(values, stream)
    on_device = run(array, lambda to, x: direct.write(to, x, stream), lambda x: x.get())
    assert on_device == run(values.copy(), np.copyto, np.copy)


@mpi
@shared
@pytest.mark.ranks(3, 4)
def test_snapshots_are_averaged_after_an_average_that_published_nothing(comm, direct, stream):
    vector = direct.array(np.full(1000, float(comm.rank)), stream)
    other = direct.array(np.full(1000, 100.0), stream)
    with GroupAllreduce(comm, vector, group_size=comm.size, sync_period=NEVER) as average:
        average.publish(vector)
        average.average(other)
        np.testing.assert_allclose(other.get(), 100, rtol=1e-15)
        if comm.rank == 0:
            average(vector)
        compute_until(comm, comm.rank == 0)
        mean = comm.bcast(vector.get())
        np.testing.assert_allclose(mean, (comm.size - 1) / 2, rtol=1e-15)


# Who is needed


@mpi
@shared
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("late", ["conserving", "paper"])
def test_without_an_engine_a_rank_that_computes_hinders_nobody(comm, direct, stream, late):
    vector = direct.array(np.full(1000, float(comm.rank)), stream)
    computes = comm.rank == comm.size - 1
    calls = 20
    with GroupAllreduce(
        comm, vector, group_size=2, sync_period=NEVER, late=late, engine="none"
    ) as average:
        assert average.path == "direct"
        for _ in range(0 if computes else calls):
            call = average.start(vector)
            wait_until(call.test)
        compute_until(comm, not computes)
        assert average.executed == calls
        if computes:
            assert average.statistics().passive == calls


@mpi
@shared
@pytest.mark.parametrize("given", ["nothing", "a call"])
def test_a_rank_is_averaged_while_its_driver_returns_from_no_call(comm, direct, stream, given):
    """Other devices average for it, also if it has started a call."""
    direct.require_stand_in()
    if stand_in.is_mpi_s_driver():
        pytest.skip("MPI calls it for every message")
    vector = direct.array(np.full(1000, float(comm.rank)), stream)
    versions = 4
    with GroupAllreduce(comm, vector, group_size=comm.size, sync_period=NEVER) as average:
        assert average.path == "direct"
        average.publish(vector)
        direct.synchronize(stream)
        comm.Barrier()
        if comm.rank == 1:
            direct.hold(stream)
            call = average.start(vector) if given == "a call" else None
            with direct.holding_calls():
                compute_until(comm, False)
            direct.open()
            for _ in range(versions - (call is not None)):
                average(vector)
        else:
            for _ in range(versions):
                assert 1 in average(vector).group
            compute_until(comm, True)
        average.synchronize(vector)
        assert same_everywhere(comm, vector.get().tobytes())


JOB = """
import os
import sys
import time

import numpy as np
import psutil

sys.path.insert(0, {tests!r})
import stand_in
from mpi4py import MPI

from collectives import GroupAllreduce

comm = MPI.COMM_WORLD
device = stand_in.Device()
stream = device.create_stream()
vector = device.array(np.full(300_000, float(comm.rank), np.float32), stream)
calls = 10
with GroupAllreduce(comm, vector, group_size=3, sync_period=10**9) as average:
    assert (average.path, average.transport) == ("direct", "shared"), average.path_reason
    pids = comm.allgather(os.getpid())
    if comm.rank == 2:
        print("computing", flush=True)
    else:
        while psutil.Process(pids[2]).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        for _ in range(calls):
            assert 2 in average(vector).group
        print("called", flush=True)
    comm.barrier()
    if comm.rank == 2:
        for _ in range(calls):
            average(vector)
    average.synchronize(vector)
    np.testing.assert_allclose(vector.get(), 1, rtol=1e-6)
"""


@pytest.mark.launch
def test_the_vector_of_a_stopped_process_is_averaged_by_the_others(mpirun_text):
    env = {"WAGMA_CUDA_LIBRARY": stand_in.require(), "STAND_IN_IPC": "1", "STAND_IN_DELAY": "300"}
    text = JOB.format(tests=str(stand_in.SOURCES.parent))
    stop = Signal(signal.SIGSTOP, "computing", 2)
    go_on = Signal(signal.SIGCONT, "called", 2)
    mpirun_text(3, text, "", env=env, signals=[stop, go_on]).check()
