"""Ranks that run out of memory: all ranks learn of it, and all can leave."""

import contextlib
import gc
import os
import re
from collections import Counter
from itertools import product

import numpy as np
import pytest
from devices import CASES
from together import before_transports

from collectives import (
    CollectiveError,
    CudaError,
    GeneratedGroupAllreduce,
    GroupAllreduce,
    NeighborAverage,
    PairwiseAverage,
    ParameterServer,
    PartialAllreduce,
    PushSum,
    QueuedNeighborAverage,
    ReadyGroupAllreduce,
    TriggeredAverage,
)
from collectives.memory.allocation import fail_after

pytestmark = pytest.mark.mpi

INSIDE, IN_BLOCKS, IN_TURNS = 10, 70_000, 550_000  # float64s: how peers send so many
ON_DEVICES = 5000  # several blocks of the tests'
CALLS = 6
MOST = 1e200  # no sum of what ranks add, but memory that nobody has written may hold more
OUT_OF_MEMORY = "can share|CUDA_ERROR_OUT_OF_MEMORY"

PEERS = {
    "neighbors": NeighborAverage,
    "push": PushSum,
    "pairs": PairwiseAverage,
    "server": ParameterServer,
    "asp": lambda *args: ParameterServer(*args, mode="asp"),
    "async-local": lambda *args: ParameterServer(*args, mode="async-local"),
    "hop": QueuedNeighborAverage,
    "hop with backup": lambda *args: QueuedNeighborAverage(*args, backup=1, max_skip=3),
    "hop with acks": lambda *args: QueuedNeighborAverage(*args, mode="notify-ack"),
}
GROUPS = {
    "ready": lambda *args: ReadyGroupAllreduce(*args, group_size=2),
    "smart": GeneratedGroupAllreduce,
    "random": lambda *args: GeneratedGroupAllreduce(*args, groups="random"),
    "static": lambda *args: GeneratedGroupAllreduce(*args, groups="static", ranks_per_node=1),
    "groups": lambda *args: GroupAllreduce(*args, group_size=2, sync_period=3),
    "partial": lambda *args: PartialAllreduce(*args, sync_period=3),
    "triggered": lambda *args: TriggeredAverage(*args, sync_period=2),
}
KINDS = PEERS | GROUPS


def once_only(kind):
    """Skip what would be the same again: peers send messages, whatever the transport is."""
    peers = {*PEERS, "queues", "push-sum"}
    if kind in peers and os.environ["WAGMA_TRANSPORT"] == "shared":
        pytest.skip("peers send messages with either transport")


@pytest.fixture(autouse=True)
def memory_afterwards():
    yield
    fail_after(-1)


def construct(comm, make, vector, successes, once=False):
    """Return the collective, None without memory; and whether an allocation has failed here."""
    if comm.rank == comm.size - 1:
        fail_after(successes, once)
    try:
        return make(comm, vector), fail_after(-1) == -2
    except (MemoryError, RuntimeError) as error:
        # With WAGMA_TRANSPORT=shared, nothing takes the place of memory that cannot be shared.
        assert isinstance(error, MemoryError) or re.search(OUT_OF_MEMORY, str(error)), error
        return None, fail_after(-1) == -2


def close(collective):
    """Close a collective that may have failed once it was made."""
    if collective is not None:
        with contextlib.suppress(CollectiveError):
            collective.close()
        assert collective.closed


def use(comm, collective, vector, successes, ranks, once=False):
    """Make calls on all ranks, on `ranks` with so many allocations; return what went wrong.

    Returns:
        The error of this rank's calls in words, or None, and whether an allocation has failed.
    """
    try:
        with collective:
            comm.Barrier()
            if comm.rank in ranks:
                fail_after(successes, once)
            while collective.version < CALLS:
                if isinstance(vector, np.ndarray):  # what is on a device stays as it is
                    vector += 1
                collective(vector)
            collective.synchronize(vector)
    except (CollectiveError, CudaError, MemoryError) as error:
        # The error itself would keep the collective's memory.
        return repr(error), fail_after(-1) == -2
    return None, fail_after(-1) == -2


def check_calls(comm, make, vector, successes, ranks, once=False):
    """Check that all ranks leave, after errors on all or none; return whether memory failed."""
    collective = make(comm, vector)
    error, failed = use(comm, collective, vector, successes, ranks, once)
    errors, any_failed = zip(*comm.allgather((error, failed)))
    assert collective.closed
    assert not any(errors) or any(any_failed), errors
    if isinstance(vector, np.ndarray):  # what an error leaves in it has been a rank's
        assert np.abs(vector).max() <= MOST, vector
    if failed and error is not None:
        assert "memory" in error.lower() or "failed" in error, error
    return any(any_failed)


def check_construction(comm, make, vector, successes, once=False):
    """Check that all ranks have the collective or none; return whether memory failed."""
    collective, failed = construct(comm, make, vector, successes, once)
    made, any_failed = zip(*comm.allgather((collective is not None, failed)))
    assert len(set(made)) == 1
    assert made[0] or any(any_failed)
    close(collective)
    return any(any_failed)


def check_all(check):
    """Let more and more allocations succeed, until none fails."""
    successes = 0
    while check(successes):
        successes += 1


def check_all_calls(comm, make, vector):
    """Check calls where one allocation fails on a rank, and where all later ones do on another."""
    check_all(lambda n: check_calls(comm, make, vector, n, [0], once=True))
    check_all(lambda n: check_calls(comm, make, vector, n, [comm.size - 1]))


def check_everything(comm, make, vector):
    check_all(lambda n: check_construction(comm, make, vector, n))
    check_all_calls(comm, make, vector)


@pytest.mark.ranks(3)
@before_transports
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_raises_where_one_has_no_memory_for_a_collective(comm, kind):
    vector = np.zeros(IN_BLOCKS)
    for successes in (3, 30):
        check_construction(comm, KINDS[kind], vector, successes)


@pytest.mark.ranks(3)
@before_transports
@pytest.mark.parametrize("length", [INSIDE, IN_TURNS])
@pytest.mark.parametrize("kind", PEERS)
def test_a_rank_without_memory_for_what_arrives_lets_the_others_leave(comm, kind, length):
    vector = np.zeros(length)
    check_calls(comm, KINDS[kind], vector, 5, ranks=[1])
    check_calls(comm, KINDS[kind], vector, 3, ranks=range(comm.size))


@pytest.mark.ranks(3)
@before_transports
@pytest.mark.parametrize("kind", GROUPS)
def test_groups_need_no_more_memory_than_a_call_says(comm, kind):
    check_calls(comm, KINDS[kind], np.zeros(IN_BLOCKS), 1, ranks=[1])


def holders():
    """Count the objects that hold vectors, or would keep them: all of `collectives.memory`."""
    counts = Counter(map(type, gc.get_objects()))
    return {
        kind: count
        for kind, count in counts.items()
        if str(kind.__module__).startswith("collectives.memory")
    }


@pytest.mark.ranks(3)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_collective_is_freed_with_its_last_reference(comm, kind, fails):
    gc.collect()
    gc.disable()
    try:
        before = holders()
        check_calls(comm, KINDS[kind], np.zeros(IN_BLOCKS), 3, ranks=[1] if fails else [])
        assert holders() == before
    finally:
        gc.enable()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", CASES)
def test_a_rank_without_memory_on_a_device_lets_the_others_leave(comm, case, device, stream):
    vector = device.array(np.zeros(ON_DEVICES), stream)
    for successes in (3, 30):
        check_construction(comm, CASES[case].make, vector, successes)
    check_calls(comm, CASES[case].make, vector, 1, ranks=[1])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", CASES)
def test_a_collective_that_is_not_made_leaves_nothing_on_a_device(comm, case, direct, stream):
    vector = direct.array(np.zeros(ON_DEVICES), stream)
    direct.free_pinned()
    gc.collect()
    gc.disable()
    try:
        before = direct.counts()
        for successes in (3, 10, 30):
            check_construction(comm, CASES[case].make, vector, successes)
        after = direct.counts()
    finally:
        gc.enable()
    assert after.device_bytes == before.device_bytes
    assert after.pinned_bytes == before.pinned_bytes


@pytest.mark.extra
@pytest.mark.parametrize("once", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_allocation_of_a_constructor_may_fail(comm, kind, once):
    vector = np.zeros(IN_BLOCKS)
    check_all(lambda n: check_construction(comm, KINDS[kind], vector, n, once))


@pytest.mark.extra
@pytest.mark.parametrize(
    ("kind", "length"),
    [
        *product(KINDS, (INSIDE,)),
        *product(("groups", "hop"), (IN_BLOCKS,)),
        *(
            pytest.param(kind, IN_BLOCKS, marks=pytest.mark.long)
            for kind in KINDS
            if kind not in ("groups", "hop")
        ),
        *(
            pytest.param(kind, IN_TURNS, marks=pytest.mark.long)
            for kind in ("hop", "neighbors", "pairs", "asp")
        ),
    ],
)
def test_every_allocation_of_calls_may_fail(comm, kind, length):
    once_only(kind)
    vector = np.zeros(length)
    check_all_calls(comm, KINDS[kind], vector)
    check_all(lambda n: check_calls(comm, KINDS[kind], vector, n, range(comm.size)))


@pytest.mark.extra
@pytest.mark.long
@pytest.mark.transports("messages")
@pytest.mark.parametrize("case", CASES)
def test_every_allocation_may_fail_where_vectors_are_staged(comm, case, device, stream):
    check_everything(comm, CASES[case].make, device.array(np.zeros(ON_DEVICES), stream))


@pytest.mark.extra
@pytest.mark.parametrize("case", CASES)
def test_every_allocation_may_fail_where_devices_average(comm, case, direct, stream):
    once_only(case)
    check_everything(comm, CASES[case].make, direct.array(np.zeros(ON_DEVICES), stream))
