"""The stand-in for the CUDA driver: it carries out what is in order, and catches what is not."""

import ctypes
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import stand_in
from stand_in import DISORDER, HOST_ACCESS, LEGACY, MISUSE

N = 50_000
NOT_READY = 600  # CUDA_ERROR_NOT_READY

HEAD = """
import ctypes
import numpy as np
import stand_in

device = stand_in.Device()
a, b = device.create_stream(), device.create_stream()
x = device.array(np.arange(50_000.0), a)
y = device.array(np.zeros(50_000), b)
event, pinned = ctypes.c_void_p(), ctypes.c_void_p()
device.call("cuEventCreate", ctypes.byref(event), 2)
device.call("cuMemHostAlloc", ctypes.byref(pinned), ctypes.c_size_t(x.size * 8), 0)
device.synchronize(a)
device.synchronize(b)

def copy(to, source, stream):
    device.call("cuMemcpyAsync", ctypes.c_ulonglong(to), ctypes.c_ulonglong(source),
                ctypes.c_size_t(x.size * 8), ctypes.c_void_p(stream))

def record(stream):
    device.call("cuEventRecord", event, ctypes.c_void_p(stream))

def wait(stream):
    device.call("cuStreamWaitEvent", ctypes.c_void_p(stream), event, 0)

number = ctypes.c_void_p()
device.call("cuMemHostAlloc", ctypes.byref(number), ctypes.c_size_t(4), 0)
told = ctypes.c_uint.from_address(number.value)
told.value = 0

def write(stream, name="cuStreamWriteValue32_v2"):
    stream, address = ctypes.c_void_p(stream), ctypes.c_ulonglong(number.value)
    if name == "cuMemsetD32Async":
        device.call(name, address, 1, ctypes.c_size_t(1), stream)
    else:
        device.call(name, stream, address, 1, 0)

def look(address):
    return ctypes.string_at(address, 8 * 4096)
"""


def run(body, **env):
    path = stand_in.require()
    paths = os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(body)],
        cwd=stand_in.SOURCES.parent,
        env={"WAGMA_CUDA_LIBRARY": path, "PYTHONPATH": paths, **env},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def device():
    stand_in.require()
    device = stand_in.Device()
    yield device
    device.reset()


def test_streams_copy_in_their_order(device):
    stream = device.create_stream()
    x = device.array(np.arange(N), stream)
    device.sleep(0.01, stream)
    device.write(x, np.arange(N) + 1, stream)
    np.testing.assert_array_equal(x.get(), np.arange(N) + 1)


def test_the_host_does_not_wait_for_what_it_puts_into_a_stream(device):
    stream = device.create_stream()
    before = device.counts()
    device.hold(stream)
    x = device.array(np.zeros(N), stream)
    assert device.counts().blocking - before.blocking == 1  # the allocation of pinned memory
    with device.current():
        assert device.driver.cuStreamQuery(ctypes.c_void_p(stream)) == NOT_READY
    device.open()
    device.synchronize(stream)
    assert device.counts().blocking - before.blocking == 2
    del x


def test_the_legacy_stream_and_those_created_without_a_flag_wait_for_each_other(device):
    stream = device.create_stream(flags=0)
    x = device.array(np.zeros(N), stream)
    device.sleep(0.05, stream)
    device.write(x, np.ones(N), stream)
    assert x.get(LEGACY).sum() == N


def test_a_stream_calls_a_function_of_the_host_s_when_it_comes_to_it(device):
    stream = device.create_stream()
    done = ctypes.create_string_buffer(b"no")
    clear = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda given: ctypes.memset(given, 0, 2))
    with device.holding(stream):
        device.call("cuLaunchHostFunc", ctypes.c_void_p(stream), clear, done)
        assert done.value == b"no"
    device.synchronize(stream)
    assert done.value == b""


def test_an_mpi_learns_what_an_address_is(device):
    kind, context, attributes = ctypes.c_uint(), ctypes.c_void_p(), (ctypes.c_int * 2)(2, 1)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(kind), ctypes.addressof(context))

    def ask(address):
        address = ctypes.c_ulonglong(address)
        assert device.driver.cuPointerGetAttributes(2, attributes, values, address) == 0
        return kind.value, context.value

    x = device.array(np.zeros(N))
    assert ask(x.address + 8) == (2, device.context.value)
    assert ask(ctypes.addressof(kind)) == (0, None)
    start, size = ctypes.c_ulonglong(), ctypes.c_size_t()
    inside = ctypes.c_ulonglong(x.address + 8)
    device.call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), inside)
    assert start.value == x.address and size.value >= 8 * N


def test_memory_is_counted(device):
    before = device.counts()
    x = device.array(np.zeros(N))
    after = device.counts()
    assert after.device_bytes - before.device_bytes == pytest.approx(8 * N, abs=4096)
    assert after.pinned_bytes - before.pinned_bytes == pytest.approx(8 * N, abs=4096)
    x.get()
    del x
    device.free_arrays()
    assert device.counts().device_bytes == before.device_bytes


def test_a_function_without_a_context_fails(device):
    event = ctypes.c_void_p()
    assert device.driver.cuEventCreate(ctypes.byref(event), 0) == 201


IN_ORDER = {
    "an event": "copy(y.address, x.address, a); record(a); wait(b); copy(x.address, y.address, b)",
    "a query": """
        copy(y.address, x.address, a); record(a)
        while not device.is_over(event): pass
        look(pinned.value); copy(x.address, y.address, b)
        """,
    "a copy that has been seen": """
        copy(pinned.value, x.address, a); device.synchronize(a); look(pinned.value)
        """,
    "a number that a stream writes": """
        copy(pinned.value, x.address, a); write(a)
        while not told.value: pass
        look(pinned.value); copy(x.address, y.address, b)
        """,
    "one that it fills in": """
        copy(pinned.value, x.address, a); write(a, "cuMemsetD32Async")
        while not told.value: pass
        look(pinned.value); copy(x.address, y.address, b)
        """,
    "reading while a copy reads": "copy(y.address, pinned.value, a); look(pinned.value)",
}
NOT_IN_ORDER = {
    "two streams that write and read": (
        "copy(y.address, x.address, a); copy(x.address, y.address, b)",
        DISORDER,
        "nothing orders them",
    ),
    "an event that is recorded too early": (
        "record(a); copy(y.address, x.address, a); wait(b); copy(x.address, y.address, b)",
        DISORDER,
        "a copy on stream 2",
    ),
    "writing from the host what a copy reads": (
        "copy(y.address, pinned.value, a); ctypes.memset(pinned.value + 8192, 0, 8192)",
        HOST_ACCESS,
        "the host touches pinned memory",
    ),
    "reading on the host what a copy writes": (
        "copy(pinned.value, x.address, a); look(pinned.value + 8192)",
        HOST_ACCESS,
        "has not seen the copy end",
    ),
    "reading it when it has ended, which nobody has asked": (
        "import time; copy(pinned.value, x.address, a); time.sleep(0.2); look(pinned.value + 8192)",
        HOST_ACCESS,
        "has not seen the copy end",
    ),
    "reading it when its number is there, which nobody has read": (
        "import time; copy(pinned.value, x.address, a); write(a); time.sleep(0.2); "
        "look(pinned.value + 8192)",
        HOST_ACCESS,
        "has not seen the copy end",
    ),
    "a number that is written too early": (
        """
        write(a); copy(pinned.value, x.address, a)
        while not told.value: pass
        look(pinned.value + 8192)
        """,
        HOST_ACCESS,
        "has not seen the copy end",
    ),
    "the host at device memory": ("look(x.address)", HOST_ACCESS, "the host touches device memory"),
    "a query while a graph is being captured": (
        "record(a); device.call('stand_in_capture', ctypes.c_void_p(b), 1); device.is_over(event)",
        MISUSE,
        "cuEventQuery while a graph is being captured",
    ),
    "a copy beyond the end": (
        "copy(x.address + 8192, y.address, a)",
        MISUSE,
        "beyond its allocation",
    ),
}


@pytest.mark.parametrize("case", IN_ORDER)
def test_what_is_in_order_runs(case):
    ended = run(IN_ORDER[case], STAND_IN_DELAY="2000")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("delay", ["0", "2000"])
@pytest.mark.parametrize("case", NOT_IN_ORDER)
def test_what_is_not_in_order_ends_the_process_and_is_named(case, delay):
    body, status, words = NOT_IN_ORDER[case]
    ended = run(body, STAND_IN_DELAY=delay)
    assert ended.returncode == status, ended.stderr
    assert words in ended.stderr


def test_a_sticky_error_is_what_every_call_returns(device):
    stream = device.create_stream()
    device.fail(stand_in.ILLEGAL_ADDRESS)
    try:
        with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            device.synchronize(stream)
    finally:
        device.fail(0)
    device.synchronize(stream)


def test_no_call_returns_while_calls_are_held(device):
    stream = device.create_stream()
    caller = threading.Thread(target=device.synchronize, args=[stream])
    with device.holding_calls():
        caller.start()
        caller.join(0.1)
        assert caller.is_alive()
    caller.join()


def test_no_compiler_is_a_reason_to_skip(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(stand_in.NoCompiler, match="no C compiler"):
        stand_in.library.__wrapped__()


def test_a_stream_that_is_full_blocks_all_calls_of_the_process():
    ended = run(
        """
        import threading, time

        device.hold(a)
        queued, asked = [], []

        def fill():
            for _ in range(9):
                arguments = ctypes.c_ulonglong(x.address), ctypes.c_ubyte(0), ctypes.c_size_t(8)
                device.call("cuMemsetD8Async", *arguments, ctypes.c_void_p(a))
                queued.append(1)

        def ask():
            with device.current():
                device.driver.cuStreamQuery(ctypes.c_void_p(b))
            asked.append(1)

        def start(function):
            thread = threading.Thread(target=function)
            thread.start()
            return thread

        threads = [start(fill)]
        while len(queued) < 7:
            time.sleep(0.001)
        for _ in range(100):
            threads.append(start(ask))
            threads[-1].join(0.2)
            if threads[-1].is_alive():
                break  # before, the stream was not full yet
        assert (len(queued), len(asked)) == (7, len(threads) - 2), (queued, asked)
        device.open()
        for thread in threads:
            thread.join()
        assert (len(queued), len(asked)) == (9, len(threads) - 1)
        print("done")
        """,
        STAND_IN_QUEUE="8",
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
