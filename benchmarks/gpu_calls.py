"""The part of gpu.py about single calls of the driver and of MPI, which `traced` counts."""

from __future__ import annotations

import time
from importlib.metadata import version

from cuda_driver import Array
from gpu_paths import collective_with, paths
from gpu_processes import keep
from traced import KINDS, Traced

CADENCE = 0.010
LAUNCHES = 1024
STEPS = 5


def calls(comm, device, arguments):
    """Measure the longest calls on the last rank's progress thread, and count those that wait."""
    traced, stream = Traced(), device.stream()
    size = arguments.kib << 10
    array = Array(device, size // 4, stream)
    activities = activities_of(device, arguments.busy_mib << 20)
    results, most = {}, 0
    for path, way in paths(comm, device).items():
        options = {"group_size": comm.size, "sync_period": 10**9}
        with collective_with(way, comm, array, wait="group", **options) as average:
            waits = waits_of(comm, average, array, traced)
        found = {"functions that wait, in 5 calls": waits}
        most = max(most, sum(waits.values()))
        seconds = arguments.seconds / len(activities) / 2
        with collective_with(way, comm, array, **options) as average:
            for name, activity in activities.items():
                comm.Barrier()
                traced.reset()
                busy = activity if comm.rank == comm.size - 1 else pause
                call_beside(average, array, busy, seconds)
                longest = {kind: traced.longest(kind) for kind in KINDS}
                found[name] = comm.allgather(longest)[-1]
                keep(comm, arguments, {**results, path: found})
        results[path] = found
    figures = {f"{STEPS} calls: functions of the driver that wait for a device": (most, 0)}
    return {**results, "figures": figures}, {}


def waits_of(comm, average, array, traced):
    """Return how often a collective's calls use functions that may wait for a device."""
    average(array)
    comm.Barrier()
    traced.reset()
    for _ in range(STEPS):
        average(array)
    found = {}
    for each in comm.allgather(traced.waits()):
        for name, count in each.items():
            found[name] = found.get(name, 0) + count
    return found


def call_beside(average, array, activity, seconds):
    """Start calls one after another, and run the activity meanwhile."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        call, tick = average.start(array), time.perf_counter() + CADENCE
        while True:
            activity()
            if call.test() and time.perf_counter() >= tick:
                break


def activities_of(device, size):
    """Return {name: activity of the main thread}; without torch by the driver alone."""
    stream, small = device.stream(), device.allocate(4096)

    def allocations():
        device.free(device.allocate(size))

    def pinned():
        device.unpin(device.pin(size // 4))

    def launches():
        for _ in range(LAUNCHES):
            device.fill(small, 4096, stream)
        device.synchronize(stream)

    found = {
        "idle": pause,
        f"allocating {size >> 20} MiB": allocations,
        f"pinning {size >> 22} MiB": pinned,
        f"{LAUNCHES} fillings": launches,
    }
    return found | activities_of_torch(device, size)


def activities_of_torch(device, size):
    """Return the activities that use torch, if it has CUDA."""
    try:
        if version("torch").endswith("+cpu"):  # faster than importing torch
            return {}
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    torch.cuda.set_device(device.ordinal)
    x = torch.zeros(1024, device="cuda")

    def empty_cache():
        torch.empty(size, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()

    def launches():
        for _ in range(LAUNCHES):
            x.add_(1)
        torch.cuda.current_stream().synchronize()

    return {"torch, empty_cache": empty_cache, f"torch, {LAUNCHES} launches": launches}


def pause():
    time.sleep(1e-3)
