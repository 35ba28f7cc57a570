"""What arrays and models on GPUs cost, through pinned host memory and from device to device.

    python benchmarks/gpu.py --all
    mpiexec -n 2 python benchmarks/gpu.py --part staged

With --all each part runs in a job of its own, with 1, 2 or 4 ranks, which share a GPU where there
is one only; all together take less than ten minutes and are written to gpu.json, with the device,
the driver, the MPI and the date. Parts:

copies   GB/s from and to pinned memory; what a call's passes over the vector on the host take, of
         which one looks for NaN and infinity; memory that a collective takes on the device
staged   a call with an array on the device, copied in blocks of 1, 4 and 16 MiB, ÷ (both copies,
         made by all ranks at once, + the call with a numpy array); bound 1.5
direct   where MPI takes device memory, and does not wait for the default stream, a call that
         averages on the device ÷ the staged one; else why not
passive  from one rank's call of 4 KiB to its result while the others' main threads spin in Python:
         their devices idle, or busy with 100 ms of work at a time, beside numpy arrays
step     WAGMA's step of a model of ResNet-50's size, and the local optimizer's alone, beside an
         average by gloo of a vector of that size on the host, with both copies; needs torch
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import figure, machine, mpiexec, parser, ratio, report, take_turns, time_calls
from cuda_driver import Array, Device, Work

PLAN = (
    *(("copies", 1), ("staged", 2), ("staged", 4), ("direct", 2), ("direct", 4)),
    *(("passive", 2), ("passive", 4), ("step", 2)),
)
LIMIT = 73.0  # seconds of a job; there are eight
BLOCKS = {f"blocks of {mib} MiB": mib << 20 for mib in (1, 4, 16)}
BOUND = 1.5
CADENCE = 0.010
BUSY = 0.100


def copies(comm, device, arguments):
    """Measure one rank alone."""
    import numpy as np

    from collectives import GroupAllreduce

    stream, size = device.stream(), arguments.kib << 10
    address, host = device.allocate(size), device.pin(size)
    device.fill(address, size, stream)

    def copying(copy, *places):
        def timed(calls, first):
            began = time.perf_counter()
            for _ in range(calls):
                copy(*places, size, stream)
            device.synchronize(stream)
            return (time.perf_counter() - began) / calls

        return timed

    vector = np.zeros(size // 4, np.float32)
    with GroupAllreduce(comm, vector, group_size=1, wait="group") as average:

        def calling(calls, first):
            began = time.perf_counter()
            for _ in range(calls):
                average(vector)
            return (time.perf_counter() - began) / calls

        variants = {
            "to host": copying(device.to_host, host, address),
            "to device": copying(device.to_device, address, host),
            "call of one rank, numpy": calling,
        }
        times = take_turns(comm, variants, arguments.rounds, arguments.seconds)
    array = Array(device, size // 4, stream)
    before = device.free_memory()
    with GroupAllreduce(comm, array) as average:
        average(array)
        after = device.free_memory()
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        "bytes": size,
        "seconds": medians,
        "GB/s": {name: size / medians[name] / 1e9 for name in ("to host", "to device")},
        "device bytes of a collective": None if before is None else before - after,
    }, {}


def staged(comm, device, arguments):
    """Measure calls in a group of all ranks."""
    results, ratios = [], {}
    for size in sorted({min(4 << 20, arguments.kib << 10), arguments.kib << 10}):
        times = staged_times(comm, device, size, arguments)
        if comm.rank:
            continue
        sums = [sum(pair) for pair in zip(times["numpy"], times["copies"], strict=True)]
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        results.append({"bytes": size, "seconds": medians})
        for blocks in BLOCKS:
            name = f"{comm.size} ranks, {size >> 10} KiB, {blocks}"
            ratios[f"{name}: device ÷ (numpy + copies)"] = ratio(times[blocks], sums)
    return results, ratios


def staged_times(comm, device, size, arguments):
    """Return the seconds per call with a vector of so many bytes, of each round; on rank 0."""
    import numpy as np

    from collectives import GroupAllreduce

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
        for blocks, size_of_block in BLOCKS.items():
            with using(False, size_of_block):
                average = stack.enter_context(GroupAllreduce(comm, array, **options))
            variants[blocks] = calls_of(comm, device, average, array, stream)
        on_host = stack.enter_context(GroupAllreduce(comm, vector, **options))
        variants["numpy"] = timing(comm, lambda: on_host(vector))
        return take_turns(comm, variants, arguments.rounds, arguments.seconds / 2)


def direct(comm, device, arguments):
    """Measure calls in a group of all ranks that average on the device."""
    from collectives import GroupAllreduce, cuda_aware

    answer = cuda_aware.ask(comm)
    if not answer.aware:
        return {"not measured": answer.reason}, {}
    stream, size = device.stream(), arguments.kib << 10
    array = Array(device, size // 4, stream)
    options = {"group_size": comm.size, "sync_period": 10**9, "wait": "group"}
    with contextlib.ExitStack() as stack:
        variants = {}
        for path, is_aware in (("direct", True), ("staged", False)):
            with using(is_aware):
                average = stack.enter_context(GroupAllreduce(comm, array, **options))
            variants[path] = calls_of(comm, device, average, array, stream)
        times = take_turns(comm, variants, arguments.rounds, arguments.seconds)
    if comm.rank:
        return None, {}
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    found = ratio(times["direct"], times["staged"])
    results = {"bytes": size, "seconds": medians, "why": answer.reason}
    return results, {f"{comm.size} ranks, {size >> 10} KiB: direct ÷ staged": found}


@contextlib.contextmanager
def using(is_aware, block=4 << 20):
    """Let collectives that are made in the block average on devices or not, and copy in blocks."""
    from collectives import cuda_aware, device

    before = device._answer, device.BLOCK
    device._answer, device.BLOCK = cuda_aware.Answer(is_aware, "for the benchmark"), block
    try:
        yield
    finally:
        device._answer, device.BLOCK = before


def calls_of(comm, device, average, array, stream):
    """Return what times calls until the average is in the array."""

    def call_on_device():
        average(array)
        device.synchronize(stream)

    return timing(comm, call_on_device)


def passive(comm, device, arguments):
    """Measure what rank 0 waits for, where the others do not call."""
    import numpy as np

    from collectives import GroupAllreduce

    stream, count = device.stream(), 1024
    work = Work(device, arguments.busy_mib << 20)
    vectors = {
        "numpy": np.zeros(count, np.float32),
        "device idle": Array(device, count, stream),
        "device busy": Array(device, count, stream),
    }
    seconds = arguments.seconds / len(vectors)
    results = {}
    for name, vector in vectors.items():
        with GroupAllreduce(comm, vector, group_size=comm.size, sync_period=10**9) as average:
            busy = work if name == "device busy" else None
            latencies = (
                spin(comm, seconds, busy) if comm.rank else call(comm, average, vector, seconds)
            )
        if comm.rank == 0:
            ordered = sorted(latencies)
            results[name] = {
                "calls": len(ordered),
                "median": statistics.median(ordered),
                "p95": ordered[int(0.95 * len(ordered))],
                "max": ordered[-1],
            }
    return results, {}


def call(comm, average, vector, seconds):
    """Call at a regular cadence for so long; return the latencies."""
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
    """Compute in Python for so long, with the device busy or not."""
    comm.Barrier()
    end = time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        if work:
            work.queue_for(BUSY)
        while time.perf_counter() < min(now + BUSY, end):
            pass
    if work:
        work.device.synchronize(work.stream)


def step(comm, device, arguments):
    """Measure an optimizer's step, the gradients being there."""
    if arguments.torch_device:
        __import__(arguments.torch_device).load()
    import torch
    from torch import distributed

    from wagma import devices, references
    from wagma.optim import WAGMA

    place = devices.choose("auto", comm)
    if place.type == "cpu":
        return {"not measured": devices.why_none()}, {}
    # About as many tensors, of which as many are large.
    sizes = [arguments.parameters // 54] * 54 + [256] * 107
    values = [torch.zeros(size, device=place) for size in sizes]
    model = torch.nn.ParameterList(torch.nn.Parameter(value) for value in values)
    for value in model:
        value.grad = torch.ones_like(value)
    local = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=False)
    flat = torch.zeros(sum(sizes), device=place)
    host = torch.zeros(sum(sizes))
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

    def averaging():
        optimizer.step()
        devices.wait_for(place)

    variants = {"local step": timing(comm, alone), "gloo": timing(comm, by_gloo)}
    times = take_turns(comm, variants, arguments.rounds, arguments.seconds / 2)
    # Beside it, as the local optimizer cannot be stepped alone while it is wrapped.
    with WAGMA(local, model, comm=comm, group_size=comm.size) as optimizer:
        ours = {"WAGMA": timing(comm, averaging)}
        times |= take_turns(comm, ours, arguments.rounds, arguments.seconds / 2)
    distributed.destroy_process_group()
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return {"parameters": sum(sizes), "seconds": medians}, {}


def timing(comm, call):
    """Return what `take_turns` asks for: seconds per call on the slowest rank."""
    return lambda calls, first: time_calls(comm, call, calls)


PARTS = {
    "copies": copies,
    "staged": staged,
    "direct": direct,
    "passive": passive,
    "step": step,
}


def measure(arguments):
    """Measure one part, as a rank of its job."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    device = Device(node.rank)
    node.Free()
    measured, ratios = PARTS[arguments.part](comm, device, arguments)
    if comm.rank:
        return
    facts = {
        "device": device.name,
        "driver": device.version,
        "library": device.library,
        "mps": os.path.exists(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")),
    }
    figures = [figure(name, value, BOUND) for name, value in ratios.items()]
    results = {**facts, "measured": measured}
    report(arguments, f"gpu-{arguments.part}", comm.size, results, ratios=ratios, figures=figures)


def measure_all(arguments, options):
    """Measure all parts, and write gpu.json; return the exit status."""
    began, parts, facts, ratios, figures = time.monotonic(), {}, {}, {}, []
    for part, ranks in PLAN:
        if ranks > arguments.most_ranks:
            continue
        print(f"\n=== {part}, {ranks} rank{'s' * (ranks > 1)}", flush=True)
        name = f"{part}-{ranks}"
        with tempfile.TemporaryDirectory() as folder:
            command = [
                *(*mpiexec(), "-n", str(ranks), sys.executable, __file__, *options),
                *("--part", part, "--results", folder),
            ]
            ended = run(command)
            if ended:
                parts[name] = {"failed": ended}
                print(f"failed: {ended}", file=sys.stderr)
                continue
            found = json.loads((Path(folder) / f"gpu-{name}.json").read_text())
        parts[name] = found["results"].pop("measured")
        facts |= found["results"]
        ratios |= found["ratios"]
        figures += found["figures"]
        print(json.dumps(parts[name], indent=1))
    contents = {
        "benchmark": "gpu",
        "ranks": None,
        **facts,
        "machine": machine(),
        "settings": {"options": options},
        "seconds": time.monotonic() - began,
        "results": parts,
        "ratios": ratios,
        "figures": figures,
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "gpu.json"
    path.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {path}", file=sys.stderr)
    return int(any("failed" in part for part in parts.values()))


def run(command):
    """Run a job; return how it ended, None where that was well."""
    with subprocess.Popen(command) as job:
        try:
            status = job.wait(LIMIT)
        except subprocess.TimeoutExpired:
            job.terminate()  # the launcher ends the ranks
            return f"no end after {LIMIT:g} s"
    return f"exit status {status}" if status else None


def main():
    made = parser(__doc__)
    which = made.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="all parts, each in a job of its own")
    which.add_argument("--part", choices=PARTS, help="one, in the job that this is a rank of")
    add = made.add_argument
    add("--kib", type=int, default=100_000, help="of a vector (default: 25.6 million float32)")
    add("--parameters", type=int, default=25_600_000, help="of the model (default: ResNet-50's)")
    add("--busy-mib", type=int, default=1024, help="of what is filled to keep a device busy")
    add("--most-ranks", type=int, default=4, help="leave out jobs of more (default 4)")
    add("--rounds", type=int, default=11, help="at most (default 11)")
    add("--seconds", type=float, default=20.0, help="of measuring, for a part (default 20)")
    add("--torch-device", metavar="MODULE", help="one whose load() gives torch a device, for tests")
    arguments = made.parse_args()
    if not arguments.all:
        return measure(arguments)
    try:
        Device(0)  # sooner than eight jobs would say so
    except (OSError, RuntimeError) as error:
        print(f"gpu.py: no GPU to measure: {error}", file=sys.stderr)
        return 2
    options = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in vars(arguments).items()
        if name not in ("all", "part", "results", "most_ranks") and value is not None
    ]
    return measure_all(arguments, options)


if __name__ == "__main__":
    sys.exit(main())
