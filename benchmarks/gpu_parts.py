"""The parts of gpu.py that need a GPU's time: see its description.

Each is a function of (comm, device, arguments) that returns its measurements, complete on rank 0,
and {name: quartiles} of its ratios, which are bounded. "figures" among the measurements are
{name: (value, bound)}.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import time
import warnings

from common import memory as memory_of
from common import ratio, take_turns, time_calls
from cuda_driver import Array, Work
from gpu_paths import MIB, Way, answer_of, collective_with, paths, staged_way
from gpu_processes import keep

BLOCKS = {f"blocks of {mib} MiB": mib * MIB for mib in (1, 4, 16)}
CADENCE = 0.010
BUSY = 0.100
MEMORY_BOUND = 3.0  # × the vector


def copies(comm, device, arguments):
    """Measure one rank alone."""
    import numpy as np

    from collectives import CudaError, GroupAllreduce

    stream, size = device.stream(), arguments.kib << 10
    count = size // 4
    address, other, host = device.allocate(size), device.allocate(size), device.pin(size)
    device.fill(address, size, stream)
    vector = np.zeros(count, np.float32)

    def queuing(queue):
        def timed(calls, first):
            began = time.perf_counter()
            for _ in range(calls):
                queue()
            device.synchronize(stream)
            return (time.perf_counter() - began) / calls

        return timed

    variants = {
        "to host": queuing(lambda: device.to_host(host, address, size, stream)),
        "to device": queuing(lambda: device.to_device(address, host, size, stream)),
        "on the device": queuing(lambda: device.within(other, address, size, stream)),
    }
    why_no_kernel = None
    try:
        all_finite = device.kernel("all_finite_float32")
    except (CudaError, RuntimeError) as error:
        why_no_kernel = str(error)
    else:
        pinned = device.pin(4)
        flag, x = ctypes.c_void_p(pinned), ctypes.c_ulonglong(address)
        ctypes.c_int.from_address(pinned).value = 1
        variants["finite kernel"] = queuing(lambda: all_finite([flag, x], count, stream))
    with GroupAllreduce(comm, vector, group_size=1, wait="group") as average:
        host_call = {"call of one rank, numpy": queuing(lambda: average(vector))}
        times = take_turns(comm, variants | host_call, arguments.rounds, arguments.seconds)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    results = {
        "bytes": size,
        "seconds": medians,
        "GB/s": {name: size / medians[name] / 1e9 for name in variants},
    }
    if why_no_kernel:
        results["finite kernel"] = {"not measured": why_no_kernel}
    elif not ctypes.c_int.from_address(pinned).value:
        raise RuntimeError("the kernel finds zeros not to be finite")
    return results, {}


def aware(comm, device, arguments):
    """Measure messages from device to device, with the default stream idle and busy."""
    from collectives import cuda_aware
    from collectives.memory import probe

    answer = answer_of(comm)
    results = {"aware": answer.aware, "reason": answer.reason}
    if not answer.aware and answer.reason != cuda_aware.WAITS:
        return {**results, "messages": {"not measured": answer.reason}}, {}
    tried = probe.Device(comm.rank)  # of one node
    with tried.current():
        for size in probe.SIZES:
            for hold in (0.0, *cuda_aware.HOLDS[:1]):
                comm.Barrier()
                began = time.perf_counter()
                wrong, early = probe.exchange(comm, tried, size, cuda_aware.RANKS_LIMIT, hold)
                taken = time.perf_counter() - began
                found = comm.allgather({"wrong": wrong, "seconds": taken, "before its end": early})
                name = f"{size >> 10} KiB, default stream busy for {hold * 1e3:g} ms"
                results[name] = max(found, key=lambda each: each["seconds"])
                keep(comm, arguments, results)
    tried.close()
    return results, {}


def staged(comm, device, arguments):
    """Measure calls in a group of all ranks."""
    results, ratios = [], {}
    for size in sorted({min(4 * MIB, arguments.kib << 10), arguments.kib << 10}):
        times = staged_times(comm, device, size, arguments)
        if comm.rank:
            continue
        sums = [sum(pair) for pair in zip(times["numpy"], times["copies"], strict=True)]
        results.append({"bytes": size, "seconds": medians_of(times)})
        for blocks in BLOCKS:
            name = f"{comm.size} ranks, {size >> 10} KiB, {blocks}"
            ratios[f"{name}: device ÷ (numpy + copies)"] = ratio(times[blocks], sums)
        keep(comm, arguments, [results, ratios])
    return results, ratios


def staged_times(comm, device, size, arguments):
    """Return the seconds per call with a vector of `size` bytes, of each round; on rank 0."""
    import numpy as np

    stream = device.stream()
    array, vector = Array(device, size // 4, stream), np.zeros(size // 4, np.float32)
    host = device.pin(size)
    options = {"group_size": comm.size, "sync_period": 10**9, "wait": "group"}

    def both_copies():
        device.to_host(host, array.address, size, stream)
        device.synchronize(stream)
        device.to_device(array.address, host, size, stream)
        device.synchronize(stream)

    with contextlib.ExitStack() as stack:
        variants = {"copies": timing(comm, both_copies)}
        for blocks, block in BLOCKS.items():
            average = collective_with(staged_way(), comm, array, block=block, **options)
            variants[blocks] = calls_of(comm, device, stack.enter_context(average), array)
        on_host = stack.enter_context(collective_with(Way(), comm, vector, **options))
        variants["numpy"] = timing(comm, lambda: on_host(vector))
        return take_turns(comm, variants, arguments.rounds, arguments.seconds / 2)


def direct(comm, device, arguments):
    """Measure calls in a group of all ranks that average on the device."""
    stream, size = device.stream(), arguments.kib << 10
    array, other = Array(device, size // 4, stream), device.allocate(size)
    options = {"group_size": comm.size, "sync_period": 10**9, "wait": "group"}
    answer = answer_of(comm)

    def both_copies():
        device.within(other, array.address, size, stream)
        device.within(array.address, other, size, stream)
        device.synchronize(stream)

    results = {"bytes": size}
    with contextlib.ExitStack() as stack:
        variants = {"copies": timing(comm, both_copies)}
        for transport in ("messages", "shared"):
            average = stack.enter_context(
                collective_with(Way(answer, transport), comm, array, **options)
            )
            if average.path == "staged":
                results[transport] = {"not measured": f"staged: {average.path_reason}"}
                continue
            results[transport] = {"path": average.path, "reason": average.path_reason}
            variants[transport] = calls_of(comm, device, average, array)
        measured = list(variants)[1:]
        if not measured:
            return results, {}
        average = stack.enter_context(collective_with(staged_way(), comm, array, **options))
        variants["staged"] = calls_of(comm, device, average, array)
        times = take_turns(comm, variants, arguments.rounds, arguments.seconds)
    if comm.rank:
        return None, {}
    results["seconds"] = medians_of(times)
    return results, {
        f"{comm.size} ranks, {size >> 10} KiB: {name} ÷ two copies on the device": ratio(
            times[name], times["copies"]
        )
        for name in measured
    }


def passive(comm, device, arguments):
    """Measure the latency of rank 0's calls while the others do not call."""
    import numpy as np

    stream, count = device.stream(), 1024
    work = Work(comm, device, arguments.busy_mib << 20)
    cases = [("numpy", Way(), np.zeros(count, np.float32), None)]
    for path, way in paths(comm, device).items():
        array = Array(device, count, stream)
        cases.append((f"{path}, device idle", way, array, None))
        cases.append((f"{path}, device busy", way, array, work))
    seconds = arguments.seconds / len(cases)
    results = {}
    for name, way, vector, busy in cases:
        options = {"group_size": comm.size, "sync_period": 10**9}
        with collective_with(way, comm, vector, **options) as average:
            latencies = (
                spin(comm, seconds, busy) if comm.rank else call(comm, average, vector, seconds)
            )
        if comm.rank == 0:
            results[name] = summary(latencies)
            keep(comm, arguments, results)
    return results, {}


def summary(latencies):
    """Return the number of latencies, their median, 95th percentile and maximum."""
    ordered = sorted(latencies)
    return {
        "calls": len(ordered),
        "median": statistics.median(ordered),
        "p95": ordered[int(0.95 * len(ordered))],
        "max": ordered[-1],
    }


def call(comm, average, vector, seconds):
    """Call at a regular cadence for `seconds`; return the latencies."""
    latencies = []
    comm.Barrier()
    end = tick = time.perf_counter()
    end += seconds
    while tick < end or not latencies:
        tick += CADENCE
        time.sleep(max(0.0, tick - time.perf_counter()))
        began = time.perf_counter()
        average(vector)
        latencies.append(time.perf_counter() - began)
    return latencies


def spin(comm, seconds, work):
    """Compute in Python for `seconds`, with the device busy or not."""
    comm.Barrier()
    end = time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        if work:
            work.queue_for(BUSY)
        while time.perf_counter() < min(now + BUSY, end):
            pass
    if work:
        work.device.synchronize(work.stream)


def memory(comm, device, arguments):
    """Measure what a collective takes beside its vector, on each path."""
    size = arguments.kib << 10
    array = Array(device, size // 4, device.stream())
    sharing = comm.allgather(device.ordinal).count(device.ordinal)
    results, figures = {}, {}
    for path, way in paths(comm, device).items():
        taken_by(comm, device, array, way)  # first, as what it loads stays in memory
        taken = taken_by(comm, device, array, way)
        for place, sharers in (("device", sharing), ("host", comm.size)):
            name = f"{comm.size} ranks, {path}: memory on the {place} ÷ vector"
            if taken[place] is None:
                results[name] = {"not measured": "the driver does not say how much is free"}
            else:
                results[name] = taken[place] / sharers / size
                figures[name] = results[name], MEMORY_BOUND
        keep(comm, arguments, results)
    return {**results, "figures": figures}, {}


def taken_by(comm, device, array, way):
    """Return the bytes that a collective takes, those of the other ranks included."""

    def free():
        device.synchronize(array.stream)
        comm.Barrier()
        found = {"device": device.free_memory(), "host": memory_of("MemAvailable")}
        comm.Barrier()
        return found

    gc.collect()
    before = free()
    with collective_with(way, comm, array, group_size=comm.size) as average:
        average(array)
        average.synchronize(array)
        after = free()
    return {place: None if left is None else before[place] - left for place, left in after.items()}


def torch_place(comm, arguments):
    """Return this rank's device of torch; the CPU if there is none."""
    if arguments.torch_device:
        __import__(arguments.torch_device).load()
    from wagma import devices

    return devices.choose("auto", comm)


def large_model(place, arguments):
    """Return a model like ResNet-50, with gradients, and its number of parameters."""
    import torch

    # About as many tensors, of which as many are large.
    sizes = [arguments.parameters // 54] * 54 + [256] * 107
    values = [torch.zeros(size, device=place) for size in sizes]
    model = torch.nn.ParameterList(torch.nn.Parameter(value) for value in values)
    for value in model:
        value.grad = torch.ones_like(value)
    return model, sum(sizes)


def step(comm, device, arguments):
    """Measure an optimizer's step, with the gradients computed before."""
    place = torch_place(comm, arguments)
    import torch
    from torch import distributed

    from wagma import devices, references
    from wagma.optim import WAGMA

    if place.type == "cpu":
        return {"not measured": devices.why_none()}, {}
    model, count = large_model(place, arguments)
    local = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=False)
    flat = torch.zeros(count, device=place)
    host = torch.zeros(count)
    references.start_group(comm, "gloo")

    def by_gloo():
        local.step()
        host.copy_(flat)
        distributed.all_reduce(host)
        flat.copy_(host)
        devices.wait_for(place)

    def alone():
        local.step()
        devices.wait_for(place)

    variants = {"local step": timing(comm, alone), "gloo": timing(comm, by_gloo)}
    times = take_turns(comm, variants, arguments.rounds, arguments.seconds / 2)
    keep(comm, arguments, {"seconds": medians_of(times)})
    # Afterwards, as each of its steps is averaged while the averager is open.
    with WAGMA(model, local, comm=comm, group_size=comm.size):
        ours = {"WAGMA": timing(comm, alone)}
        times |= take_turns(comm, ours, arguments.rounds, arguments.seconds / 2)
        waits = synchronizing(local.step)
    distributed.destroy_process_group()
    results = {"parameters": count, "seconds": medians_of(times)}
    return {**results, "operations of a step that wait for the device": waits}, {}


def synchronizing(step):
    """Return torch's warnings of operations in a step that wait for the device."""
    import torch

    if not torch.cuda.is_available():
        return {"not measured": "torch has no CUDA to say it"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        caught.clear()  # that this is a prototype
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sorted({f"{each.filename}:{each.lineno}: {each.message}" for each in caught})


def calls_of(comm, device, average, array):
    """Return a function that times calls until the average is in the array."""

    def call_on_device():
        average(array)
        device.synchronize(array.stream)

    return timing(comm, call_on_device)


def timing(comm, call):
    """Return a function for `take_turns`: of seconds per call on the slowest rank."""
    return lambda calls, first: time_calls(comm, call, calls)


def medians_of(times):
    return {name: statistics.median(taken) for name, taken in times.items()}
