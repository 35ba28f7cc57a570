"""Passes over a device's memory: the bits of the host's, when a ticket is over, and no sooner."""

import contextlib
import ctypes
import threading
import time

import device_passes
import numpy as np
import pytest
import stand_in
from device_passes import OVER, SHARES
from rounding import DTYPES, numbers, same

from collectives.errors import CudaError
from collectives.memory.space import HostSpace

N = 3001
VECTORS = 6
# What travels for each dtype.
WIRE = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float16", "float64": "bfloat16"}


@pytest.fixture
def passes(device, monkeypatch):
    monkeypatch.setenv("WAGMA_CACHE_DIR", str(device_passes.CACHE))
    return device_passes.load(device_passes.build())


@pytest.fixture
def queue(passes):
    from collectives.memory.device_queue import DeviceQueue

    queue = DeviceQueue(0)
    yield queue
    queue.close()


@pytest.fixture
def space(queue):
    return of_dtypes("float64", "float64", queue)


def of_dtypes(dtype, wire, queue):
    from collectives.memory.device_space import DeviceSpace

    return DeviceSpace([dtype], [wire], queue)


def wait(passes, space):
    """Wait until all passes are over, for half a minute at most."""
    ticket = passes.begun(space)
    for _ in range(20_000):
        if passes.over(space, ticket):
            return
        time.sleep(1e-3)
    raise AssertionError("the ticket is never over")


def put(device, values):
    array = device.array(values, stand_in.LEGACY)
    device.synchronize(stand_in.LEGACY)
    return array


def random_passes(dtype, count=60, seed=0):
    """Yield passes: a name; whether it is one of the other space; places of vectors; shares.

    Places from VECTORS on are of those that travel. Those that ask have no vector that they write.
    """
    rng = np.random.default_rng(seed)
    names = ["copy", "copy_away", "zero", *OVER, "all_finite", "begin_finite_change"]
    names += ["mean on wire", *(["encode", "decode"] if WIRE[dtype] != dtype else [])]
    for name in rng.choice(names, count):
        places = rng.integers(0, VECTORS, 5).tolist()
        travels = rng.integers(VECTORS, 2 * VECTORS, 5).tolist()
        if name == "mean on wire":
            yield "mean", True, travels, SHARES["mean"]
        elif name == "encode":
            yield name, False, [travels[0], *places[:2]], ()
        elif name == "decode":
            yield name, False, [places[0], travels[0], places[1]], ()
        else:
            reads = {"copy": 1, "copy_away": 1, "zero": 0, "all_finite": 0}.get(name)
            reads = OVER.get(name, 3 if reads is None else reads)
            first = [] if name == "begin_finite_change" else places[:1]
            yield name, False, first + places[1 : 1 + reads], SHARES.get(name, ())


def run(passes, spaces, addresses, dtype, new_flag):
    """Make all passes; return what those returned that ask, and the flags of the others."""
    answers, flags = [], []
    for name, of_wire, places, shares in random_passes(dtype):
        given = [addresses[place] for place in places]
        if name == "begin_finite_change":
            flags.append(new_flag())
            ctypes.c_int.from_address(flags[-1]).value = 1
            given.insert(0, flags[-1])
        itemsize = np.dtype(DTYPES[dtype]).itemsize
        size = N * itemsize if name in ("copy", "copy_away", "zero") else N
        answers.append(passes.make(spaces[of_wire], name, given, size, shares))
    return answers, flags


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_passes_have_the_hosts_bits(device, passes, queue, dtype):
    wire = WIRE[dtype]
    vectors = [numbers(dtype, seed, N) for seed in range(VECTORS)]
    vectors += [numbers(wire, seed, N) for seed in range(VECTORS)]
    for vector in vectors[1:]:  # all but one are finite
        with np.errstate(invalid="ignore"):
            vector[~np.isfinite(vector.astype(np.float64))] = 1
    arrays = [put(device, vector) for vector in vectors]
    before = device.counts().blocking

    host = [HostSpace([dtype], [wire]), HostSpace([wire], [wire])]
    places = [vector.ctypes.data for vector in vectors]
    expected, expected_flags = run(passes, host, places, dtype, lambda: passes.new_flag(host[0]))
    spaces = [of_dtypes(dtype, wire, queue), of_dtypes(wire, wire, queue)]
    new_flags = [passes.new_flag(spaces[0]) for _ in expected_flags]
    pinned = device.counts().blocking - before
    answers, flags = run(
        *(passes, spaces, [array.address for array in arrays], dtype), iter(new_flags).__next__
    )
    wait(passes, spaces[1])
    if device.is_stand_in:
        assert device.counts().blocking - before == pinned == 2 + len(flags)

    assert answers == expected
    assert len(flags) > 2
    assert [ctypes.c_int.from_address(flag).value for flag in flags] == [
        ctypes.c_int.from_address(flag).value for flag in expected_flags
    ]
    for array, vector in zip(arrays, vectors):
        assert same(array.get(stand_in.LEGACY), vector)


def test_a_ticket_is_over_when_its_passes_are(device, passes, queue, space):
    x, flag = put(device, np.full(N, np.inf)), passes.new_flag(space)
    ctypes.c_int.from_address(flag).value = 1
    assert passes.over(space, passes.begun(space))
    passes.make(space, "zero", [x.address], x.size * 8)
    first = passes.begun(space)
    assert passes.begun(space) == first
    with device.holding(queue.handle):
        passes.make(space, "begin_all_finite", [flag, x.address], N)
        second = passes.begun(space)
        while not passes.over(space, first):
            pass
        time.sleep(0.01)
        assert not passes.over(space, second)
    wait(passes, space)
    assert passes.over(space, second)
    assert ctypes.c_int.from_address(flag).value == 1


@pytest.mark.parametrize("supported", [True, False])
def test_tickets_are_over_in_turn(device, passes, queue, space, supported):
    x = put(device, np.zeros(N))
    refusing = contextlib.nullcontext() if supported else device.refusing_numbers()
    with refusing, device.holding(queue.handle):
        tickets = []
        for _ in range(200):
            passes.make(space, "zero", [x.address], 8)
            tickets.append(passes.begun(space))
        assert len(set(tickets)) == 200
        assert not any(passes.over(space, ticket) for ticket in tickets)
    wait(passes, space)
    assert all(passes.over(space, ticket) for ticket in tickets)


def test_whether_a_ticket_is_over_is_known_without_the_driver(device, passes, queue, space):
    x = put(device, np.zeros(N))
    passes.make(space, "zero", [x.address], N * 8)
    ticket = passes.begun(space)
    device.synchronize(queue.handle)
    answers = []
    with device.holding_calls():
        asks = threading.Thread(target=lambda: answers.append(passes.over(space, ticket)))
        asks.start()
        asks.join(10)
        assert answers == [True]


def test_what_mpi_calls_in_the_engine_s_thread_breaks_no_capture(device, passes, space, stream):
    """The stand-in ends the process where something does."""
    event, ended = ctypes.c_void_p(), []
    device.call("cuEventCreate", ctypes.byref(event), 2)
    device.call("cuEventRecord", event, ctypes.c_void_p(stream))

    def call():
        passes.attach(space)
        ended.append(device.is_over(event))

    with device.capturing(device.create_stream()):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert len(ended) == 1
    device.call("cuEventDestroy_v2", event)


def test_memory_is_given_back(device, passes, space):
    before = device.counts().device_bytes
    memory, address = passes.allocate(space, N * 8)
    assert device.counts().device_bytes - before == pytest.approx(N * 8, abs=4096)
    x = put(device, np.ones(N))
    passes.make(space, "zero", [address], N * 8)
    passes.make(space, "copy", [x.address, address], N * 8)
    wait(passes, space)
    assert not x.get(stand_in.LEGACY).any()
    del memory, x
    device.free_arrays()
    assert device.counts().device_bytes == before


def test_an_error_stays_and_nobody_waits(device, passes, queue, space):
    x = put(device, np.zeros(N))
    assert passes.error(space) == 0
    queue.check()
    device.fail(stand_in.ILLEGAL_ADDRESS)
    passes.make(space, "combine", 3 * [x.address], N, (1, 1))
    device.fail(0)
    assert passes.error(space) == stand_in.ILLEGAL_ADDRESS
    passes.make(space, "zero", [x.address], N * 8)
    assert passes.over(space, passes.begun(space) + 1)
    assert not passes.make(space, "all_finite", [x.address], N)
    with pytest.raises(CudaError, match="cuLaunchKernel returned CUDA_ERROR_ILLEGAL_ADDRESS"):
        queue.check()


def test_an_error_of_a_query_is_seen(device, passes, queue, space):
    x = put(device, np.zeros(N))
    with device.holding(queue.handle):
        passes.make(space, "zero", [x.address], N * 8)
        ticket = passes.begun(space)
        assert not passes.over(space, ticket)
        device.fail(stand_in.ILLEGAL_ADDRESS)
        wait(passes, space)  # which asks the driver once a second
        assert passes.over(space, ticket)
        device.fail(0)
    with pytest.raises(CudaError, match="cuStreamQuery returned CUDA_ERROR_ILLEGAL_ADDRESS"):
        queue.check()


def test_more_members_than_a_kernel_takes_are_an_error(device, passes, queue, space):
    x = put(device, np.zeros(N))
    passes.make(space, "mean", 252 * [x.address], N, 251 * [1 / 251])
    with pytest.raises(CudaError, match="cuLaunchKernel returned CUDA_ERROR_INVALID_VALUE"):
        queue.check()
