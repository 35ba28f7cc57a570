"""Groups that a protocol forms, of vectors on devices: copied in blocks while they are averaged."""

import contextlib
import threading
import time
import weakref

import numpy as np
import pytest
import stand_in
from devices import vectors_of
from formed_groups import PlannedGroups, RandomGroups
from stand_in import ILLEGAL_ADDRESS
from test_device_errors_mpi import (
    close_after_failure,
    hear_that_rank_1_failed,
    wait_for_blocks,
)
from test_device_mpi import OnDevice, OnHost
from test_formed_groups_mpi import form
from together import Interrupted, bytes_of, compute_until, interrupt, interrupted, signalled

import collectives
from collectives import CudaError, ReadyGroupAllreduce

pytestmark = pytest.mark.mpi

# In one call and several, of some ranks and all, of which some only get the mean.
PLAN = [
    [(0, (0, 1, 2), (1, 2, 0))],
    [(1, (0, 1), (1, 0)), (2, (2, 3)), (3, (0, 2))],
    [(4, (0, 1, 2))],
    [(5, (1, 2)), (6, (0, 1, 2, 3))],
    [],
    [(7, (0, 2)), (8, (0, 1))],
]
NOT_FINITE = [(0, 1), (1, 2), (3, 3), (5, 0)]  # in which calls on which ranks


def formed_in(comm, model):
    """Return what is made of a model in the calls of the plan, and counted."""
    history = []
    plan = [[group for group in groups if max(group[1]) < comm.size] for groups in PLAN]
    with form(comm, model.arrays, PlannedGroups, plan=plan) as collective:
        for t in range(len(PLAN)):
            with np.errstate(over="ignore"):
                values = [x + x.dtype.type((comm.rank + t) / 4) for x in model.get()]
            if (t, comm.rank) in NOT_FINITE:
                values[-1][-1] = np.inf
            model.set(values)
            history += [collective(model.arrays), bytes_of(model.get())]
        history.append(collective.statistics()[:7])
    return history


@pytest.fixture(params=["staged", "direct"])
def either(request, device):
    """A device whose vectors are averaged on the host, and one that averages them itself."""
    return device if request.param == "staged" else request.getfixturevalue("direct")


@pytest.mark.ranks(3, 4)
def test_groups_one_after_the_other_get_the_bits_of_the_host(comm, device, stream, monkeypatch):
    monkeypatch.setattr(collectives.device, "BLOCK", 2**17)
    arrays = vectors_of(0, comm.size, [150_000, 30_000, 60_000], ["float32", "float16", "float64"])
    assert formed_in(comm, OnDevice(arrays, device, stream)) == formed_in(comm, OnHost(arrays))


@pytest.mark.transports("messages")
@pytest.mark.parametrize("length", [3, 70_000])
def test_who_is_behind_averages_its_model_meanwhile_where_ranks_are_passive(
    comm, either, stream, length
):
    """With equal weights, the sum of what all ranks have changes by their changes alone."""
    mine = either.array(np.zeros(length), stream)
    settings = {"late": "passive", "equal": True, "most_awaited": 1}
    with form(comm, mine, RandomGroups, **settings) as collective:
        for _ in range(6):
            now = mine.get()
            either.sleep(0.005 * comm.rank, stream)
            either.write(mine, now + comm.rank, stream)
            collective(mine)
        collective.synchronize(mine)
    np.testing.assert_allclose(mine.get(), 6 * (comm.size - 1) / 2, rtol=1e-12)


@contextlib.contextmanager
def wanting_the_gil():
    """Let another thread take the GIL whenever it can, in the block."""
    ended = threading.Event()

    def compute():
        while not ended.is_set():
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.transports("messages")
def test_operations_end_while_the_progress_thread_is_in_a_protocol_in_python(comm, device, stream):
    """It has the collective's lock then, and waits for the GIL."""
    mine = device.array(np.full(3, float(comm.rank)), stream)
    with (
        form(comm, mine, RandomGroups, late="passive", equal=True, most_awaited=1) as collective,
        wanting_the_gil() if comm.rank == 0 else contextlib.nullcontext(),
    ):
        for _ in range(20):
            collective(mine)
            collective.synchronize(mine)
    np.testing.assert_allclose(mine.get(), (comm.size - 1) / 2, rtol=1e-12)


ALL = {
    "ready": lambda comm, like: ReadyGroupAllreduce(comm, like, group_size=max(comm.size, 2)),
    "planned": lambda comm, like: form(
        comm, like, PlannedGroups, plan=[[(t, range(comm.size))] for t in range(9)]
    ),
}


@contextlib.contextmanager
def meanwhile(act):
    """Do something beside the block, and raise what goes wrong with that."""
    errors = []

    def run():
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        assert not errors, errors


@pytest.mark.parametrize("kind", ALL)
def test_the_first_blocks_are_given_back_while_the_last_are_on_their_way(
    comm, device, in_blocks, kind
):
    vector, blocks = in_blocks

    def open_when_first_are_back():
        try:
            wait_for_blocks(device, copies, blocks)
        finally:
            comm.Barrier()
            device.open()

    with ALL[kind](comm, vector) as collective:
        copies = device.counts().copies
        comm.Barrier()
        with device.holding_copies(blocks // 2), meanwhile(open_when_first_are_back):
            assert collective(vector).group == tuple(range(comm.size))
        np.testing.assert_array_equal(vector.get(), (comm.size - 1) / 2)
        assert device.counts().copies <= copies + 2 * blocks + 1


# Who is late


def test_a_rank_whose_stream_is_busy_is_in_no_group_and_holds_nobody_up(comm, either, stream):
    vector = either.array(np.full(10_000, float(comm.rank)), stream)
    others = [rank for rank in range(comm.size) if rank != 1]
    with ReadyGroupAllreduce(comm, vector, group_size=len(others), history=1000) as average:
        if comm.rank == 1:
            either.call("stand_in_hold", stand_in.handle(stream))
            with meanwhile(lambda: (compute_until(comm, False), either.open())):
                result = average(vector)
            assert result.group == (1,)
            assert average.version == 1
            if average.path == "staged":
                np.testing.assert_array_equal(average.on_host, 1)
        else:
            for _ in range(4):
                assert average(vector).group == tuple(others)
            compute_until(comm, True)
    expected = 1 if comm.rank == 1 else np.mean(others)
    np.testing.assert_allclose(vector.get(), expected, rtol=1e-14)


@pytest.mark.transports("messages")
def test_calls_that_average_with_nobody_copy_nothing_back(comm, device, stream):
    vectors = [device.array(np.full(9000, float(comm.rank)), stream) for _ in range(5)]
    alive = [weakref.ref(vector) for vector in vectors]
    with ReadyGroupAllreduce(comm, vectors[0], sync_every=3) as collective:
        copies = device.counts().copies
        for _ in range(2):
            assert collective(vectors[0]).group == (comm.rank,)
        assert device.counts().copies == copies
        if comm.rank:
            collective.join(vectors[0])
        else:
            # Nobody else makes calls.
            blocks = len(vectors) - 1
            for vector in vectors[1:]:
                for _ in range(3):
                    assert collective(vector).group == (0,)
            del vector
            assert device.counts().copies <= copies + 9 * blocks
            for vector in vectors[1:]:
                np.testing.assert_array_equal(vector.get(), comm.rank)
            del vectors[1:], vector
            assert [each() is None for each in alive[1:]] == [True, True, False, False]
            # One that is not finite does not count, whatever the last call's was.
            device.write(vectors[0], np.full(9000, np.nan), stream)
            collective.join(vectors[0])
        np.testing.assert_allclose(vectors[0].get(), comm.size / 2)


# What goes wrong


@pytest.mark.ranks(1, 4)
@pytest.mark.transports("messages")
@pytest.mark.parametrize("kind", ["ready", "planned"])
def test_an_exception_while_the_device_is_behind_leaves_a_call_to_be_made(comm, either, kind):
    stream = either.create_stream()
    vector = either.array(np.full(5000, 1.0 + comm.rank), stream)
    with ALL[kind](comm, vector) as average:
        with either.holding(stream):
            with interrupted():
                average(vector)
            assert average.version == 0
            either.write(vector, np.full(5000, 2.0 + comm.rank), stream)
        assert average(vector).version == 0
        np.testing.assert_array_equal(vector.get(), 2.0 + (comm.size - 1) / 2)


def test_an_exception_in_the_middle_ends_the_call_and_not_the_rank_s_part_in_its_group(
    comm, device, in_blocks
):
    vector, blocks = in_blocks
    mean = (comm.size - 1) / 2

    def open_later():
        threading.Timer(0.1, device.open).start()
        interrupt()

    with ALL["planned"](comm, vector) as collective:
        if comm.rank == 1:
            copies = device.counts().copies
            with (
                device.holding_copies(blocks // 2),
                signalled(open_later, 0.01, lambda: device.counts().copies > copies + blocks),
                pytest.raises(Interrupted),
            ):
                collective(vector)
            left = vector.get()
            assert set(left) <= {mean, 1.0}
            assert left[0] == mean
            device.write(vector, left + np.float32(8), vector.stream)
        else:
            collective(vector)
            np.testing.assert_array_equal(vector.get(), mean)
        assert collective(vector).version == 1
        assert collective.statistics().versions == 2
    if comm.rank == 1:
        after = (left + np.float32(8)) / comm.size + mean * (comm.size - 1) / comm.size
    after = comm.bcast(after if comm.rank == 1 else None, root=1)
    np.testing.assert_allclose(vector.get(), after, rtol=1e-6)


@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_a_device_that_fails_is_named_everywhere_and_nobody_hangs(comm, device, in_blocks, when):
    vector, blocks = in_blocks

    def fail():
        if when == "in the middle":
            wait_for_blocks(device, copies, blocks)
        device.fail(ILLEGAL_ADDRESS)

    average = ALL["ready"](comm, vector)
    if comm.rank == 1:
        copies = device.counts().copies
        middle = when == "in the middle"
        with (
            device.holding_copies(blocks // 2) if middle else device.holding(vector.stream),
            meanwhile(fail),
            pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"),
        ):
            average(vector)
        with pytest.raises(collectives.ClosedError, match="this rank failed"):
            average(vector)
    else:
        hear_that_rank_1_failed(average, vector)
    close_after_failure(comm, device, average)


# From device to device


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("length", [70, 60_000])
def test_devices_get_the_bits_of_the_host_in_shared_memory(
    comm, direct, stream, length, monkeypatch
):
    arrays = vectors_of(0, comm.size, [5 * length // 2, length], ["float32", "float16"])
    on_devices = formed_in(comm, OnDevice(arrays, direct, stream))
    monkeypatch.setenv("WAGMA_TRANSPORT", "shared")
    assert on_devices == formed_in(comm, OnHost(arrays))


def test_an_exception_leaves_a_group_what_was_given(comm, direct, stream):
    vector = direct.array(np.full(2**18, float(comm.rank), np.float32), stream)
    with ALL["planned"](comm, vector) as collective:
        assert collective.path == "direct"
        if comm.rank == 1:
            with interrupted():
                collective(vector)
            assert set(vector.get()) == {1.0}
            direct.write(vector, np.full(2**18, 9, np.float32), stream)
        comm.Barrier()
        if comm.rank != 1:
            collective(vector)
            np.testing.assert_array_equal(vector.get(), (comm.size - 1) / 2)
        assert collective(vector).version == 1
        expected = (9 + (comm.size - 1) ** 2 / 2) / comm.size
        np.testing.assert_allclose(vector.get(), expected, rtol=1e-6)


@pytest.mark.parametrize("when", ["before", "in a group"])
def test_a_device_that_averages_and_fails_is_named_everywhere(comm, direct, stream, when):
    vector = direct.array(np.zeros(2**18, np.float32), stream)
    direct.synchronize(stream)
    average = ALL["ready"](comm, vector)
    assert average.path == "direct"

    def fail():
        time.sleep(0.1)
        direct.fail(ILLEGAL_ADDRESS)
        comm.Ibarrier().Wait()

    if comm.rank == 1:
        with contextlib.ExitStack() as stack:
            if when == "before":
                stack.enter_context(direct.holding(stream))
            stack.enter_context(meanwhile(fail))
            stack.enter_context(pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"))
            average(vector)
    else:
        failed = comm.Ibarrier()
        if when == "in a group":
            failed.Wait()  # rank 1 waits for it
        hear_that_rank_1_failed(average, vector)
        failed.Wait()
    close_after_failure(comm, direct, average)
