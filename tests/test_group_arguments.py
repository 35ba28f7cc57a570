"""What ranks are told of wrong arguments of GroupAllreduce, and of those that differ."""

import time

import numpy as np
import pytest
from together import before_transports, same_everywhere

from collectives import ClosedError, GroupAllreduce, RankFailedError

pytestmark = pytest.mark.mpi

READ_ONLY = np.zeros(3)
READ_ONLY.flags.writeable = False
UNALIGNED = np.zeros(25, np.uint8)[1:].view(np.float64)


def assert_same_error_everywhere(comm, kind, make):
    with pytest.raises(kind) as caught:
        make()
    assert same_everywhere(comm, str(caught.value))
    return str(caught.value)


@before_transports
@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize(
    ("kind", "message", "settings"),
    [
        (ValueError, "group_size is 0, not between 1 and", {"group_size": 0}),
        (ValueError, "group_size is 99, not between 1 and", {"group_size": 99}),
        (TypeError, "group_size is 1.5, not an integer", {"group_size": 1.5}),
        (ValueError, "sync_period is 0, less than 1", {"sync_period": 0}),
        (ValueError, f"sync_period is {2**70}, more than {2**60}", {"sync_period": 2**70}),
        (TypeError, "sync_period is None, not an integer", {"sync_period": None}),
        (ValueError, "wait is 'all', not one of nobody, group", {"wait": "all"}),
        (ValueError, "late is 'lost', not one of paper, conserving", {"late": "lost"}),
        (TypeError, "like is a float, not a numpy array", {"like": 1.0}),
        (TypeError, "like is of dtype int64", {"like": np.zeros(3, np.int64)}),
        (TypeError, "like is of dtype >f8", {"like": np.zeros(3, ">f8")}),
        (ValueError, "like has 2 dimensions", {"like": np.zeros((3, 3))}),
        (ValueError, "like is empty", {"like": np.zeros(0)}),
        (
            ValueError,
            "like is not contiguous: pass a copy, x.copy(), and",
            {"like": np.zeros(6)[::2]},
        ),
        (ValueError, "like is not aligned", {"like": UNALIGNED}),
        (ValueError, "like is read-only", {"like": np.broadcast_to(0.0, 1)}),
    ],
)
@pytest.mark.parametrize("wrong_rank", [0, -1])
def test_wrong_arguments_on_one_rank_raise_on_all(comm, kind, message, settings, wrong_rank):
    wrong_rank %= comm.size
    right = {"like": np.zeros(3), "group_size": 1}
    arguments = {**right, **(settings if comm.rank == wrong_rank else {})}
    like = arguments.pop("like")
    text = assert_same_error_everywhere(comm, kind, lambda: GroupAllreduce(comm, like, **arguments))
    assert text.startswith(message if comm.size == 1 else f"rank {wrong_rank}: {message}")


@before_transports
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize(
    ("name", "settings", "values"),
    [
        ("length", {"like": np.zeros(4)}, "3 on ranks 0, 2(-3)?; 4 on rank 1"),
        ("dtype", {"like": np.zeros(3, np.float32)}, "float64 on ranks.*; float32 on rank 1"),
        ("group_size", {"group_size": 2}, "1 on ranks.*; 2 on rank 1"),
        ("sync_period", {"sync_period": 7}, "10 on ranks.*; 7 on rank 1"),
        ("wait", {"wait": "group"}, "nobody on ranks.*; group on rank 1"),
        ("late", {"late": "paper"}, "conserving on ranks.*; paper on rank 1"),
    ],
)
def test_settings_that_differ_raise_on_all_and_name_ranks_and_values(comm, name, settings, values):
    arguments = {"like": np.zeros(3), "group_size": 1, "late": "conserving"}
    arguments.update(settings if comm.rank == 1 else {})
    like = arguments.pop("like")
    with pytest.raises(ValueError, match=f"{name} differs between ranks: {values}"):
        GroupAllreduce(comm, like, **arguments)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("kind", "message", "wrong"),
    [
        (TypeError, "the vector is a list, not a numpy array", [0.0, 0.0, 0.0]),
        (
            TypeError,
            "the vector is of dtype float32, the collective's of float64",
            np.zeros(3, "f"),
        ),
        (TypeError, "the vector is of dtype int64", np.zeros(3, np.int64)),
        (ValueError, "the vector has 4 elements, the collective's have 3", np.zeros(4)),
        (ValueError, "the vector has 2 dimensions, not one", np.zeros((3, 1))),
        (ValueError, "the vector is not contiguous: pass a copy, x.copy", np.zeros(6)[::2]),
        (ValueError, "the vector is not aligned", UNALIGNED),
        (ValueError, "the vector is read-only", READ_ONLY),
    ],
)
def test_a_wrong_vector_raises_and_the_other_ranks_learn_of_it(comm, kind, message, wrong):
    """Also those that wait in a synchronization, to which rank 1 will never come."""
    mine = np.zeros(3)
    with GroupAllreduce(comm, mine, group_size=2, sync_period=10_000) as average:
        if comm.rank == 1:
            with pytest.raises(kind, match=message):
                average(wrong)
            assert average.version == 0
            with pytest.raises(ClosedError, match="this rank failed in an earlier call"):
                average(mine)
        else:
            with pytest.raises(
                RankFailedError, match=f"rank 1 failed, .* {kind.__name__}: {message}"
            ):
                if comm.rank == 2:
                    average.synchronize(mine)
                while True:
                    average(mine)
                    time.sleep(0.001)
