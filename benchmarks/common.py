"""What the benchmarks share: launching, the slowest rank's time, ratios, the results."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path


def mpiexec():
    """The launcher's command: $MPIEXEC, else beside this Python, else on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return shlex.split(os.environ.get("MPIEXEC", str(beside if beside.exists() else "mpiexec")))


def time_calls(comm, call, repetitions):
    """Seconds per call on the slowest rank, of calls in a row that all ranks begin together."""
    from mpi4py import MPI

    comm.Barrier()
    begin = time.perf_counter()
    for _ in range(repetitions):
        call()
    return comm.allreduce(time.perf_counter() - begin, op=MPI.MAX) / repetitions


def median_ratio(numerators, denominators):
    """Median of the ratios round by round."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def machine():
    """What a reader must know to place the figures."""
    from mpi4py import MPI

    return {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "mpi": MPI.Get_library_version().split("\n")[0].strip(),
        "python": platform.python_version(),
        "ranks": MPI.COMM_WORLD.size,
    }


def report(name, results):
    """Write the results as JSON to results/NAME.json beside the benchmarks."""
    path = Path(__file__).parent / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), name: results}, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)


def verdict(value, bound):
    """Say whether a figure that must not exceed its bound holds."""
    return "holds" if value <= bound else "MISSED"
