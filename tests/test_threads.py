"""Several Python threads of a process, and its progress thread."""

import ctypes
import logging
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from together import NEVER, refuse_thread, wait_until

from collectives import GroupAllreduce, RankFailedError, empty, process

pytestmark = pytest.mark.mpi

SHORT = 0.2  # seconds without progress that are a stall here


@pytest.mark.ranks(3, 4)
@pytest.mark.transports("messages")
def test_one_thread_closes_a_collective_while_another_opens_one(comm, monkeypatch):
    """The second begins where the first waits for the progress thread to end."""
    waits = threading.Event()
    real_reserve, real_join = process.reserve, threading.Thread.join

    def reserve(collective, mode):
        if threading.current_thread().name == "opens":
            assert waits.wait(20)
        return real_reserve(collective, mode)

    def join(thread, timeout=None):
        if thread.name == "wagma-engine":
            waits.set()
        return real_join(thread, timeout)

    other = comm.Dup()
    made = []

    def open_one():
        made.append(GroupAllreduce(other, np.zeros(10), group_size=2, sync_period=NEVER))

    average = GroupAllreduce(comm, np.zeros(10), group_size=2)
    monkeypatch.setattr(process, "reserve", reserve)
    monkeypatch.setattr(threading.Thread, "join", join)
    thread = threading.Thread(target=open_one, name="opens")
    thread.start()
    average.close()
    real_join(thread)
    with made[0] as average:  # which is served
        if comm.rank == 0:
            average(np.zeros(10))
        wait_until(lambda: average.executed == 1)
    other.Free()


@pytest.mark.ranks(3, 4)
@pytest.mark.transports("messages")
def test_a_progress_thread_that_does_not_start_is_an_error_on_all_ranks(comm, monkeypatch):
    with monkeypatch.context() as limited:
        if comm.rank == 1:
            refuse_thread(limited, "wagma-engine")
        with pytest.raises(RuntimeError, match=r"^rank 1: the progress thread .* new thread"):
            GroupAllreduce(comm, np.zeros(10))
    assert not process.open_count()
    with GroupAllreduce(comm, np.zeros(10), group_size=1, sync_period=1) as average:
        mine = np.full(10, float(comm.rank))
        average(mine)
        np.testing.assert_array_equal(mine, (comm.size - 1) / 2)


@pytest.mark.ranks(1)
def test_no_more_collectives_are_opened_than_there_are_places(comm):
    """By several threads at once."""
    start, places = threading.Barrier(8), []

    def reserve():
        wanted = [object() for _ in range(100)]
        start.wait()
        places.extend(one for one in wanted if process.reserve(one, "adaptive") is None)

    threads = [threading.Thread(target=reserve) for _ in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(places) == process.MOST_OPEN
        with pytest.raises(RuntimeError, match=f"{process.MOST_OPEN} collectives are open"):
            GroupAllreduce(comm, np.zeros(3))
    finally:
        for place in places:
            process.release(place)
    assert isinstance(process.reserve(places, "adaptive"), type(None))
    assert isinstance(process.reserve(threads, "none"), ValueError)
    process.release(places)


@pytest.mark.transports("messages")
def test_a_rank_that_waits_for_the_gil_to_raise_an_error_still_answers(comm, tmp_path, caplog):
    """Rank 0 fails. Rank 1 hears of it while a thread of its own has the GIL, in a blocking call;
    rank 3, which closes, asks who is missing, and lets that thread go on once rank 1 has answered.
    """
    path = comm.bcast(str(tmp_path / "lets-go-on"))
    if comm.rank == 0:
        os.mkfifo(path)
    comm.Barrier()
    libc = ctypes.PyDLL(None)  # its functions keep the GIL
    mine = np.zeros(10)
    if comm.rank == 1:
        end = os.open(path, os.O_RDWR)  # from now on what rank 3 writes is kept
    average = GroupAllreduce(
        comm, mine, group_size=2, sync_period=1, stall=0 if comm.rank != 3 else SHORT
    )
    if comm.rank == 0:
        comm.recv(source=1)
        average.fail(KeyError("the dataset is gone"))
    elif comm.rank == 1:
        thread = threading.Thread(target=hold_the_gil, args=[comm, libc, end])
        thread.start()
        with pytest.raises(RankFailedError):
            average(mine)
        thread.join()
        os.close(end)
    elif comm.rank == 3:
        caplog.set_level(logging.INFO, "collectives")
        logger = logging.getLogger("collectives")
        handler = LetsGoOn(path)
        logger.addHandler(handler)
        average.close()
        logger.removeHandler(handler)
        assert handler.texts and not any("does not answer" in text for text in handler.texts)
    average.close()


def hold_the_gil(comm, libc, end):
    """Tell rank 0, and wait for rank 3, without letting another thread run."""
    comm.send(None, dest=0)
    libc.read(end, ctypes.create_string_buffer(1), 1)


class LetsGoOn(logging.Handler):
    """Writes to a pipe when something is logged."""

    def __init__(self, path):
        super().__init__()
        self.path, self.texts = path, []

    def emit(self, record):
        self.texts.append(record.getMessage())
        end = os.open(self.path, os.O_RDWR)
        os.write(end, b"x")
        os.close(end)


def test_another_thread_communicates_while_collectives_are_made(comm):
    """On communicators of its own, which mpi4py duplicates, as it does those of collectives."""
    times = 10
    made_of, others = ([comm.Dup() for _ in range(times)] for _ in range(2))
    sums = []
    if MPI.Get_library_version().startswith("Open MPI"):
        # It lets one duplication wait for another thread's, which may need the GIL that mpi4py
        # holds in the first one: two threads' duplications of one process deadlock without us.
        for other in others:
            other.allreduce(0)

    def communicate():
        chance = random.Random(comm.rank)
        for other in others:
            computes_until = time.perf_counter() + chance.random() * 0.005
            while time.perf_counter() < computes_until:
                pass
            sums.append(other.allreduce(comm.rank))

    chance = random.Random(-comm.rank)
    thread = threading.Thread(target=communicate)
    thread.start()
    for each in made_of:
        time.sleep(chance.random() * 0.005)
        with GroupAllreduce(each, np.zeros(10), group_size=2) as average:
            average(np.zeros(10))
    thread.join()
    assert sums == [sum(range(comm.size))] * times
    for each in (*made_of, *others):
        each.Free()


def wakes():
    """Return how often this process's progress thread has gone to sleep."""
    (thread,) = (t for t in threading.enumerate() if t.name == "wagma-engine")
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


@pytest.mark.ranks(3, 4)
@pytest.mark.transports("shared")
def test_the_progress_thread_leaves_the_core_to_a_call_that_checks_its_vector(comm):
    """Else it takes the core every 100 µs, and from the call twice its time."""
    x = empty(comm, 1 << 22)
    with GroupAllreduce(
        comm, x, transport="shared", group_size=comm.size, wait="group", sync_period=NEVER
    ) as average:
        average(x)
        before, began = wakes(), time.perf_counter()
        for _ in range(5):
            average(x)
        count, milliseconds = wakes() - before, 1e3 * (time.perf_counter() - began)
    assert count <= 2 * milliseconds + 10
