"""Collectives with arrays on devices, on the stand-in for the driver."""

import contextlib
import gc
import signal
import threading
import weakref

import numpy as np
import pytest
import stand_in
from devices import CASES, vectors_of
from stand_in import ILLEGAL_ADDRESS
from together import Interrupted, bytes_of, compute_until, interrupt, wait_until

import collectives
from collectives import CudaError, GroupAllreduce, RankFailedError

pytestmark = pytest.mark.mpi


@pytest.fixture
def device(monkeypatch):
    pytest.importorskip("ml_dtypes")
    monkeypatch.setenv("WAGMA_CUDA_LIBRARY", stand_in.require())
    monkeypatch.setenv("STAND_IN_DELAY", "300")
    monkeypatch.setenv("STAND_IN_DEVICES", "2")
    device = stand_in.Device()
    yield device
    device.reset()


@pytest.fixture
def stream(device):
    return device.create_stream()


@pytest.fixture
def pair(comm):
    """A communicator of two of the ranks."""
    part = comm.Split(comm.rank // 2)
    yield part
    part.Free()


class OnHost:
    """A rank's vector in numpy arrays, and what its steps make of it."""

    def __init__(self, arrays):
        self.arrays = [array.copy() for array in arrays]

    def get(self):
        return self.arrays

    def set(self, values):
        for array, value in zip(self.arrays, values):
            array[:] = value


class OnDevice:
    """The same on a device whose stream is busy for a while before each step."""

    def __init__(self, arrays, device, stream):
        self.device, self.stream = device, stream
        self.arrays = [device.array(array, stream) for array in arrays]

    def get(self):
        return [array.get() for array in self.arrays]

    def set(self, values):
        self.device.sleep(0.002, self.stream)
        for array, value in zip(self.arrays, values):
            self.device.write(array, value, self.stream)


def train(comm, case, model, single):
    """Do all that a collective can do; return the model after each."""
    history = []

    def vector():
        return model.arrays[0] if single else model.arrays

    def step(t):
        with np.errstate(over="ignore"):
            model.set([values + values.dtype.type((comm.rank + t) / 4) for values in model.get()])

    def note():
        history.append(bytes_of(model.get()))

    with CASES[case].make(comm, vector()) as collective:
        for t in range(5):
            step(t)
            history.append(collective(vector()))
            note()
        step(5)
        collective.average(vector())
        note()
        collective.synchronize(vector())
        note()
        if hasattr(collective, "publish"):
            collective.publish(vector())
            note()
        if hasattr(collective, "start"):
            step(6)
            history.append(collective.start(vector()).wait())
            note()
        if hasattr(collective, "model"):
            collective.model(vector())
            note()
        if case == "partial":
            collective.load(9)
        else:
            collective.load(vector(), 9)
        note()
        step(7)
        collective(vector())
        note()
        collective.join(vector())
        note()
        assert collective.version == 10
    return history


def check_bits(comm, case, arrays, device, stream, single=False):
    expected = train(comm, case, OnHost(arrays), single)
    assert train(comm, case, OnDevice(arrays, device, stream), single) == expected


@pytest.mark.parametrize("case", [name for name in CASES if name != "pairs"])
def test_four_devices_get_the_bits_of_the_host_in_all_dtypes(comm, device, stream, case):
    dtypes = ["float16", "bfloat16", "float32", "float64"]
    arrays = vectors_of(0, comm.size, [5001, 3, 2048, 70], dtypes)
    check_bits(comm, case, arrays, device, stream)


@pytest.mark.transports("messages")
@pytest.mark.parametrize("case", [name for name in CASES if name != "pairs"])
def test_two_devices_get_the_bits_of_the_host(pair, device, stream, case):
    arrays = vectors_of(0, pair.size, [5001], ["float32"])
    check_bits(pair, case, arrays, device, stream, single=True)


@pytest.mark.transports("messages")
def test_pairs_average_on_devices(comm, device, stream):
    arrays = vectors_of(comm.rank, comm.size, [3000], ["float32"])
    everybody = [vectors_of(rank, comm.size, [3000], ["float32"])[0] for rank in range(comm.size)]
    model = OnDevice(arrays, device, stream)
    with CASES["pairs"].make(comm, model.arrays[0]) as average:
        for _ in range(4):
            average(model.arrays[0])
        average.synchronize(model.arrays[0])
        np.testing.assert_allclose(model.get()[0], np.mean(everybody, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.transports("messages")
@pytest.mark.parametrize("case", CASES)
def test_a_step_waits_in_no_function_of_the_driver_and_has_one_pinned_vector(
    comm, device, stream, case
):
    arrays = vectors_of(0, comm.size, [40_000, 30_000], ["float32", "float64"])
    size = sum(array.nbytes for array in arrays)
    vector = [device.array(array, stream) for array in arrays]
    device.synchronize(stream)
    device.free_pinned()
    gc.collect()
    before = device.counts()
    with CASES[case].make(comm, vector) as collective:
        begun = device.counts()
        for _ in range(4):
            device.sleep(0.001, stream)
            collective(vector)
        ended = device.counts()
        collective.synchronize(vector)
    after = device.counts()
    assert (ended.blocking, ended.pageable) == (begun.blocking, begun.pageable)
    assert ended.copies - begun.copies == 4 * 2 * len(arrays)
    assert size <= ended.pinned_bytes - before.pinned_bytes <= 1.1 * size
    assert after.pinned_bytes == before.pinned_bytes
    assert {each.device_bytes for each in (begun, ended, after)} == {before.device_bytes}


# Who is late: its device, its main thread, or both


@pytest.mark.parametrize("given", ["nothing", "a call", "a call that it waits for"])
def test_a_rank_whose_device_and_main_thread_are_busy_holds_nobody_up(comm, device, given):
    stream = device.create_stream()
    late = comm.rank == 1
    vector = device.array(np.full(10_000, float(comm.rank)), stream)
    versions = 6
    with GroupAllreduce(comm, vector, group_size=comm.size, sync_period=100) as average:
        average.publish(vector)
        comm.Barrier()
        if late:
            device.call("stand_in_hold", stand_in.handle(stream))
            if given == "a call":
                call = average.start(vector)
                compute_until(comm, False)
                assert not call.test()
                device.open()
                result = call.wait()
                assert not result.timely and result.source >= versions - 1
            elif given == "nothing":
                compute_until(comm, False)
                device.open()
                average(vector)
            else:
                others = threading.Thread(
                    target=lambda: (compute_until(comm, False), device.open())
                )
                others.start()
                assert not average(vector).timely
                others.join()
            assert average.statistics().passive >= versions - 1
            for _ in range(versions - 1):
                average(vector)
        else:
            for _ in range(versions):
                result = average(vector)
                assert 1 in result.group
            compute_until(comm, True)
        average.synchronize(vector)
        assert comm.allgather(vector.get()[0]) == [vector.get()[0]] * comm.size


def test_start_returns_while_the_device_is_behind_and_the_call_begins_by_itself(comm, device):
    stream = device.create_stream()
    vector = device.array(np.full(1000, float(comm.rank)), stream)
    with GroupAllreduce(comm, vector, group_size=comm.size, wait="group") as average:
        with device.holding(stream):
            call = average.start(vector)
            assert not call.test()
            assert "not complete" in repr(call)
            assert average.statistics().calls == 0
        assert call.wait() == call.wait()
        assert average.version == 1
        np.testing.assert_array_equal(vector.get(), (comm.size - 1) / 2)


@pytest.mark.transports("messages")
def test_the_next_call_completes_one_that_was_started(comm, device, stream):
    x = device.array(np.full(5000, float(comm.rank)), stream)
    y = device.array(np.full(5000, 10.0 * comm.rank), stream)
    with GroupAllreduce(comm, x, group_size=comm.size, wait="group") as average:
        first = average.start(x)
        second = average.start(y)
        assert second.wait().version == 1
        assert first.wait().version == 0
        np.testing.assert_array_equal(x.get(), (comm.size - 1) / 2)
        np.testing.assert_array_equal(y.get(), 5.0 * (comm.size - 1))


def test_close_carries_out_what_was_started(comm, device):
    stream = device.create_stream()
    vector = device.array(np.full(5000, float(comm.rank)), stream)
    average = GroupAllreduce(comm, vector, group_size=comm.size, wait="group")
    device.sleep(0.05, stream)
    call = average.start(vector)
    average.close()
    assert call.wait().version == 0
    np.testing.assert_array_equal(vector.get(), (comm.size - 1) / 2)
    with pytest.raises(collectives.ClosedError):
        average(vector)


# What is wrong


@pytest.mark.transports("messages")
def test_ranks_with_and_without_a_device_raise_alike(comm, device, stream):
    values = np.zeros(10)
    like = device.array(values, stream) if comm.rank % 2 else values
    with pytest.raises(ValueError, match=r"device differs between ranks: cpu .* cuda on ranks? 1"):
        GroupAllreduce(comm, like)
    with pytest.raises(ValueError, match="device differs"):
        collectives.PartialAllreduce(comm, like)


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
    with pytest.raises(ValueError, match="array 1 of the vector is on device 1"):
        GroupAllreduce(comm, [first, second])
    with GroupAllreduce(comm, second) as average:
        if comm.rank == 0:
            with pytest.raises(ValueError, match="is on device 0, the collective's are on"):
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
            breaks.start()
            call = average.start(vector) if how != "call" else None
            if how == "close":
                average.close()
            with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                call.wait() if call else average(vector)
            breaks.join()
        if how != "close":
            with pytest.raises(collectives.ClosedError, match="this rank failed"):
                average(vector)
    else:
        # The first call may end before they hear of it, if that rank is closing.
        with pytest.raises(
            RankFailedError, match=r"rank 1 failed.*CudaError: .*CUDA_ERROR_ILLEGAL_ADDRESS"
        ):
            while True:
                average(vector)
    average.close()
    comm.Barrier()
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
            with interrupted_after(0.2), pytest.raises(Interrupted):
                average.start(first).wait() if how == "wait" else average(first)
            assert average.version == 0
            # The application's stream is ordered after the copy, so this is in order.
            device.write(first, np.full(5000, 8.0), stream)
            del first
            assert alive() is not None, "a copy still reads it"
        assert average(second).version == 0
        assert alive() is None
        np.testing.assert_array_equal(second.get(), 2.0 + (comm.size - 1) / 2)


@contextlib.contextmanager
def interrupted_after(seconds):
    """Raise Interrupted from a signal handler."""
    handler = signal.signal(signal.SIGALRM, lambda *_: interrupt())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.transports("messages")
def test_a_signal_handler_can_make_no_call_while_one_waits_for_the_device(comm, device):
    stream = device.create_stream()
    vector = device.array(np.zeros(100), stream)
    with GroupAllreduce(comm, vector, wait="group") as average, device.holding(stream):
        handler = signal.signal(signal.SIGALRM, lambda *_: average(vector))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(RuntimeError, match="in a call already"):
                average(vector)
        finally:
            signal.signal(signal.SIGALRM, handler)


@pytest.mark.transports("messages")
def test_several_collectives_join_together(comm, device, stream):
    x = device.array(np.full(100, float(comm.rank)), stream)
    y = device.array(np.full(100, 2.0 * comm.rank), stream)
    with GroupAllreduce(comm, x) as a, collectives.NeighborAverage(comm, y) as b:
        for _ in range(comm.rank):
            a(x)
            b(y)
        collectives.join((a, x), (b, y))
        assert len(set(comm.allgather(x.get()[0]))) == 1
        assert a.version == comm.size - 1


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
