"""Which arrays and streams are taken for ones on a device, and what is said of others."""

from types import SimpleNamespace

import numpy as np
import pytest

import collectives
from collectives import CudaError, GroupAllreduce

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1)]

N = 3000


class Altered:
    """An array on a device whose interface says something else; None: it does not say it."""

    def __init__(self, array, **changes):
        self.array, self.changes = array, changes

    @property
    def __cuda_array_interface__(self):
        interface = {**self.array.__cuda_array_interface__, **self.changes}
        return {name: value for name, value in interface.items() if value != "none"}


class Raising:
    """What torch does where a tensor requires grad, or is on the CPU."""

    def __init__(self, error):
        self.error = error

    @property
    def __cuda_array_interface__(self):
        raise self.error


@pytest.fixture
def x(device, stream):
    return device.array(np.arange(float(N)), stream)


RIGHT = {
    "version 2, without a stream": {"version": 2, "stream": "none"},
    "without strides": {"strides": "none"},
    "strides of contiguous memory": {"strides": (8,)},
    "no mask": {"mask": None},
    "the legacy default stream": {"stream": 1},
    "the thread's default stream": {"stream": 2},
    "a list for a shape": {"shape": [N]},
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_an_array_may_say_of_itself(comm, device, x, case):
    device.synchronize(x.stream)
    array = Altered(x, **RIGHT[case])
    with GroupAllreduce(comm, array, sync_period=1) as average:
        assert average(array).synchronized
    stream = array.__cuda_array_interface__.get("stream")
    np.testing.assert_array_equal(x.get(stream), np.arange(N))


WRONG = {
    "integers": ({"typestr": "<i4"}, TypeError, "is of type <i4, not one of float16, bfloat16,"),
    "complex": ({"typestr": "<c16"}, TypeError, "is of type <c16"),
    "another byte order": ({"typestr": ">f8"}, TypeError, "is of type >f8.*byte order"),
    "a matrix": ({"shape": (N // 2, 2)}, ValueError, "has 2 dimensions, not one"),
    "nothing": ({"shape": (0,)}, ValueError, "is empty"),
    "strides": ({"strides": (16,)}, ValueError, "is not contiguous: pass a copy"),
    "from the end": ({"strides": (-8,)}, ValueError, "is not contiguous"),
    "a mask": ({"mask": object()}, ValueError, "is not contiguous"),
    "no data": ({"data": "none"}, TypeError, "no valid __cuda_array_interface__: KeyError: 'data'"),
    "no shape": ({"shape": None}, TypeError, "no valid __cuda_array_interface__: TypeError"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("where", ["like", "the vector", "array 1 of the vector"])
def test_an_array_that_cannot_be_averaged_raises(comm, x, case, where):
    changes, kind, words = WRONG[case]
    array = Altered(x, **changes)
    if where == "like":
        with pytest.raises(kind, match=f"like {words}|like has {words}"):
            GroupAllreduce(comm, array)
        return
    listed = where != "the vector"
    other = x.device.array(np.zeros(5), x.stream)
    with (
        GroupAllreduce(comm, [other, x] if listed else x) as average,
        pytest.raises(kind, match=f"{where} (has )?{words}"),
    ):
        average([other, array] if listed else array)


def test_addresses_are_those_of_whole_elements_in_one_device_s_memory(comm, device, x):
    for address, words in (
        (x.address + 4, "is not aligned"),
        (np.zeros(N).ctypes.data, "is not an address in a device's memory"),
        (device.pin(8 * N), "is not an address in a device's memory"),
    ):
        with pytest.raises(ValueError, match=words):
            GroupAllreduce(comm, Altered(x, data=(address, False)))


def test_what_is_read_only_can_be_published_and_no_more(comm, x):
    constant = Altered(x, data=(x.address, True))
    with pytest.raises(ValueError, match="like is read-only"):
        GroupAllreduce(comm, constant)
    with GroupAllreduce(comm, x) as average:
        average.publish(constant)
        with pytest.raises(ValueError, match="the vector is read-only"):
            average(constant)


def test_vectors_are_of_the_dtypes_and_lengths_that_the_collective_has(comm, device, stream, x):
    halves = device.array(np.zeros(N, np.float16), stream)
    short = device.array(np.zeros(N - 1), stream)
    for like, vector, kind, words in (
        (x, halves, TypeError, "the vector is of dtype float16, the collective's of float64"),
        (x, short, ValueError, f"the vector has {N - 1} elements, the collective's have {N}"),
        (x, [x], TypeError, "the vector is a list, not one array"),
        ([x], x, TypeError, "the vector is a Array, not a list of 1 arrays"),
        ([x], [x, short], ValueError, "the vector has 2 arrays, the collective's have 1"),
        ([x, short], [x, x], ValueError, "array 0 of the vector and array 1 of the vector share"),
    ):
        with GroupAllreduce(comm, like) as average, pytest.raises(kind, match=words):
            average(vector)
    with pytest.raises(ValueError, match=r"like\[0\] and like\[2\] share memory"):
        GroupAllreduce(comm, [x, short, x])


def test_a_list_has_arrays_on_devices_or_on_the_host(comm, x):
    host = np.zeros(N)
    with pytest.raises(TypeError, match=r"like\[1\] is a ndarray, which is not on a device"):
        GroupAllreduce(comm, [x, host])
    with pytest.raises(TypeError, match=r"like\[1\] is a Array, not a numpy array"):
        GroupAllreduce(comm, [host, x])


def test_a_tensor_that_requires_grad_is_named(comm, x):
    with pytest.raises(TypeError, match="like has no __cuda_array_interface__: detach it first"):
        GroupAllreduce(comm, Raising(RuntimeError("detach it first")))


# Streams


@pytest.mark.parametrize("name", ["handle", "ptr", "cuda_stream", "native_handle"])
def test_a_stream_is_a_handle_or_has_one(comm, device, x, name):
    """The array's interface names none, so that without stream= nothing orders its use."""
    handle = x.stream
    x.stream = None
    stream = handle if name == "handle" else SimpleNamespace(**{name: handle})
    device.synchronize(handle)
    with GroupAllreduce(comm, x, sync_period=1) as average:
        device.sleep(0.01, handle)
        device.write(x, np.ones(N), handle)
        average(x, stream=stream)
        average.publish(x, stream=stream)
        average.start(x, stream=stream).wait()
        device.write(x, np.ones(N), handle)
        with average.joining(x, stream=stream):
            pass
        np.testing.assert_array_equal(x.get(handle), 1)


@pytest.mark.parametrize("given", ["0", 1.0, True, -1, SimpleNamespace(ptr=None)])
def test_what_is_no_stream_raises(comm, x, given):
    words = "neither a handle nor an object with ptr, cuda_stream or native_handle"
    with GroupAllreduce(comm, x) as average, pytest.raises(TypeError, match=words):
        average(x, stream=given)


def test_arrays_that_name_different_streams_need_one_to_be_given(comm, device, x):
    other = device.array(np.zeros(N), device.create_stream())
    device.synchronize(other.stream)
    with pytest.raises(ValueError, match="name different streams: pass stream="):
        GroupAllreduce(comm, [x, other])
    other.stream = None
    with GroupAllreduce(comm, [x, other]) as average:
        average([x, other])
    np.testing.assert_array_equal(other.get(x.stream), 0)


def test_arrays_on_devices_without_a_collective_for_them_are_no_numpy_arrays(comm, x):
    with GroupAllreduce(comm, np.zeros(N)) as average:
        with pytest.raises(TypeError, match="numpy"):
            average(x)
        with pytest.raises(TypeError, match="stream"):
            average(np.zeros(N), stream=1)


def test_errors_of_the_driver_are_no_errors_between_ranks():
    assert issubclass(CudaError, RuntimeError)
    assert not issubclass(CudaError, collectives.CollectiveError)
