"""What the benchmarks share: launching, the slowest rank's time, ratios, figures, the results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
# A collective's keyword arguments for each.
TRANSPORTS = {name: {"transport": name} for name in ("messages", "shared")}


def mpiexec():
    """The launcher's command: $MPIEXEC, else beside this Python, else on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return shlex.split(os.environ.get("MPIEXEC", str(beside if beside.exists() else "mpiexec")))


def parser(doc):
    """A benchmark's arguments; `doc` is its module's docstring."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--results", type=Path, default=RESULTS, metavar="DIR", help="where the JSON goes"
    )
    return made


def time_calls(comm, call, repetitions):
    """Seconds per call on the slowest rank, of calls in a row that all ranks begin together."""
    from mpi4py import MPI

    comm.Barrier()
    begin = time.perf_counter()
    for _ in range(repetitions):
        call()
    return comm.allreduce(time.perf_counter() - begin, op=MPI.MAX) / repetitions


def ratio(numerators, denominators):
    """Median and quartiles of the ratios round by round.

    Only what was measured in the same round is divided, so that a machine that slows down or is
    shared for a while leaves the ratio as it is.
    """
    return quartiles([a / b for a, b in zip(numerators, denominators, strict=True)])


def quartiles(values):
    """{"low": …, "median": …, "high": …} of values that may be as few as one."""
    low, median, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * values
    )
    return {"low": low, "median": median, "high": high}


def spread(values, digits):
    """Mean ± standard deviation in words, with so many digits after the point."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):8.{digits}f} ± {deviation:.{digits}f}"


def figure(name, value, bound):
    """A figure that must not exceed its bound, and whether it holds; of quartiles, the median."""
    value = value["median"] if isinstance(value, dict) else value
    return {"figure": name, "value": value, "bound": bound, "holds": bool(value <= bound)}


def in_words(size):
    """A number of bytes that is a power of two."""
    return f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


def rounded(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def ratio_label(size, variant, reference):
    return f"{in_words(size)}: {variant} ÷ {reference}"


def machine():
    """What a reader must know to place the figures."""
    import mpi4py
    import numpy

    mpi4py.rc.initialize = False  # of no effect in the ranks, which have done so
    from mpi4py import MPI

    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory("MemTotal") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "mpi": " ".join(MPI.Get_library_version().split("\n")[0].split()),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()} ({platform.machine()})"
    return platform.machine()


def memory(field):
    """Bytes of a field of /proc/meminfo, such as MemAvailable."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise LookupError(f"no {field} in /proc/meminfo")


def report(arguments, name, ranks, results, *, ratios=None, figures=()):
    """Print the figures, and write all to NAME-RANKS.json.

    Args:
        arguments: as parsed by `parser`; they are noted, too.
        name, ranks: of the benchmark, and how many ranks it ran with.
        results: whatever it measured.
        ratios: {name: quartiles} of what was measured in one run and is the better the smaller;
            `compare.py` looks at nothing else.
        figures: those that have bounds.
    """
    for each in figures:
        held = "holds" if each["holds"] else "MISSED"
        value, bound = rounded(each["value"]), rounded(each["bound"])
        print(f"# {each['figure']}: {value} ≤ {bound}: {held}")
    contents = {
        "benchmark": name,
        "ranks": ranks,
        "machine": machine(),
        "settings": {k: v for k, v in vars(arguments).items() if k != "results"},
        "results": results,
        "ratios": ratios or {},
        "figures": list(figures),
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / f"{name}-{ranks}.json"
    path.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {path}", file=sys.stderr)
