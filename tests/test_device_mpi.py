"""Collectives with arrays on devices, on the stand-in for the driver."""

import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import stand_in
from devices import CASES, Case, vectors_of
from together import bytes_of, compute_until, same_everywhere, wait_until

import collectives
from collectives import GroupAllreduce
from collectives.memory import other_processes

pytestmark = pytest.mark.mpi


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

    with case.make(comm, vector()) as collective:
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
        if case.kind is collectives.PartialAllreduce:
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


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("case", [name for name in CASES if name != "pairs"])
def test_devices_get_the_bits_of_the_host_in_all_dtypes(comm, device, stream, case):
    if (case, comm.size) == ("server", 3):
        pytest.skip("what comes first is added first, and thirds are rounded: it differs on hosts")
    dtypes = ["float16", "bfloat16", "float32", "float64"]
    arrays = vectors_of(0, comm.size, [5001, 3, 2048, 70], dtypes)
    check_bits(comm, CASES[case], arrays, device, stream)


@pytest.mark.ranks(8)
@pytest.mark.transports("shared")
@pytest.mark.parametrize("case", ["group", "triggered", "ready", "neighbors"])
def test_eight_devices_get_the_bits_of_the_host(comm, device, stream, case):
    arrays = vectors_of(0, comm.size, [5001, 70], ["float32", "bfloat16"])
    check_bits(comm, CASES[case], arrays, device, stream)


@pytest.mark.transports("messages")
@pytest.mark.parametrize("case", [name for name in CASES if name != "pairs"])
def test_two_devices_get_the_bits_of_the_host(pair, device, stream, case):
    arrays = vectors_of(0, pair.size, [5001], ["float32"])
    check_bits(pair, CASES[case], arrays, device, stream, single=True)


LONG = {
    "group": CASES["group"],
    "group, paper": CASES["group, paper"],
    "group, halves travel": Case(
        collectives.GroupAllreduce,
        lambda size: {"wait": "group", "sync_period": 3, "wire_dtype": "float16"},
    ),
    "group, some arrays": Case(
        collectives.GroupAllreduce,
        lambda size: {"wait": "group", "sync_period": 4, "every": {1: 2}, "only_all_ranks": [2]},
    ),
    "triggered": CASES["triggered"],
}


@pytest.mark.transports("messages")
@pytest.mark.parametrize("case", LONG)
def test_long_vectors_that_are_copied_in_blocks_get_the_bits_of_the_host(
    comm, device, stream, case, monkeypatch
):
    monkeypatch.setattr(collectives.device, "BLOCK", 2**17)
    arrays = vectors_of(0, comm.size, [150_000, 30_000, 60_000], ["float32", "float16", "float64"])
    check_bits(comm, LONG[case], arrays, device, stream)


@pytest.mark.transports("shared")
@pytest.mark.parametrize("case", LONG)
def test_vectors_that_arrive_in_blocks_are_not_copied_by_the_kernel(
    comm, device, stream, case, monkeypatch
):
    """Other ranks would read them before they are there."""
    monkeypatch.setattr(other_processes, "shortest", 0)
    monkeypatch.setattr(collectives.device, "BLOCK", 2**17)
    arrays = vectors_of(0, comm.size, [150_000, 30_000, 60_000], ["float32", "float16", "float64"])
    check_bits(comm, LONG[case], arrays, device, stream)


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


def settled_counts(device, stream):
    """Return the counts when no memory is left but what is in use."""
    device.synchronize(stream)
    device.free_pinned()
    gc.collect()
    return device.counts()


def counts_around(steps, device, stream, collective, vector):
    """Return the counts before and after some steps, each behind work on the stream."""
    begun = device.counts()
    for _ in range(steps):
        device.sleep(0.001, stream)
        collective(vector)
    return begun, device.counts()


@pytest.mark.transports("messages")
@pytest.mark.parametrize("case", CASES)
def test_a_step_waits_in_no_function_of_the_driver_and_has_one_pinned_vector(
    comm, device, stream, case, monkeypatch
):
    monkeypatch.setattr(collectives.device, "BLOCK", 2**20)
    arrays = vectors_of(0, comm.size, [40_000, 30_000], ["float32", "float64"])
    size = sum(array.nbytes for array in arrays)
    vector = [device.array(array, stream) for array in arrays]
    before = settled_counts(device, stream)
    with CASES[case].make(comm, vector) as collective:
        begun, ended = counts_around(4, device, stream, collective, vector)
        alone = getattr(collective, "alone", 0)
        collective.synchronize(vector)
    after = device.counts()
    assert (ended.blocking, ended.pageable) == (begun.blocking, begun.pageable)
    assert ended.copies - begun.copies == (4 * 2 - alone) * len(arrays)
    assert size <= ended.pinned_bytes - before.pinned_bytes <= 1.1 * size  # and a flag
    assert after.pinned_bytes == before.pinned_bytes
    assert {each.device_bytes for each in (begun, ended, after)} == {before.device_bytes}


@pytest.mark.transports("messages")
def test_a_long_vector_takes_no_memory_on_the_device_and_its_size_pinned(
    comm, device, stream, monkeypatch
):
    monkeypatch.setattr(collectives.device, "BLOCK", 2**22)
    size = 2**25
    vector = device.array(np.zeros(size // 4, np.float32), stream)
    before = settled_counts(device, stream)
    with GroupAllreduce(comm, vector, group_size=comm.size, wait="group") as average:
        assert average.path == "staged"
        average(vector)
        taken = device.counts()
    assert taken.device_bytes == before.device_bytes
    assert size <= taken.pinned_bytes - before.pinned_bytes <= size + 2**13  # and a flag


# Where nothing else makes progress than calls


@pytest.mark.parametrize("case", ["group", "triggered", "neighbors", "ready"])
def test_devices_get_the_bits_of_the_host_without_a_progress_thread(
    comm, device, stream, case, monkeypatch
):
    monkeypatch.setenv("WAGMA_ENGINE", "none")
    arrays = vectors_of(0, comm.size, [5001], ["float32"])
    check_bits(comm, CASES[case], arrays, device, stream)


# Where there are no kernels


def through_nan(comm, case, model):
    """Return what calls make of a model that is not finite on one rank once, and counted."""
    history = []
    with case.make(comm, model.arrays) as collective:
        if isinstance(model, OnDevice) and case.kind is GroupAllreduce:
            assert "no NVRTC to compile kernels with: /nowhere" in collective.path_reason
        for t in range(3):
            values = [x + x.dtype.type((comm.rank + t) / 4) for x in model.get()]
            if (t, comm.rank) == (1, 1):
                values[-1][-1] = np.nan
            model.set(values)
            history.append(collective(model.arrays))
            assert all(np.isfinite(x).all() for x in model.get())
            history.append(bytes_of(model.get()))
        history.append(collective.statistics().left_out)
    return history


@pytest.mark.parametrize("case", ["group", "neighbors"])
def test_without_nvrtc_devices_get_the_bits_of_the_host_and_leave_nan_out(
    comm, device, stream, case, monkeypatch
):
    monkeypatch.setattr("collectives.memory.device_kernels._loaded", {})
    monkeypatch.setenv("WAGMA_NVRTC_LIBRARY", "/nowhere")
    arrays = vectors_of(comm.rank, comm.size, [5001, 70], ["float32", "float64"])
    there = through_nan(comm, CASES[case], OnDevice(arrays, device, stream))
    assert there == through_nan(comm, CASES[case], OnHost(arrays))
    assert there[-1] == (comm.rank == 1)


# Who is late: its device, its main thread, or both


@pytest.mark.parametrize("given", ["nothing", "a call", "a call that it waits for"])
def test_a_rank_whose_device_and_main_thread_are_busy_holds_nobody_up(comm, device, given):
    stream = device.create_stream()
    late = comm.rank == 1
    vector = device.array(np.full(10_000, float(comm.rank)), stream)
    versions = 6
    with GroupAllreduce(comm, vector, group_size=comm.size, sync_period=100) as average:
        assert average.path == "staged"
        average.publish(vector)
        comm.Barrier()
        if late:
            device.hold(stream)
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


@pytest.mark.parametrize("given", ["nothing", "a call"])
def test_a_rank_is_averaged_while_its_driver_returns_from_no_call(comm, device, stream, given):
    """Its progress thread serves it from the host's copy, also if it has started a call."""
    device.require_stand_in()
    if stand_in.is_mpi_s_driver():
        pytest.skip("MPI calls it for every message")
    vector = device.array(np.full(10_000, float(comm.rank)), stream)
    versions = 4
    with GroupAllreduce(comm, vector, group_size=comm.size, sync_period=100) as average:
        assert average.path == "staged"
        average.publish(vector)
        device.synchronize(stream)
        comm.Barrier()
        if comm.rank == 1:
            calls = versions
            device.hold(stream)
            if given == "a call":
                call = average.start(vector)
                calls -= 1
            with device.holding_calls():
                compute_until(comm, False)
            assert average.statistics().passive >= versions - 1
            device.open()
            if given == "a call":
                assert not call.wait().timely
            for _ in range(calls):
                average(vector)
        else:
            for _ in range(versions):
                call = average.start(vector)
                wait_until(call.test)
                assert 1 in call.wait().group
            compute_until(comm, True)
        average.synchronize(vector)
        assert same_everywhere(comm, vector.get().tobytes())


@pytest.mark.parametrize("kind", ["group", "triggered"])
def test_a_started_call_is_averaged_while_the_driver_returns_from_no_call(
    comm, device, in_blocks, kind
):
    """Once the vector is on the host, the progress thread needs the driver no more."""
    device.require_stand_in()
    if stand_in.is_mpi_s_driver():
        pytest.skip("MPI calls it for every message")
    vector, _ = in_blocks
    with STARTED[kind](comm, vector) as average:
        if comm.rank == 1:
            call = average.start(vector)
            assert average.on_host[-1] in (1, (comm.size - 1) / 2)  # it, or already the mean
            with device.holding_calls():
                compute_until(comm, False)
            result = call.wait()
        else:
            result = average(vector)
            compute_until(comm, True)
        assert result.timely
        np.testing.assert_array_equal(vector.get(), (comm.size - 1) / 2)


STARTED = {
    "group": lambda comm, like: GroupAllreduce(comm, like, group_size=comm.size, wait="group"),
    "triggered": lambda comm, like: collectives.TriggeredAverage(comm, like, sync_period=1),
}


@pytest.mark.parametrize("kind", STARTED)
def test_start_returns_while_the_device_is_behind_and_the_call_begins_by_itself(
    comm, device, stream, kind
):
    vector = device.array(np.full(1000, float(comm.rank)), stream)
    with STARTED[kind](comm, vector) as average:
        assert average.path == "staged"
        before = device.counts()
        with device.holding(stream):
            call = average.start(vector)
            assert not call.test()
            assert "not complete" in repr(call)
            assert average.statistics().calls == 0
        assert call.wait() == call.wait()
        assert device.counts().blocking == before.blocking
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


# Copies in blocks, while the first ones are averaged

LONG_VECTOR = 2**20  # of float32: several blocks of an average


@pytest.mark.parametrize("kind", STARTED)
def test_the_first_blocks_are_averaged_and_given_back_while_the_last_are_on_their_way(
    comm, device, stream, kind, monkeypatch
):
    monkeypatch.setattr(collectives.device, "BLOCK", 2**18)
    blocks = 16
    vector = device.array(np.full(LONG_VECTOR, float(comm.rank), np.float32), stream)
    with STARTED[kind](comm, vector) as average:
        copies = device.counts().copies
        comm.Barrier()
        with device.holding_copies(blocks // 2):
            call = average.start(vector)
            wait_until(lambda: device.counts().copies > copies + blocks)
            assert not call.test()
            comm.Barrier()
        assert call.wait().version == 0
        np.testing.assert_array_equal(vector.get(), (comm.size - 1) / 2)
        assert device.counts().copies <= copies + 2 * blocks + 1


@pytest.mark.parametrize("kind", STARTED)
def test_a_vector_whose_last_number_is_not_finite_counts_nowhere(
    comm, device, stream, kind, monkeypatch
):
    monkeypatch.setattr(collectives.device, "BLOCK", 2**18)
    values = np.full(LONG_VECTOR, float(comm.rank), np.float32)
    if comm.rank == 1:
        values[-1] = np.nan
    vector = device.array(np.zeros(LONG_VECTOR, np.float32), stream)
    with STARTED[kind](comm, vector) as average:
        device.write(vector, values, stream)
        assert average(vector).timely == (comm.rank != 1)
        expected = (0 + 2 + 3) / 3
        np.testing.assert_allclose(vector.get(), expected, rtol=1e-6)
        assert average.statistics().left_out == (comm.rank == 1)


class Stream:
    """A stream as CuPy has it: it is destroyed with this object."""

    def __init__(self, ptr):
        self.ptr = ptr


@pytest.mark.transports("messages")
@pytest.mark.parametrize("named", ["stream=", "CuPy's current"])
def test_a_stream_lives_until_the_call_that_uses_it_is_complete(
    comm, device, stream, named, monkeypatch
):
    given = Stream(stream)
    alive = weakref.ref(given)
    vector = device.array(np.full(5000, float(comm.rank)), stream)
    with GroupAllreduce(comm, vector, group_size=comm.size, wait="group") as average:
        if named == "stream=":
            call = average.start(vector, stream=given)
        else:
            current = [given]
            cuda = SimpleNamespace(get_current_stream=lambda: current[0])
            monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
            call = average.start(vector)
            monkeypatch.delitem(sys.modules, "cupy")
            current.clear()
        del given
        gc.collect()
        assert alive() is not None
        call.wait()
        average(vector, stream=stream)
        gc.collect()
        assert alive() is None


@pytest.mark.transports("messages")
def test_steps_between_averages_copy_nothing(comm, device, stream):
    vector = device.array(np.full(5000, float(comm.rank)), stream)
    with collectives.TriggeredAverage(comm, vector, sync_period=4) as average:
        copies = device.counts().copies
        results = [average(vector) for _ in range(3)]
        assert [result.group for result in results] == 3 * [(comm.rank,)]
        assert device.counts().copies == copies
        comm.Barrier()
        result = average.start(vector).wait()
        assert result.synchronized and average.calls == 4
        assert device.counts().copies > copies
        np.testing.assert_array_equal(vector.get(), (comm.size - 1) / 2)
