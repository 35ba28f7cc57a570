"""What collectives are given, in one process: which dtypes, weights and arrays they take."""

from __future__ import annotations

import inspect
from importlib import resources

import ml_dtypes
import numpy as np
import pytest
import torch
from mpi4py import MPI

import collectives
from collectives import GroupAllreduce, PushSum
from collectives.description import Described
from collectives.settings import array_error, checked_weight, sharing_error, vector_error

ALONE = MPI.COMM_SELF


@pytest.mark.parametrize("package", ["wagma", "collectives"])
def test_packages_say_that_they_have_types(package):
    assert (resources.files(package) / "py.typed").is_file()


PUBLIC = [getattr(collectives, name) for name in collectives.__all__]
COLLECTIVES = [kind for kind in PUBLIC if isinstance(kind, type) and issubclass(kind, Described)]


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_methods_with_a_vector_take_a_stream_which_they_refuse_for_numpy_arrays(kind):
    assert len(COLLECTIVES) == 10
    with kind(ALONE, np.zeros(3)) as collective:
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            parameters = inspect.signature(method).parameters
            if "vector" not in parameters or (name.startswith("_") and name != "__call__"):
                continue
            assert parameters["stream"].kind is inspect.Parameter.KEYWORD_ONLY
            version = [0] if "version" in parameters else []
            says = pytest.raises(TypeError, match="^stream is given, but the collective was made")
            with says, getattr(collective, name)(np.zeros(3), *version, stream=1):
                pass


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (None, None),
        ("float16", "float16"),
        (np.float16, "float16"),
        (np.dtype("float16"), "float16"),
        (torch.float16, "float16"),
        ("bfloat16", "bfloat16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
        (torch.bfloat16, "bfloat16"),
    ],
)
def test_a_wire_dtype_is_a_name_or_a_dtype(dtype, name):
    with GroupAllreduce(ALONE, np.zeros(3), group_size=1, wire_dtype=dtype) as average:
        assert average.wire_dtype == name


@pytest.mark.parametrize(
    "dtype", ["int8", "half", 16, float, np.float32, np.dtype(">f2"), torch.float64, ["float16"]]
)
def test_another_wire_dtype_is_refused(dtype):
    with pytest.raises(ValueError) as raised:
        GroupAllreduce(ALONE, np.zeros(3), group_size=1, wire_dtype=dtype)
    assert str(raised.value) == f"wire_dtype is {dtype!r}, not one of float16, bfloat16"


@pytest.mark.parametrize("weight", [True, False, np.True_])
def test_a_bool_is_no_weight(weight):
    message = f"^weight is a {type(weight).__name__}, not a number$"
    with pytest.raises(TypeError, match=message):
        checked_weight(weight)
    average = GroupAllreduce(ALONE, np.zeros(3), group_size=1)
    with average, pytest.raises(TypeError, match=message):
        average(np.zeros(3), weight=weight)
    with pytest.raises(TypeError, match=message):
        PushSum(ALONE, np.zeros(3), weight=weight)


def test_numbers_are_weights():
    for weight in (1, 0.5, np.float32(2), np.int64(3), torch.tensor(4.0)):
        assert checked_weight(weight) == float(weight)


Y = np.arange(12.0)


@pytest.mark.parametrize(
    ("arrays", "pair"),
    [
        ([Y, Y], (0, 1)),
        ([Y[6:], np.zeros(3), Y[:7]], (0, 2)),
        ([Y[4:6], Y], (0, 1)),
        ([np.zeros(2), Y, Y[11:]], (1, 2)),
        ([Y, Y.view(np.float32)], (0, 1)),
        ([Y[:5], Y[5:7], Y[7:], Y[6:8]], (1, 3)),
    ],
)
def test_arrays_of_one_list_that_share_memory_are_refused(arrays, pair):
    first, second = pair
    message = rf"^like\[{first}\] and like\[{second}\] share memory, which would be averaged tw"
    for like in (arrays, tuple(arrays)):
        with pytest.raises(ValueError, match=message):
            GroupAllreduce(ALONE, like, group_size=1)


def test_parts_of_one_array_may_be_averaged_together():
    random = np.random.default_rng(0)
    for _ in range(20):
        cuts = np.sort(random.choice(np.arange(1, 12), 5, replace=False))
        parts = np.split(Y, cuts)
        random.shuffle(parts)
        assert vector_error(parts) is None
        whole = [*parts, Y]
        assert "share memory" in str(sharing_error(whole, "array {} of the vector"))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3)), "x has 2 dimensions, not one: pass x.reshape(-1), a view of it"),
        (np.zeros(()), "x has 0 dimensions, not one: pass x.reshape(-1), a view of it"),
        (np.zeros((2, 3))[:, :2], "x has 2 dimensions, not one"),
        (
            torch.zeros(3),
            "x is a Tensor, not a numpy array: pass x.detach().numpy(), which shares its memory",
        ),
        (
            torch.nn.Parameter(torch.zeros(2, 3)),
            "x is a Parameter, not a numpy array: pass x.detach().numpy(), which shares its memory",
        ),
        (
            torch.zeros(3, device="meta"),
            "x is a Tensor, not a numpy array: it is on meta; pass a host copy, "
            "x.detach().cpu().numpy(), and copy the result back",
        ),
        ([1.0, 2.0], "x is a list, not a numpy array"),
    ],
)
def test_what_is_no_vector_is_refused_with_what_to_pass_instead(array, message):
    assert str(array_error("x", array)) == message
