"""What goes wrong in collectives with arrays on devices, on the stand-in for the driver."""

import gc
import threading
import weakref

import numpy as np
import pytest
import stand_in
from devices import CASES
from stand_in import ILLEGAL_ADDRESS
from together import Interrupted, interrupt, interrupted, signalled, wait_until

import collectives
from collectives import CudaError, GroupAllreduce, RankFailedError

pytestmark = pytest.mark.mpi


@pytest.mark.transports("messages")
def test_ranks_with_and_without_a_device_raise_alike(comm, device, stream):
    values = np.zeros(10)
    like = device.array(values, stream) if comm.rank % 2 else values
    device.free_pinned()
    gc.collect()
    before = device.counts()
    with pytest.raises(ValueError, match=r"device differs between ranks: cpu .* cuda on ranks? 1"):
        GroupAllreduce(comm, like)
    with pytest.raises(ValueError, match="device differs"):
        collectives.PartialAllreduce(comm, like)
    gc.collect()
    assert device.counts().pinned_bytes == before.pinned_bytes


@pytest.mark.transports("messages")
@pytest.mark.parametrize("case", CASES)
def test_a_collective_takes_arrays_of_the_kind_that_it_was_made_with(comm, device, stream, case):
    values = np.zeros(10)
    on_device = device.array(values, stream)
    for like, other, words in (
        (on_device, values, "which is not on a device: the collective was made with"),
        (values, on_device, "made with numpy arrays, and takes no others"),
    ):
        with CASES[case].make(comm, like) as collective:
            if comm.rank == 0:
                with pytest.raises(TypeError, match=words):
                    collective(other)
            else:
                with pytest.raises(RankFailedError, match=f"rank 0 failed.*{words}"):
                    collective.synchronize(like)


@pytest.mark.transports("messages")
def test_all_arrays_are_on_one_device(comm, device, stream):
    other = stand_in.Device(1)
    first, second = device.array(np.zeros(8), stream), other.array(np.zeros(8))
    with pytest.raises(TypeError, match="array 1 of the vector is on device 1"):
        GroupAllreduce(comm, [first, second])
    with GroupAllreduce(comm, second) as average:
        if comm.rank == 0:
            with pytest.raises(TypeError, match="the vector is on device 0, the collective's are"):
                average(first)
        else:
            with pytest.raises(RankFailedError, match="rank 0 failed"):
                average.synchronize(second)
    other.reset()


@pytest.mark.parametrize("how", ["call", "start", "close"])
def test_a_device_that_fails_is_named_everywhere_and_nobody_hangs(comm, device, how):
    stream = device.create_stream()
    vector = device.array(np.zeros(5000), stream)
    device.synchronize(stream)
    average = GroupAllreduce(comm, vector, group_size=comm.size, wait="group")
    if comm.rank == 1:
        with device.holding(stream):
            breaks = threading.Timer(0.1, device.fail, [ILLEGAL_ADDRESS])
            call = average.start(vector) if how != "call" else None
            breaks.start()
            if how == "close":
                average.close()
            with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                call.wait() if call else average(vector)
            breaks.join()
        if how != "close":
            with pytest.raises(collectives.ClosedError, match="this rank failed"):
                average(vector)
    else:
        hear_that_rank_1_failed(average, vector)
    close_after_failure(comm, device, average)


def hear_that_rank_1_failed(average, vector):
    """Call until that ends with the error: the first call may end before, if that rank closes."""
    with pytest.raises(
        RankFailedError, match=r"rank 1 failed.*CudaError: .*CUDA_ERROR_ILLEGAL_ADDRESS"
    ):
        while True:
            average(vector)


def close_after_failure(comm, device, average):
    """Close on all ranks, and let the device work again."""
    average.close()
    comm.Barrier()
    device.fail(0)


@pytest.mark.transports("messages")
@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("group")])
def test_a_device_that_fails_ends_each_collective(comm, device, stream, case):
    vector = device.array(np.zeros(5000), stream)
    device.synchronize(stream)
    collective = CASES[case].make(comm, vector)
    if comm.rank == 1:
        device.fail(ILLEGAL_ADDRESS)
        with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            collective(vector)
    else:
        with pytest.raises(RankFailedError, match="rank 1 failed.*CUDA_ERROR_ILLEGAL_ADDRESS"):
            while True:
                collective(vector)
    comm.Barrier()
    collective.close()
    device.fail(0)


def test_a_rank_whose_device_has_failed_is_served_from_its_copy_until_it_calls(
    comm, device, stream
):
    vector = device.array(np.full(5000, float(comm.rank)), stream)
    with GroupAllreduce(comm, vector, group_size=comm.size, sync_period=100) as average:
        average.publish(vector)
        comm.Barrier()
        if comm.rank == 1:
            device.fail(ILLEGAL_ADDRESS)
            comm.Barrier()
            comm.Barrier()
            with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                average(vector)
        else:
            comm.Barrier()
            for _ in range(3):
                assert 1 in average(vector).group
            assert vector.get()[0] > 0
            comm.Barrier()
            with pytest.raises(RankFailedError, match="rank 1 failed"):
                average.synchronize(vector)
    device.fail(0)


@pytest.mark.transports("messages")
def test_a_graph_that_is_being_captured_is_an_error(comm, device, stream):
    vector = device.array(np.zeros(100), stream)
    words = "a CUDA graph is being captured on this stream"
    with GroupAllreduce(comm, vector) as average:
        if comm.rank == 0:
            with device.capturing(stream), pytest.raises(RuntimeError, match=words):
                average(vector)
        else:
            with pytest.raises(RankFailedError, match=f"rank 0 failed.*{words}"):
                average.synchronize(vector)


def test_a_graph_may_be_captured_while_a_call_waits_for_its_device(comm, device, stream):
    """Unlike others' queries and allocations, the collective's break no capture."""
    captured = device.create_stream()
    vector = device.array(np.full(5000, float(comm.rank)), stream)
    with GroupAllreduce(comm, vector, group_size=comm.size, wait="group") as average:
        with device.capturing(captured):
            with device.holding(stream):
                call = average.start(vector)
                assert not call.test()
            assert call.wait().version == 0
            average(vector)
            GroupAllreduce(comm, vector).close()
        assert vector.get()[0] == (comm.size - 1) / 2


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("how", ["call", "wait"])
def test_an_exception_while_the_device_is_behind_leaves_a_call_to_be_made(comm, device, how):
    stream = device.create_stream()
    first = device.array(np.full(5000, 1.0 + comm.rank), stream)
    second = device.array(np.full(5000, 2.0 + comm.rank), stream)
    alive = weakref.ref(first)
    with GroupAllreduce(comm, first, group_size=comm.size, wait="group") as average:
        with device.holding(stream):
            device.write(first, np.full(5000, 7.0), stream)
            with interrupted():
                average.start(first).wait() if how == "wait" else average(first)
            assert average.version == 0
            # The application's stream is ordered after the copy, so this is in order.
            device.write(first, np.full(5000, 8.0), stream)
            del first
            assert alive() is not None, "a copy still reads it"
        assert average(second).version == 0
        assert alive() is None
        np.testing.assert_array_equal(second.get(), 2.0 + (comm.size - 1) / 2)


# Once part of a vector is averaged and the rest has not come yet


def wait_for_blocks(device, copies, blocks):
    """Wait until the first are given back."""
    wait_until(lambda: device.counts().copies > copies + blocks)


def test_an_exception_in_the_middle_leaves_the_application_what_the_host_has(
    comm, device, in_blocks
):
    """So nothing is lost, as on the host: what is added to it is in the next average, once."""
    vector, blocks = in_blocks
    with GroupAllreduce(comm, vector, sync_period=1) as average:
        average.synchronize(vector)
        device.write(vector, np.full(2**20, 4.0 * comm.rank, np.float32), vector.stream)
        mean = 4.0 * (comm.size - 1) / 2
        if comm.rank == 1:
            copies = device.counts().copies
            with device.holding_copies(blocks // 2):
                call = average.start(vector)
                wait_for_blocks(device, copies, blocks)
                opening = threading.Timer(0.3, device.open)
                with (
                    pytest.raises(Interrupted),
                    signalled(lambda: (opening.start(), interrupt()), 0.05, waits=True),
                ):
                    call.wait()
            left = vector.get()
            assert set(left) <= {mean, 4.0} and left[0] == mean
            comm.Barrier()
            device.write(vector, left + np.float32(8), vector.stream)
        else:
            average(vector)
            comm.Barrier()
        average.synchronize(vector)
        np.testing.assert_array_equal(vector.get(), mean + 8 / comm.size)


def test_a_device_that_fails_in_the_middle_is_named_everywhere_and_nobody_hangs(
    comm, device, in_blocks
):
    vector, blocks = in_blocks
    average = GroupAllreduce(comm, vector, group_size=comm.size, wait="group")
    if comm.rank == 1:
        copies = device.counts().copies
        with device.holding_copies(blocks // 2):
            call = average.start(vector)
            wait_for_blocks(device, copies, blocks)
            device.fail(ILLEGAL_ADDRESS)
            with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                call.wait()
    else:
        hear_that_rank_1_failed(average, vector)
    close_after_failure(comm, device, average)


@pytest.mark.transports("messages")
def test_a_signal_handler_can_make_no_call_while_one_waits_for_the_device(comm, device):
    stream = device.create_stream()
    vector = device.array(np.zeros(100), stream)
    with (
        GroupAllreduce(comm, vector, wait="group") as average,
        device.holding(stream),
        pytest.raises(RuntimeError, match="in a call already"),
        signalled(lambda: average(vector), 0.05, waits=True),
    ):
        average(vector)


@pytest.mark.transports("messages")
@pytest.mark.parametrize("given", ["none", "one", "a list"])
def test_several_collectives_join_together(comm, device, stream, given):
    other = stream if given != "a list" else device.create_stream()
    x = device.array(np.full(100, float(comm.rank)), stream)
    y = device.array(np.full(100, 2.0 * comm.rank), other)
    with GroupAllreduce(comm, x) as a, collectives.NeighborAverage(comm, y) as b:
        for _ in range(comm.rank):
            a(x)
            b(y)
        if given != "none":  # that the arrays name none: else these are not in order
            x.stream = y.stream = None
        for vector, handle in ((x, stream), (y, other)):
            device.write(vector, np.full(100, float(comm.rank)), handle)
        streams = {"none": None, "one": stream, "a list": [stream, other]}[given]
        collectives.join((a, x), (b, y), stream=streams)
        assert len(set(comm.allgather(x.get(stream)[0]))) == 1
        assert len(set(comm.allgather(y.get(other)[0]))) == 1
        assert a.version == comm.size - 1


def test_streams_of_a_join_are_those_of_its_vectors_on_devices(comm, device, stream):
    x, y = device.array(np.zeros(100), stream), np.zeros(100)
    with GroupAllreduce(comm, x) as a, collectives.NeighborAverage(comm, y) as b:
        with pytest.raises(ValueError, match="stream has length 1, not 2, the number of vectors"):
            collectives.join((a, x), (b, y), stream=[stream])
        collectives.join((a, x), (b, y), stream=[stream, None])
        with pytest.raises(TypeError, match="stream"):
            collectives.join((b, y), (a, x), stream=stream)


@pytest.mark.transports("messages")
def test_close_after_a_failure_waits_for_no_call_that_has_not_begun(comm, device):
    stream = device.create_stream()
    vector = device.array(np.zeros(5000), stream)
    average = GroupAllreduce(comm, vector, group_size=comm.size, wait="group")
    with device.holding(stream):
        call = average.start(vector)
        comm.Barrier()
        if comm.rank == 2:
            average.fail(KeyError("mine"))
        wait_until(lambda: average.native.failure[0] >= 0)
        threading.Timer(0.2, device.open).start()
        average.close()
    with pytest.raises(RankFailedError, match="rank 2 failed.*mine"):
        call.wait()
