"""Shared parts of the benchmarks: launching, taking turns, timing, ratios, figures, results."""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
MIN_ROUNDS = 3
WARM_UP = 2  # calls at least; the first ones touch new pages
MAX_CALLS = 300
DEDICATED = "dedicated_server"
# A collective's keyword arguments for each transport.
TRANSPORTS = {name: {"transport": name} for name in ("messages", "shared")}


def mpiexec():
    """Return the launcher's command: $MPIEXEC, else beside this Python, else on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return shlex.split(os.environ.get("MPIEXEC", str(beside if beside.exists() else "mpiexec")))


def parser(doc):
    """Return the parser of a benchmark's arguments; `doc` is its module's docstring."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--results", type=Path, default=RESULTS, metavar="DIR", help="where the JSON goes"
    )
    return made


def compare(arguments, ranks, methods, options, directory):
    """Run `wagma compare` in a directory; return its "runs" and its "results" by method.

    Args:
        arguments: with the seconds, or the steps, and the seeds of each method, and the sleep of a
            step.
        ranks, methods: number of ranks, and names of the methods.
        options: further options of the command line.
    """
    length = "steps" if "steps" in arguments else "seconds"
    command = [
        *mpiexec(), "-n", str(ranks), sys.executable, "-m", "wagma", "compare",
        "--algorithms", ",".join(methods), "--seeds", str(arguments.seeds),
        f"--{length}", str(getattr(arguments, length)),
        "--step-time", str(arguments.step_time_ms), *options,
        "--runs-dir", directory, "--name", "runs",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3600)
    found = json.loads((Path(directory) / "runs" / "comparison.json").read_text())
    return found["runs"], found["results"]


def simulated(label):
    """Return the method of "NAME:option=value", and the options that its simulation takes.

    "parameter-server:dedicated_server" is a server on a node of its own, instead of on rank 0.
    """
    from wagma.methods import named

    name, *given = label.split(":")
    method = named(name)
    options = method.resolved(method.given(word for word in given if word != DEDICATED))
    chosen = {each: options[each] for each in method.simulated_options}
    return method, chosen | ({DEDICATED: True} if DEDICATED in given else {})


def time_calls(comm, call, repetitions):
    """Return the seconds per call on the slowest rank, of calls in a row begun together."""
    from mpi4py import MPI

    comm.Barrier()
    begin = time.perf_counter()
    for _ in range(repetitions):
        call()
    return comm.allreduce(time.perf_counter() - begin, op=MPI.MAX) / repetitions


def time_warm(comm, call, calls):
    """Return the seconds per call, as `time_calls`, after calls to warm up."""
    time_calls(comm, call, WARM_UP + calls // 10)
    return time_calls(comm, call, calls)


def take_turns(comm, variants, rounds, seconds):
    """Return {variant: seconds per call in each round} on rank 0; the variants take turns.

    The first round is discarded. The measurement ends after `rounds` more, or after `seconds`,
    whichever is first, but not before MIN_ROUNDS.

    Args:
        variants: {variant: function of the number of calls, and of whether these are the first,
            that returns the seconds per call}.
    """
    times = {name: [] for name in variants}
    share = seconds / (rounds + 1) / len(variants)
    end = time.monotonic() + seconds
    for done in range(rounds + 1):  # the first warms up, and determines the number of calls
        if comm.bcast(done > MIN_ROUNDS and time.monotonic() > end):
            break
        for name, timed in variants.items():
            taken = times[name]
            calls = comm.bcast(calls_in(share, taken) if comm.rank == 0 else None)
            taken.append(timed(calls, not taken))
    return {name: taken[1:] for name, taken in times.items()}


def calls_in(seconds, taken):
    """Return the number of calls to make in this time, from the seconds per call so far."""
    return max(1, min(MAX_CALLS, int(seconds / min(taken)))) if taken else WARM_UP


def compare_by_size(comm, doc, name, sizes, references, timed, bound):
    """Measure variants with vectors of float32 of several sizes, and report.

    Args:
        doc, name: the benchmark's docstring and name.
        sizes: of the vectors, in bytes.
        references: {variant: the variant that it is compared with, or None}, in table order.
        timed: function of (variant, vector, calls, whether they are the first) that returns the
            seconds per call.
        bound: the bound of the ratios.
    """
    import numpy as np

    arguments = parser(doc)
    arguments.add_argument("--max-kib", type=int, default=sizes[-1] >> 10)
    arguments.add_argument("--rounds", type=int, default=11, help="at most (default 11)")
    arguments.add_argument("--seconds", type=float, default=10.0, help="for a size (default 10)")
    arguments = arguments.parse_args()
    rows, found = [], {}
    if comm.rank == 0:
        print(f"# {comm.size} ranks, {', '.join(str(value) for value in machine().values())}")
        print("# µs per call of the slowest rank, median of the rounds")
        print(f"{'# Size (B)':<12}" + "".join(f"{each:>18}" for each in references), flush=True)
    for size in [size for size in sizes if size >> 10 <= arguments.max_kib]:
        vector = np.empty(size // 4, np.float32)
        variants = {each: functools.partial(timed, each, vector) for each in references}
        times = take_turns(comm, variants, arguments.rounds, arguments.seconds)
        if comm.rank:
            continue
        medians = {each: 1e6 * statistics.median(taken) for each, taken in times.items()}
        print(f"{size:<12}" + "".join(f"{value:18.2f}" for value in medians.values()), flush=True)
        rounds = len(next(iter(times.values())))
        rows.append({"bytes": size, "rounds": rounds, "microseconds": medians})
        for each, reference in references.items():
            if reference:
                found[ratio_label(size, each, reference)] = ratio(times[each], times[reference])
    if comm.rank == 0:
        figures = [figure(label, value, bound) for label, value in found.items()]
        report(arguments, name, comm.size, rows, ratios=found, figures=figures)


def ratio(numerators, denominators):
    """Return the median and quartiles of the ratios round by round.

    Only times of the same round are divided, so that a machine that slows down or is shared for a
    while does not change the ratio.
    """
    return quartiles([a / b for a, b in zip(numerators, denominators, strict=True)])


def quartiles(values):
    """Return {"low": …, "median": …, "high": …} of one value or more."""
    low, median, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * values
    )
    return {"low": low, "median": median, "high": high}


def spread(values, digits):
    """Return "mean ± standard deviation", with this number of digits after the point."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):8.{digits}f} ± {deviation:.{digits}f}"


def figure(name, value, bound):
    """Return a figure with its upper bound and whether it holds; for quartiles, the median."""
    value = value["median"] if isinstance(value, dict) else value
    return {"figure": name, "value": value, "bound": bound, "holds": bool(value <= bound)}


def markdown(corner, columns, rows):
    """Return a table of Markdown.

    Args:
        corner, columns: its headings.
        rows: {heading: list of its cells, as text}.
    """
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines)


def in_words(size):
    """Return a number of bytes, a power of two, in words."""
    return f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


def rounded(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def ratio_label(size, variant, reference):
    return f"{in_words(size)}: {variant} ÷ {reference}"


def machine():
    """Return the properties of the machine that the figures depend on."""
    import mpi4py
    import numpy

    mpi4py.rc.initialize = False  # has no effect on ranks, which have initialized MPI already
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
    """Return the bytes of a field of /proc/meminfo, such as MemAvailable."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise LookupError(f"no {field} in /proc/meminfo")


def former(arguments, name, ranks):
    """Return the results that a former run has written, with other methods and the same settings.

    So a long benchmark can be run in parts, by `--methods`.
    """
    path = arguments.results / f"{name}-{ranks}.json"
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    settings = {k: v for k, v in vars(arguments).items() if k not in ("results", "methods")}
    same = all(found["settings"].get(key) == value for key, value in settings.items())
    return found["results"] if same else {}


def report(arguments, name, ranks, results, *, ratios=None, figures=()):
    """Print the figures, and write everything to NAME-RANKS.json.

    Args:
        arguments: as parsed by `parser`; they are recorded, too.
        name, ranks: the benchmark's name, and the number of ranks that it ran with.
        results: its measurements.
        ratios: {name: quartiles} of ratios measured in one run, of which smaller is better;
            `compare.py` compares only these.
        figures: figures with bounds.
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
    text = json.dumps(contents, indent=1, ensure_ascii=False)
    # Numbers of a list on one line.
    text = re.sub(r"\[[-+\d.eE,\s]+\]", lambda of: " ".join(of[0].split()), text)
    path.write_text(text + "\n", encoding="utf-8")
    print(f"written to {path}", file=sys.stderr)
