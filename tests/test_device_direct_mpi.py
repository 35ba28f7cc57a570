"""Vectors that devices average themselves: sent by MPI, or where ranks map each other's memory."""

import gc
import threading

import numpy as np
import pytest
import stand_in
from devices import CASES, Case, vectors_of
from stand_in import ILLEGAL_ADDRESS
from test_device_errors_mpi import (
    close_after_failure,
    hear_that_rank_1_failed,
)
from test_device_mpi import LONG, STARTED, check_bits, counts_around, settled_counts
from together import compute_until, interrupted

import collectives
from collectives import CudaError, GroupAllreduce
from collectives.node import Node

pytestmark = pytest.mark.mpi


def make(case):
    """Return the case with a check that its vectors are averaged on devices.

    On hosts they are in shared memory: short ones are rounded once there, too, unless they are
    rounded to travel.
    """

    def kind(comm, like, **options):
        on_device = not isinstance(like[0] if isinstance(like, list) else like, np.ndarray)
        if not on_device and "wire_dtype" not in options:
            options["transport"] = "shared"
        collective = case.kind(comm, like, **options)
        assert collective.path == ("direct" if on_device else "host"), collective.path_reason
        return collective

    return Case(kind, case.options)


@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("case", ["group", "triggered"])
def test_short_vectors_get_the_bits_of_the_host_in_all_dtypes(comm, direct, stream, case):
    dtypes = ["float16", "bfloat16", "float32", "float64"]
    arrays = vectors_of(0, comm.size, [5001, 3, 2048, 70], dtypes)
    check_bits(comm, make(CASES[case]), arrays, direct, stream)


@pytest.mark.parametrize("case", [*LONG, "ready", "generated"])
def test_long_vectors_get_the_bits_of_the_host(comm, direct, stream, case):
    arrays = vectors_of(0, comm.size, [150_000, 30_000, 60_000], ["float32", "float16", "float64"])
    check_bits(comm, make((CASES | LONG)[case]), arrays, direct, stream)


@pytest.mark.parametrize("case", ["ready, dynamic", "neighbors", "partial"])
def test_what_averages_on_the_host_says_so(comm, direct, stream, case):
    vector = direct.array(np.zeros(100), stream)
    with CASES[case].make(comm, vector) as collective:
        collective(vector)
        if case != "partial":
            assert collective.path == "staged"
            assert collective.path_reason.endswith("averages on the host")


@pytest.mark.transports("messages")
def test_where_device_memory_cannot_be_mapped_the_host_s_is_shared(comm, direct, stream):
    vector = direct.array(np.zeros(100), stream)
    with GroupAllreduce(comm, vector, transport="shared") as average:
        assert (average.path, average.transport) == ("staged", "shared")
        assert "cuIpcGetMemHandle returned CUDA_ERROR_NOT_SUPPORTED" in average.path_reason


@pytest.mark.parametrize("case", ["group", "triggered", "ready"])
def test_a_step_waits_in_no_function_of_the_driver_and_takes_no_host_memory(
    comm, direct, stream, transport, case
):
    size = 2**21
    ring = 2 * size if case == "group" else size  # of longer vectors at most 10 MiB
    messages = 6 * comm.size * (2**18 + 64)
    blocks = 2**16 + (ring if transport == "shared" else messages)
    copies, exchanges = {"group": (3, 1), "triggered": (1, 1), "ready": (2, 2)}[case]
    vector = direct.array(np.full(size // 4, float(comm.rank), np.float32), stream)
    before = settled_counts(direct, stream)
    with make(CASES[case]).make(comm, vector) as collective:
        begun, ended = counts_around(2, direct, stream, collective, vector)
        collective.synchronize(vector)
        assert direct.counts().device_bytes == ended.device_bytes
        collective.average(vector)
        collective.join(vector)
        assert direct.counts().device_bytes == ended.device_bytes
    if not stand_in.is_mpi_s_driver():  # which Open MPI waits in
        assert (ended.blocking, ended.pageable) == (begun.blocking, begun.pageable)
    assert ended.pinned_bytes - before.pinned_bytes < 2**17
    assert ended.device_bytes == begun.device_bytes
    assert ended.device_bytes - before.device_bytes <= copies * size + exchanges * blocks
    del collective
    gc.collect()
    after = direct.counts()
    assert (after.device_bytes, after.pinned_bytes) == (before.device_bytes, before.pinned_bytes)


@pytest.mark.parametrize(
    "case, copies, exchanges", [("group", 3, 1), ("triggered", 1, 1), ("ready", 2, 2)]
)
def test_a_long_vector_takes_so_many_times_its_size_on_the_device(
    comm, direct, stream, transport, case, copies, exchanges, monkeypatch
):
    monkeypatch.setattr(collectives.device, "BLOCK", 2**22)
    size = 2**25
    blocks = 10 * 2**20 if transport == "shared" else 6 * comm.size * (2**18 + 64)
    vector = direct.array(np.zeros(size // 4, np.float32), stream)
    before = settled_counts(direct, stream)

    def taken():
        return direct.counts().device_bytes - before.device_bytes

    with make(CASES[case]).make(comm, vector):
        most = 2**16 + copies * size + exchanges * blocks
        assert copies * size <= taken() <= most


def test_a_rank_whose_stream_and_main_thread_are_busy_holds_nobody_up(comm, direct):
    stream = direct.create_stream()
    vector = direct.array(np.full(10_000, float(comm.rank)), stream)
    versions = 6
    with GroupAllreduce(comm, vector, group_size=comm.size, sync_period=100) as average:
        assert average.path == "direct"
        average.publish(vector)
        comm.Barrier()
        if comm.rank == 1:
            direct.hold(stream)
            call = average.start(vector)
            compute_until(comm, False)
            assert not call.test()
            direct.open()
            result = call.wait()
            assert not result.timely and result.source >= versions - 1
            for _ in range(versions - 1):
                average(vector)
        else:
            for _ in range(versions):
                assert 1 in average(vector).group
            compute_until(comm, True)
        average.synchronize(vector)
        assert comm.allgather(vector.get()[0]) == [vector.get()[0]] * comm.size


@pytest.mark.parametrize("wait", ["nobody", "group"])
def test_what_is_queued_next_comes_after_what_the_collective_queued(comm, direct, stream, wait):
    """The stand-in ends the job where nothing orders them."""
    values = np.full(5000, float(comm.rank))
    vector = direct.array(values, stream)
    with GroupAllreduce(comm, vector, wait=wait) as average:
        assert average.path == "direct"
        direct.write(vector, values, stream)
        average.publish(vector)
        direct.write(vector, values, stream)
        average(vector)
        direct.write(vector, values, stream)
        average.average(vector)
        direct.write(vector, values, stream)
        average.load(vector, 7)
        direct.write(vector, values, stream)
        average.join(vector)
        direct.write(vector, values, stream)


@pytest.mark.parametrize("kind", STARTED)
def test_a_vector_that_is_not_finite_counts_nowhere(comm, direct, stream, kind):
    values = np.full(5000, float(comm.rank), np.float32)
    if comm.rank == 1:
        values[-1] = np.nan
    vector = direct.array(np.zeros(5000, np.float32), stream)
    with STARTED[kind](comm, vector) as average:
        direct.write(vector, values, stream)
        assert average(vector).timely == (comm.rank != 1)
        np.testing.assert_allclose(vector.get(), (0 + 2 + 3) / 3, rtol=1e-6)
        assert average.statistics().left_out == (comm.rank == 1)


def test_an_exception_while_the_device_is_behind_leaves_a_call_to_be_made(comm, direct):
    stream = direct.create_stream()
    vector = direct.array(np.full(5000, 1.0 + comm.rank), stream)
    with GroupAllreduce(comm, vector, group_size=comm.size, wait="group") as average:
        with direct.holding(stream):
            with interrupted():
                average(vector)
            assert average.version == 0
            direct.write(vector, np.full(5000, 2.0 + comm.rank), stream)
        assert average(vector).version == 0
        np.testing.assert_array_equal(vector.get(), 2.0 + (comm.size - 1) / 2)


def test_an_exception_in_the_middle_loses_nothing(comm, direct, stream):
    """Rank 1 is interrupted while it waits for the others, and adds to what it is left with."""
    vector = direct.array(np.full(2**18, float(comm.rank), np.float32), stream)
    with GroupAllreduce(comm, vector, sync_period=1) as average:
        average.synchronize(vector)
        direct.write(vector, np.full(2**18, 4.0 * comm.rank, np.float32), stream)
        if comm.rank == 1:
            with interrupted():
                average(vector)
            left = vector.get()
            assert set(left) == {4.0}
            comm.Barrier()
            direct.write(vector, left + np.float32(8), stream)
        else:
            comm.Barrier()
            average(vector)
        average.synchronize(vector)
        np.testing.assert_array_equal(vector.get(), (comm.size - 1) * 2 + 8 / comm.size)


@pytest.mark.parametrize("how", ["call", "start"])
def test_a_device_that_fails_is_named_everywhere_and_nobody_hangs(comm, direct, how):
    stream = direct.create_stream()
    vector = direct.array(np.zeros(5000), stream)
    direct.synchronize(stream)
    average = GroupAllreduce(comm, vector, group_size=comm.size, wait="group")
    if comm.rank == 1:
        with direct.holding(stream):
            breaks = threading.Timer(0.1, direct.fail, [ILLEGAL_ADDRESS])
            breaks.start()
            with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                average.start(vector).wait() if how == "start" else average(vector)
            breaks.join()
    else:
        hear_that_rank_1_failed(average, vector)
    close_after_failure(comm, direct, average)


@pytest.mark.parametrize("case", ["not finite", "joined", "interrupted"])
def test_averages_that_do_not_read_the_vector_itself_get_the_bits_of_the_host(
    comm, direct, stream, case
):
    """Rank 1's part in average() is nothing, its snapshot, or what an exception has left."""

    def average_of(vector, write):
        with GroupAllreduce(comm, vector, wait="group") as average:
            average(vector)
            if comm.rank == 1 and case == "joined":
                average.join(vector)
                return np.zeros(5000)
            finite = (comm.rank, case) != (1, "not finite")
            write(np.full(5000, float(comm.rank) if finite else np.nan))
            if comm.rank == 1 and case == "interrupted":
                with interrupted():
                    average.average(vector)
                comm.Barrier()
                write(np.full(5000, 7.0))
                assert average.version == 1
            else:
                if case == "interrupted":
                    comm.Barrier()
                average.average(vector)
            copy = vector.get() if hasattr(vector, "get") else vector.copy()
            average.join(vector)
        return copy

    ours, host = direct.array(np.zeros(5000), stream), np.zeros(5000)
    on_device = average_of(ours, lambda values: direct.write(ours, values, stream))
    on_host = average_of(host, lambda values: np.copyto(host, values))
    np.testing.assert_array_equal(on_device, on_host)
    missing = {"not finite": None, "joined": 0, "interrupted": 1}[case]
    shares = [rank for rank in range(comm.size) if rank != 1] + [missing] * (missing is not None)
    if comm.rank != 1:
        np.testing.assert_allclose(on_host, sum(shares) / len(shares))


def test_memory_that_is_not_there_is_one_error_on_all_ranks(comm, direct, stream, monkeypatch):
    vector = direct.array(np.zeros(100), stream)

    def fail(copies, block):
        raise CudaError("cuMemAlloc returned CUDA_ERROR_OUT_OF_MEMORY")

    if comm.rank == 1:
        monkeypatch.setattr(collectives.device.Copies, "use_in_place", fail)
    with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        GroupAllreduce(comm, vector)


@pytest.mark.parametrize("block", [None, 2**18, 3 * 2**20])
def test_blocks_are_as_long_as_chosen_or_given(comm, direct, stream, monkeypatch, block):
    if block is None:
        monkeypatch.delenv("WAGMA_CUDA_BLOCK")
    else:
        monkeypatch.setenv("WAGMA_CUDA_BLOCK", str(block))
    length = 2**20 + 3 if block else 2**22 + 3
    vector = direct.array(np.full(length, float(comm.rank), np.float32), stream)
    with GroupAllreduce(comm, vector, wait="group", group_size=comm.size) as average:
        assert average.path == "direct"
        average(vector)
        assert set(vector.get()) == {(comm.size - 1) / 2}


class TwoNodes(Node):
    """Each pair of ranks is on a node of its own."""

    nodes = 0, 0, 1, 1

    def __init__(self, comm):
        self._comm = comm.Split(self.nodes[comm.rank], comm.rank)
        self.ranks = self._comm.allgather(comm.rank)
        self.cores_per_rank, self.processes = 0.5, {}
        self.elsewhere = "the ranks are on two nodes"


class UnequalNodes(TwoNodes):
    """One has a pair of ranks, which map each other's memory, and two have one each."""

    nodes = 0, 0, 1, 2


@pytest.mark.ranks(4)
@pytest.mark.transports("messages")
def test_ranks_of_nodes_that_share_memory_and_of_others_close(comm, direct, stream, monkeypatch):
    direct.require_stand_in()
    monkeypatch.delenv("WAGMA_TRANSPORT")
    monkeypatch.setattr("collectives.node.Node", UnequalNodes)
    vector = direct.array(np.full(1000, float(comm.rank), np.float32), stream)
    with stand_in.mapped_memory(), GroupAllreduce(comm, vector, group_size=4) as average:
        transport = "shared" if comm.rank < 2 else "messages"
        assert (average.path, average.transport) == ("direct", transport), average.path_reason
        average.synchronize(vector)
        np.testing.assert_allclose(vector.get(), 1.5, rtol=1e-6)


@pytest.mark.ranks(4)
@pytest.mark.transports("messages")
@pytest.mark.parametrize("kind", [GroupAllreduce, collectives.TriggeredAverage])
def test_memory_that_a_node_s_ranks_share_is_not_sent_to_other_nodes(
    comm, direct, stream, monkeypatch, kind
):
    """The stand-in ends the process where MPI touches memory that another one may have mapped."""
    direct.require_stand_in()
    monkeypatch.delenv("WAGMA_TRANSPORT")
    monkeypatch.setattr("collectives.node.Node", TwoNodes)
    vector = direct.array(np.full(300_000, float(comm.rank), np.float32), stream)
    with stand_in.mapped_memory(), kind(comm, vector, sync_period=3) as average:
        assert (average.path, average.transport) == ("direct", "shared"), average.path_reason
        for _ in range(7):
            average(vector)
        average.synchronize(vector)
        np.testing.assert_allclose(vector.get(), 1.5, rtol=1e-6)
