"""Kernels that are launched: they have the bits of the host's passes, on the driver's stand-in."""

import ctypes
import re

import device_passes
import numpy as np
import pytest
from device_passes import FINITE, OVER, SHARES
from rounding import CODECS, DTYPES, numbers, same
from stand_in import DISORDER, HOST_ACCESS, MISUSE

from collectives.errors import CudaError
from collectives.memory.space import CODES, HostSpace

# One thread has one element; threads have several.
SIZES = (1, 300, 20_001)


@pytest.fixture
def passes(device, monkeypatch):
    monkeypatch.setenv("WAGMA_CACHE_DIR", str(device_passes.CACHE))
    return device_passes.load(device_passes.build())


def addresses(arrays):
    return [array.address for array in arrays]


def host(passes, name, dtype, vectors, n, wire=None, shares=()):
    """Make one of the host's passes over numpy arrays, and return what it does."""
    space = HostSpace([dtype], [wire or dtype])
    return passes.make(space, name, [vector.ctypes.data for vector in vectors], n, shares)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OVER)
def test_a_pass_has_the_hosts_bits(device, stream, passes, name, dtype, n):
    given = [numbers(dtype, seed, n) for seed in range(OVER[name])]
    expected, shares = np.zeros_like(given[0]), SHARES.get(name, ())
    host(passes, name, dtype, [expected, *given], n, shares=shares)
    arrays = [device.array(values, stream) for values in [np.zeros_like(expected), *given]]
    passes.launch(name, CODES[dtype].decode(), addresses(arrays), n, stream, shares)
    assert same(arrays[0].get(), expected)
    # In place of the first vector.
    arrays[0] = arrays[1]
    passes.launch(name, CODES[dtype].decode(), addresses(arrays), n, stream, shares)
    assert same(arrays[0].get(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FINITE)
def test_what_is_not_finite_is_found(device, stream, passes, name, dtype):
    for n in SIZES:
        for bad in (None, np.inf, np.nan):
            vectors = [np.full(n, value, DTYPES[dtype]) for value in (1.5, 0.25, 0.125)]
            vectors = vectors[: FINITE[name]]
            if bad is not None:
                vectors[-1][-1] = bad
            arrays = [device.array(values, stream) for values in vectors]
            flag = device.pin(4)
            ctypes.c_int.from_address(flag).value = 1
            passes.launch(name, CODES[dtype].decode(), [flag, *addresses(arrays)], n, stream)
            device.synchronize(stream)
            assert ctypes.c_int.from_address(flag).value == (bad is None)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("dtype", "wire"), CODECS)
def test_what_travels_has_the_hosts_bits(device, stream, passes, dtype, wire, n):
    x, reference = numbers(dtype, 0, n), numbers(dtype, 1, n)
    travels, back = np.zeros(n, DTYPES[wire]), np.zeros(n, DTYPES[dtype])
    host(passes, "encode", dtype, [travels, x, reference], n, wire)
    host(passes, "decode", dtype, [back, travels, reference], n, wire)
    codes = (CODES[dtype] + CODES[wire]).decode()
    ours = [device.array(values, stream) for values in (np.zeros_like(travels), x, reference)]
    passes.launch("encode", codes, addresses(ours), n, stream)
    assert same(ours[0].get(), travels)
    passes.launch("decode", codes, [ours[1].address, ours[0].address, ours[2].address], n, stream)
    assert same(ours[1].get(), back)


def test_nothing_is_no_error_and_too_many_members_are(device, stream, passes):
    x = device.array(np.ones(100), stream)
    passes.launch("mean", "d", 251 * [x.address], 0, stream, 250 * [1 / 250])
    passes.launch("mean", "d", 251 * [x.address], 100, stream, 250 * [1 / 250])
    assert x.get() == pytest.approx(1)
    with pytest.raises(CudaError, match="cuLaunchKernel returned CUDA_ERROR_INVALID_VALUE"):
        passes.launch("mean", "d", 252 * [x.address], 100, stream, 251 * [1 / 251])


def test_no_nvrtc_and_no_launches_are_errors(device, passes, monkeypatch):
    with pytest.raises(CudaError, match="has no cuLaunchKernel"):
        passes.kernels_without_launches(1)
    monkeypatch.setenv("WAGMA_NVRTC_LIBRARY", "/nowhere/libnvrtc.so")
    with pytest.raises(CudaError, match="no NVRTC to compile kernels with: /nowhere/libnvrtc.so"):
        passes.kernels(1)
    monkeypatch.delenv("WAGMA_NVRTC_LIBRARY")
    passes.kernels(1)


# --- what is not in order

HEAD = """
import ctypes
import sys
import numpy as np
import device_passes
import stand_in

passes = device_passes.load(sys.argv[1])
device = stand_in.Device()
a, b = device.create_stream(), device.create_stream()
x, y, z = (device.array(np.ones(9000), a) for _ in range(3))
flag = device.pin(4)
ctypes.c_int.from_address(flag).value = 1
event = ctypes.c_void_p()
device.call("cuEventCreate", ctypes.byref(event), 2)
device.synchronize(a)

def launch(name, arrays, stream, shares=()):
    passes.launch(name, "d", [getattr(array, "address", array) for array in arrays], 9000, stream,
                  shares)

def order(before, after):
    device.call("cuEventRecord", event, ctypes.c_void_p(before))
    device.call("cuStreamWaitEvent", ctypes.c_void_p(after), event, 0)
"""
IN_ORDER = """
device.write(x, np.zeros(9000), a)
order(a, b)
launch("combine", [y, x, z], b, (1, 1))
order(b, a)
launch("add_change", [z, x, y, z], a)
launch("all_finite", [flag, z], a)
device.synchronize(a)
assert ctypes.c_int.from_address(flag).value == 1
"""
NOT_IN_ORDER = {
    "a kernel that does not wait for a copy": (
        'device.write(x, np.zeros(9000), a); launch("combine", [y, x, z], b, (1, 1))',
        DISORDER,
        r"combine_float64 on stream 2 reads .* nothing orders them",
    ),
    "a copy that does not wait for a kernel": (
        'launch("mean", [y, x, z], b, (0.5, 0.5)); device.write(z, np.zeros(9000), a)',
        DISORDER,
        r"a copy to the device on stream 1 writes .*, which mean_float64 on stream 2 reads",
    ),
    "two kernels on two streams": (
        'launch("add_change", [y, x, y, z], a); launch("all_finite", [flag, y], b)',
        DISORDER,
        r"all_finite_float64 on stream 2 reads .*, which add_change_float64 on stream 1 writes",
    ),
    "a flag that is looked at too early": (
        'launch("all_finite", [flag, x], a); ctypes.c_int.from_address(flag).value',
        HOST_ACCESS,
        "the host touches pinned memory",
    ),
    "a vector in memory that is not pinned": (
        'launch("all_finite", [flag, np.ones(9000).ctypes.data], a)',
        MISUSE,
        "all_finite_float64 reads host memory that is not pinned",
    ),
    "more elements than there are": (
        'launch("all_finite", [flag, x.address + 8192], a)',
        MISUSE,
        "all_finite_float64 goes beyond its allocation",
    ),
}


def test_what_is_in_order_runs():
    ended = device_passes.run(HEAD + IN_ORDER, STAND_IN_DELAY="2000")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("case", NOT_IN_ORDER)
def test_what_is_not_in_order_ends_the_process_and_is_named(case):
    body, status, words = NOT_IN_ORDER[case]
    ended = device_passes.run(HEAD + body)
    assert ended.returncode == status, ended.stderr
    assert re.search(words, ended.stderr), ended.stderr
