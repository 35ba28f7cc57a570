"""The part of gpu.py about ranks whose launch queue is full, so that the driver blocks them."""

from __future__ import annotations

import time

from cuda_driver import Array
from gpu_parts import call, spin, summary
from gpu_paths import collective_with, paths
from gpu_processes import keep

COUNT = 1024  # elements of the vector
HOLD = 0.100  # seconds for which the stream that is filled stands still
SMALL = 4096  # bytes of a filling
MOST = 8192  # fillings after which the queue is said not to fill up
BLOCKED = HOLD / 4  # seconds of a call after which the queue counts as full
COUNTED = "operations until the driver blocked"
FILLINGS = 3  # at least: the machine may take a rank's core just then, for longer than HOLD
BOUND = 0.5  # p95 of a call's latency ÷ HOLD


def queue(comm, device, arguments):
    """Measure the latency of rank 0's calls while the driver blocks the others' main threads."""
    cases = [
        (f"{path}, {case}", way, case)
        for path, way in paths(comm, device).items()
        for case in ("queue empty", "queue full", "queue full, call started")
    ]
    seconds = arguments.seconds / len(cases)
    results, figures = {}, {}
    for name, way, case in cases:
        full, array = FullQueue(device), Array(device, COUNT, device.stream())
        device.synchronize(array.stream)
        options = {"group_size": comm.size, "sync_period": 10**9}
        with collective_with(way, comm, array, **options) as average:
            latencies = blocked = None
            if comm.rank == 0:
                latencies = call(comm, average, array, seconds)
            elif case == "queue empty":
                spin(comm, seconds, None)
            else:
                started = (average, array) if "started" in case else None
                blocked = keep_full(comm, full, seconds, started)
        blocked = comm.allgather(blocked)[-1]
        full.close()
        if comm.rank == 0:
            results[name] = summary(latencies) | (blocked or {})
            if blocked and blocked[COUNTED] is None:
                results[name]["not measured"] = f"none of {MOST} operations blocked"
            elif blocked:
                figure = f"{comm.size} ranks, {name}: p95 of a call ÷ {HOLD * 1e3:.0f} ms of hold"
                figures[figure] = results[name]["p95"] / HOLD, BOUND
            keep(comm, arguments, results)
    return {**results, "figures": figures}, {}


def keep_full(comm, full, seconds, started):
    """Keep a queue full for `seconds`; return how many operations it takes, and the longest.

    Args:
        full: the `FullQueue`.
        started: a collective and a vector of which a call is started, on the stream that stands
            still, before that queue is filled; or None.
    """
    counts, longest = [], 0.0
    comm.Barrier()
    end = time.perf_counter() + seconds
    while len(counts) < FILLINGS or time.perf_counter() < end:
        full.device.hold(HOLD, full.stream)
        begun = None
        if started:
            average, array = started
            begun = average.start(array, stream=full.stream)
        count, taken = full.fill()
        counts.append(count)
        longest = max(longest, taken)
        full.device.synchronize(full.stream)
        if begun:
            begun.wait()
    return {
        COUNTED: max(filter(None, counts), default=None),
        "longest operation": longest,
    }


class FullQueue:
    """A stream with memory to be filled until the queue for its operations is full.

    Args:
        device: the `Device`.
    """

    def __init__(self, device):
        self.device, self.stream = device, device.stream()
        self.address = device.allocate(SMALL)

    def fill(self):
        """Queue operations until one blocks; return their number (None: none did), and its time."""
        longest = 0.0
        for count in range(1, MOST + 1):
            began = time.perf_counter()
            self.device.fill(self.address, SMALL, self.stream)
            longest = max(longest, time.perf_counter() - began)
            if longest > BLOCKED:
                return count, longest
        return None, longest

    def close(self):
        """Free the memory, and the stream."""
        self.device.free(self.address)
        self.device.remove(self.stream)
