"""What several files of MPI tests use."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import threading
import time

import numpy as np
import psutil
import pytest
from protocol_messages import load_source

slicing = load_source("slicing")

RULES = ("paper", "conserving")
NEVER = 10**9

# For what raises before a collective has chosen its transport.
before_transports = pytest.mark.transports("messages")


def as_list(vector):
    return list(vector) if isinstance(vector, (list, tuple)) else [vector]


def bytes_of(vector) -> bytes:
    """Return the memory of an array or a list of arrays."""
    return b"".join(array.tobytes() for array in as_list(vector))


@functools.cache
def random_numbers():
    return np.random.default_rng(0).normal(size=1_000_003)


def vector_of(rank, t, length, dtype=np.float64):
    """Return the vector of a rank at a time: random numbers, which repeat late, and not in step."""
    numbers = random_numbers()
    first = (7919 * rank + 104_729 * t) % (numbers.size // 2)
    return np.resize(numbers[first:], length).astype(dtype)


def same_everywhere(comm, thing) -> bool:
    return len(set(comm.allgather(thing))) == 1


def assert_equal_everywhere(comm, vector):
    """Bit for bit, on every rank."""
    assert same_everywhere(comm, bytes_of(vector))


def compute_until(comm, everybody_else_is_done):
    """Compute in pure Python and never call, until the others have said that they are done."""
    request = comm.Ibarrier()
    if not everybody_else_is_done:
        while not request.Test():
            for _ in range(1000):
                pass
    request.Wait()


def wait_until(condition, seconds=20):
    """Wait for something that happens beside this thread; fail where it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.001)


class Interrupted(Exception):
    """What a signal handler raises."""


def interrupt():
    raise Interrupted


AGAIN = 0.12  # seconds after which a wait is told by another signal


def once_it_waits(handle):
    """Return a signal's handler that calls this where a second signal finds it at the same place.

    Only in a wait it does, however long the process is held up before and after it.
    """
    before = None

    def notice(_, frame):
        nonlocal before
        here = id(frame), frame.f_lasti
        if here == before:
            signal.setitimer(signal.ITIMER_REAL, 0)
            handle()
        before = here

    return notice


@contextlib.contextmanager
def signalled(handle, seconds, once=None, waits=False):
    """Call this from a signal handler after so many seconds of the block, or of `once` being true.

    Where a rank must have come so far, wait for that: a oversubscribed machine takes its time. With
    `waits` it is called as soon as the block has come to a wait.
    """
    handler = once_it_waits(handle) if waits else lambda *_: handle()
    previous = signal.signal(signal.SIGALRM, handler)
    over = threading.Event()

    def set_timer():
        while once and not once():
            if over.wait(0.001):
                return
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN if waits else 0)

    thread = threading.Thread(target=set_timer)
    if once:
        thread.start()
    else:
        set_timer()
    try:
        yield
    finally:
        over.set()
        if once:
            thread.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def interrupted(seconds=0.05, once=None):
    """A wait in the block is interrupted by a signal handler's exception, as by Ctrl-C."""
    with pytest.raises(Interrupted), signalled(interrupt, seconds, once, waits=True):
        yield


def refuse_thread(monkeypatch, name):
    """Let no thread of this name start, as at a limit of processes."""
    real_start = threading.Thread.start

    def start(thread):
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        real_start(thread)

    monkeypatch.setattr(threading.Thread, "start", start)


class StoppingRank:
    """A rank that stops, with all its threads, as soon as a condition holds there.

    All ranks construct it, and it goes on by itself where no rank lets it, because the test failed.
    """

    def __init__(self, comm, rank, condition):
        self.process = psutil.Process(comm.bcast(os.getpid(), rank))
        self.condition = condition
        self.lock = threading.Lock()
        self.over = False
        self.thread = threading.Thread(target=self.stop) if comm.rank == rank else None

    def __enter__(self):
        if self.thread:
            command = ["sh", "-c", "timeout 30 cat; kill -CONT $PPID"]
            self.guard = subprocess.Popen(command, stdin=subprocess.PIPE)
            self.thread.start()
        return self

    def __exit__(self, *_):
        """After this it does not stop any more."""
        with self.lock:
            self.over = True
        if self.thread:
            self.thread.join()
            self.guard.stdin.close()
            self.guard.wait()

    def stop(self):
        wait_until(lambda: self.over or self.condition())
        with self.lock:
            if not self.over:
                self.process.suspend()

    def interrupt(self, operation, seconds, in_the_middle):
        """Interrupt the operation while that rank is stopped, which goes on so much later.

        Where it has not stopped in the middle, it goes on at once, and nothing is interrupted.
        Return whether the operation did not end before that.
        """
        going_on = threading.Timer(seconds, self.process.resume)

        def stopped():
            return self.condition() and self.process.status() == psutil.STATUS_STOPPED

        def handle():
            if not in_the_middle():
                self.process.resume()
                return
            going_on.start()
            interrupt()

        try:
            with signalled(handle, 0.1, once=stopped):
                operation()
        except Interrupted:
            going_on.join()
            return True
        return False


def interrupt_in_the_middle(comm, prepare, operation, arrays, seconds=0.2):
    """All ranks average arrays to 6; rank 1 stops in the middle, and rank 0 is interrupted there.

    Prepare and try again where rank 1's stop came too late, as on a machine with other load. Return
    how often it was tried.
    """

    def incomplete():
        return not all((array == 6).all() for array in arrays)

    for attempts in range(1, 100):
        prepare()
        with StoppingRank(comm, 1, lambda: arrays[0][0] == 6) as stopping:
            comm.Barrier()
            in_the_middle = False
            if comm.rank == 0:
                in_the_middle = stopping.interrupt(operation, seconds, incomplete) and incomplete()
            else:
                operation()
        # Rank 0 must not wait here for the others, which may be in the exchange still.
        if comm.bcast(in_the_middle):
            return attempts
        request = comm.Ibarrier()
        while not request.Test():
            if comm.rank == 0:
                stopping.process.resume()
            time.sleep(0.001)
    pytest.fail("rank 1 never stopped in the middle")


def weighted(a, weight_a, b, weight_b):
    """Return the mean of two arrays as one exchange makes it: fp16 and bf16 in single precision."""
    real = np.float64 if a.dtype.itemsize == 8 else np.float32
    total = (weight_a + weight_b) or 1.0
    share_a, share_b = real(weight_a / total), real(weight_b / total)
    return (share_a * a.astype(real) + share_b * b.astype(real)).astype(a.dtype)


def travelling(arrays):
    """Return how many bytes go through the exchange for these arrays: whole lines of 64."""
    return sum(-(-array.nbytes // 64) * 64 for array in arrays)


def group_mean(vectors, weights):
    """Return the mean of the members' vectors, lists of arrays, in the members' order."""
    shared = os.environ["WAGMA_TRANSPORT"] == "shared"
    long = slicing.suits(travelling(vectors[0]), len(vectors))
    mean = sliced_mean if long or shared else schedule_mean
    return [mean(list(arrays), weights) for arrays in zip(*vectors)]


def sliced_mean(arrays, weights):
    """Return the mean of the members' arrays, in their order, rounded once."""
    real = np.float64 if arrays[0].dtype.itemsize == 8 else np.float32
    total = sum(weights)
    parts = [real(weight / total) * array.astype(real) for array, weight in zip(arrays, weights)]
    return sum(parts[1:], start=parts[0]).astype(arrays[0].dtype)


def schedule_mean(arrays, weights):
    """Return the mean of the members' arrays, in their order, rounded in each exchange."""
    core = 1 << (len(arrays).bit_length() - 1)
    for i in range(len(arrays) - core):
        arrays = [*arrays]
        weights = [*weights]
        arrays[i] = weighted(arrays[i], weights[i], arrays[i + core], weights[i + core])
        weights[i] += weights[i + core]
    arrays, weights = arrays[:core], weights[:core]
    while len(arrays) > 1:
        pairs = range(0, len(arrays), 2)
        arrays = [weighted(arrays[i], weights[i], arrays[i + 1], weights[i + 1]) for i in pairs]
        weights = [weights[i] + weights[i + 1] for i in pairs]
    return arrays[0]


@contextlib.contextmanager
def memory_denied(comm, monkeypatch, where):
    """On rank 1 no memory can be made that others can map, or none of others' be mapped."""
    if comm.rank != 1:
        yield
        return
    name = {"making": "memfd_create", "mapping": "open"}[where]
    real = getattr(os, name)

    def deny(path, *arguments, **options):
        if where == "mapping" and not str(path).startswith("/proc/"):
            return real(path, *arguments, **options)
        raise PermissionError(f"{where} is denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, deny)
        yield
