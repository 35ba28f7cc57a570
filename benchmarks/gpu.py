"""Costs of arrays and models on GPUs, through pinned host memory and from device to device.

    python benchmarks/gpu.py --check
    python benchmarks/gpu.py --all
    python benchmarks/gpu.py --parts staged,passive --limit 120
    mpiexec -n 2 python benchmarks/gpu.py --part staged

With --all or --parts each part runs in a separate job, with 1, 2 or 4 ranks, which share a GPU if
there is only one. First the benchmark says what is missing on this machine, and what cannot be
measured without it; --check does only that. It ends within --limit seconds, and writes what it has
found after each job to gpu.json, with the device, the driver, the MPI and the date, and with the
reason if a part fails or takes too long. What a job has measured is in so-far.json, in a folder
there, while it runs, and in gpu.json if it does not end. Parts:

tests    the suite's tests on the real driver instead of the stand-in: among them that kernels give
         the same bits as the host's passes in all dtypes, with subnormal numbers and NaN;
         direct-tests: the tests in which devices average, by MPI or by each other's memory
copies   GB/s from and to pinned memory, and on the device; the kernel that looks for NaN and
         infinity; seconds of a call's passes over the vector on the host
aware    whether MPI takes device memory, and seconds of a message while the default stream is busy
staged   a call with an array on the device, copied in blocks of 1, 4 and 16 MiB, ÷ (both copies,
         made by all ranks at once, + the call with a numpy array); bound 1.5
direct   if MPI takes device memory, and does not wait for the default stream, or ranks of a node
         share it: a call that averages on the device ÷ copying the vector there twice, to memory
         that others may read and back, by all ranks at once; bound 1.5; beside the staged call
passive  from one rank's call of 4 KiB to its result while the others' main threads spin in Python:
         their devices idle, or busy with 100 ms of work at a time, beside numpy arrays; each path
queue    the same latency while the others' launch queues are full behind a stream that stands still
         for 100 ms, so that the driver blocks them, with a call started on that stream or none
calls    the longest call of the driver and of MPI on a progress thread whose main thread allocates,
         pins, queues 1,024 operations, or has torch do so; functions that wait, in calls: none
memory   memory of a collective beside its vector, on the device and on the host; bound 3 each
step     WAGMA's step of a model of ResNet-50's size, and the local optimizer's alone, beside an
         average by gloo of a vector of that size on the host, with both copies; torch's report of
         operations that wait for the device; needs torch

shards   averaged optimizer state and control variates: trainings on the device beside the CPU's, by
         fused, compiled and other optimizers and in mixed precision; seconds of steps; needs torch

checkpoints
         trainings with dropout that go on from a checkpoint on the device, bit for bit, and read it
         on the CPU; what a checkpoint of a large model takes of a minute; bound 2 %; needs torch

staged, direct and passive are measured once more under MPS, which is started and ended for that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import gpu_calls
import gpu_checkpoints
import gpu_parts
import gpu_preflight
import gpu_queue
import gpu_shards
import gpu_tests
import traced
from common import figure, machine, mpiexec, parser, report, rounded
from cuda_driver import Device
from gpu_mps import mps
from gpu_processes import aborting, kept, last_words, replace, run_for

from wagma.mps import is_running

BOUND = 1.5
LIMIT = 540.0  # seconds of everything: of ten minutes it leaves some to install and to end
LEAST = 10.0  # seconds that a job needs beside those that it measures for
TAIL = 8000  # characters kept of the output of a job that failed
# With the default, 8, a stream may share a queue of the hardware with one that stands still. Under
# MPS all processes of a device take theirs out of one pool.
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST, POOL = 32, 64
PARTS = {
    "tests": gpu_tests.tests,
    "copies": gpu_parts.copies,
    "aware": gpu_parts.aware,
    "staged": gpu_parts.staged,
    "direct": gpu_parts.direct,
    "direct-tests": gpu_tests.direct_tests,
    "passive": gpu_parts.passive,
    "queue": gpu_queue.queue,
    "calls": gpu_calls.calls,
    "memory": gpu_parts.memory,
    "step": gpu_parts.step,
    "shards": gpu_shards.shards,
    "checkpoints": gpu_checkpoints.checkpoints,
}


class Job(NamedTuple):
    """A part, its number of ranks, its limit in seconds, and whether it runs under MPS."""

    part: str
    ranks: int
    limit: float
    under_mps: bool = False

    @property
    def name(self):
        return f"{self.part}-{self.ranks}{', MPS' * self.under_mps}"


# First the parts that test results; then those that cost little or matter most.
PLAN = (
    *(Job("tests", 1, 90), Job("tests", 4, 120), Job("aware", 2, 60), Job("direct-tests", 4, 90)),
    *(Job("copies", 1, 60), Job("staged", 2, 60), Job("passive", 2, 60), Job("queue", 2, 60)),
    *(Job("calls", 2, 75), Job("direct", 2, 60), Job("step", 2, 75), Job("memory", 2, 45)),
    *(Job("shards", 2, 120), Job("checkpoints", 2, 120)),
    *(Job("staged", 4, 75), Job("passive", 4, 60), Job("direct", 4, 60)),
    *(Job("direct", 2, 60, True), Job("passive", 2, 60, True), Job("staged", 2, 60, True)),
    *(Job("direct", 4, 60, True), Job("passive", 4, 60, True), Job("staged", 4, 75, True)),
)
# Parts that another one depends on: whether devices average by messages is determined by `aware`.
FIRST = {"direct-tests": "aware"}


class NotMeasured(Exception):
    """The reason why a job is not run."""


def measure(arguments):
    """Measure one part, as a rank of its job; an exception ends the job."""
    from mpi4py import MPI

    with aborting(MPI.COMM_WORLD):
        measure_on(MPI.COMM_WORLD, arguments)


def measure_on(comm, arguments):
    from mpi4py import MPI

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
        "mps": is_running(),
    }
    figures = [figure(name, value, BOUND) for name, value in ratios.items()]
    if isinstance(measured, dict):
        bounded = measured.pop("figures", {})
        figures += [figure(name, value, bound) for name, (value, bound) in bounded.items()]
    results = {**facts, "measured": measured}
    report(arguments, f"gpu-{arguments.part}", comm.size, results, ratios=ratios, figures=figures)


class Measured:
    """The results of the jobs so far, written to gpu.json after each.

    Args:
        arguments: the benchmark's.
        began: when it was started, in seconds of the monotonic clock.
    """

    def __init__(self, arguments, began):
        self.arguments, self.began = arguments, began
        self.path = arguments.results / "gpu.json"
        self.parts, self.facts, self.ratios, self.figures = {}, {}, {}, []
        self.taken, self.findings = {}, []

    @property
    def left(self):
        """The seconds that are left."""
        return self.arguments.limit - self.seconds

    @property
    def seconds(self):
        return time.monotonic() - self.began

    @property
    def has_failed(self):
        """Whether a job has not ended well, or what must never happen did, as a test that fails."""
        never = any(each["bound"] == 0 and not each["holds"] for each in self.figures)
        return never or any("failed" in part for part in self.parts.values())

    def add(self, job, found):
        """Add the contents of a job's file."""
        suffix = ", MPS" * job.under_mps
        self.parts[job.name] = found["results"].pop("measured")
        # Facts of the first jobs are kept: those under MPS hold for its jobs alone.
        self.facts = {**found["results"], **self.facts}
        self.ratios |= {name + suffix: each for name, each in found["ratios"].items()}
        self.figures += [{**each, "figure": each["figure"] + suffix} for each in found["figures"]]

    def write(self):
        contents = {
            "benchmark": "gpu",
            "ranks": None,
            **self.facts,
            "machine": machine(),
            "settings": {
                "options": options_of(self.arguments),
                "limit": self.arguments.limit,
                "parts": self.arguments.parts or "all",
            },
            "preflight": {
                each.check.name: {"missing": each.missing} if each.missing else each.found
                for each in self.findings
            },
            "seconds": self.seconds,
            "seconds of parts": self.taken,
            "results": self.parts,
            "ratios": self.ratios,
            "figures": self.figures,
        }
        replace(self.path, contents)

    def print_table(self):
        """Print all numbers, then the figures, then what is missing."""
        print(f"\n=== {', '.join(f'{name} {value}' for name, value in self.facts.items())}")
        for place, value in leaves(self.parts):
            if isinstance(value, float):
                print(f"{rounded(value):>10}  {place}")
        print(f"\n{'figure':>10} {'bound':>7}")
        for each in self.figures:
            held = "" if each["holds"] else "MISSED: "
            value, bound = rounded(each["value"]), rounded(each["bound"])
            print(f"{value:>10} {bound:>7}  {held}{each['figure']}")
        print("\nnot measured:")
        for name in ("not measured", "failed", "begun"):
            for place, value in leaves(self.parts):
                if place.endswith(f": {name}"):
                    print(f"  {place}: {in_short(str(value))}")


def in_short(text):
    """Return the last line, and of what a job has printed before that the last words."""
    *printed, how = text.strip().splitlines()
    return ": ".join(filter(None, [how, last_words("\n".join(printed))]))


def leaves(results, place=""):
    """Yield ("part: name: name", value) of all values in nested dictionaries and lists."""
    if isinstance(results, dict):
        for name, value in results.items():
            yield from leaves(value, f"{place}: {name}" if place else name)
    elif isinstance(results, list):
        for index, value in enumerate(results):
            yield from leaves(value, f"{place}: {index}")
    else:
        yield place, results


def planned(arguments):
    """Return the jobs of the parts that were asked for, and of those that they depend on."""
    names = set(arguments.parts or PARTS)
    names |= {FIRST[name] for name in names if name in FIRST}
    return [job for job in PLAN if job.part in names and job.ranks <= arguments.most_ranks]


def options_of(arguments):
    """Return the options that jobs are given."""
    not_theirs = "all", "parts", "check", "part", "limit", "results", "most_ranks"
    return [
        f"--{name.replace('_', '-')}={value}"
        for name, value in vars(arguments).items()
        if name not in not_theirs and value is not None
    ]


def measure_all(arguments, began):
    """Look what is there, run the jobs, and write gpu.json; return the exit status."""
    jobs, measured = planned(arguments), Measured(arguments, began)
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(gpu_preflight.Context())
        print("=== preflight", flush=True)
        ranks = max(job.ranks for job in jobs)
        checks = gpu_preflight.checks(context, arguments, [*mpiexec(), "-n", str(ranks)])
        measured.findings = gpu_preflight.look(checks, jobs)
        print(*measured.findings, sep="\n", flush=True)
        missing = [each for each in measured.findings if each.missing and each.check.required]
        for each in missing:
            print(f"gpu.py: no {each.check.name}: {each.missing}", file=sys.stderr)
        if missing or arguments.check:
            return 2 if missing else 0
        measured.facts = context.facts
        measured.write()
        start_mps = once(lambda: stack.enter_context(mps()))
        for job in jobs:
            run_and_add(job, measured, start_mps)
    measured.print_table()
    print(f"written to {measured.path}", file=sys.stderr)
    return int(measured.has_failed)


def run_and_add(job, measured, start_mps):
    """Run a job, and write what it has measured, or why nothing."""
    print(f"\n=== {job.name}, {job.ranks} rank{'s' * (job.ranks > 1)}", flush=True)
    began = measured.seconds
    try:
        measured.add(job, run(job, measured, start_mps))
        print(json.dumps(measured.parts[job.name], indent=1, ensure_ascii=False))
    except NotMeasured as reason:
        measured.parts[job.name] = {"not measured": str(reason)}
        print(f"not measured: {reason}")
    except Exception as error:  # the other jobs still run
        found = {"failed": str(error) or repr(error)}
        if isinstance(error, Failed) and error.so_far is not None:
            found["so far"] = error.so_far
        measured.parts[job.name] = found
        print(f"failed: {error}", file=sys.stderr)
    sys.stdout.flush()
    measured.taken[job.name] = measured.seconds - began
    measured.write()


class Failed(Exception):
    """A job has failed or taken too long.

    Attributes:
        so_far: what it had measured, None if nothing.
    """

    def __init__(self, words, so_far):
        super().__init__(words)
        self.so_far = so_far


def once(function):
    """Return a function that calls this one once, and returns that result from then on."""
    results = []

    def call():
        if not results:
            results.append(function())
        return results[0]

    return call


def run(job, measured, start_mps):
    """Run a job; return the contents of its file.

    Raises:
        NotMeasured: a requirement of the job is missing.
        Failed: the job has failed, or taken too long.
    """
    if reason := gpu_preflight.why_not(job, measured.findings):
        raise NotMeasured(reason)
    check_time(job, measured)
    with tempfile.TemporaryDirectory(dir=measured.path.parent, prefix="gpu-running-") as folder:
        env = environment(job, measured.parts, start_mps, Path(folder))
        check_time(job, measured)  # MPS may have taken some to start
        limit = min(job.limit, measured.left)
        command = [
            *(*mpiexec(), "-n", str(job.ranks)),
            *("env", *(f"{name}={value}" for name, value in env.items())),
            *(sys.executable, __file__, *options_of(measured.arguments), "--part", job.part),
            *("--results", folder),
        ]
        status, said = run_for(command, limit)
        if status != 0:
            how = f"no end after {limit:.0f} s" if status is None else f"exit status {status}"
            raise Failed(f"{said[-TAIL:]}\n{how}".strip(), kept(Path(folder)))
        return json.loads((Path(folder) / f"gpu-{job.part}-{job.ranks}.json").read_text())


def check_time(job, measured):
    """Raise NotMeasured if too little time is left for a job."""
    if measured.left < LEAST + (0 if "tests" in job.part else measured.arguments.seconds):
        raise NotMeasured(f"the others have taken {measured.seconds:.0f} s")


def environment(job, parts, start_mps, folder):
    """Return a job's additional environment variables; raise NotMeasured if it cannot have them."""
    most = min(MOST, POOL // job.ranks) if job.under_mps or is_running() else MOST
    env = {CONNECTIONS: os.environ.get(CONNECTIONS, str(most))}
    if job.under_mps:
        of_mps, why_not = start_mps()
        if why_not:
            raise NotMeasured(why_not)
        env |= of_mps
    if job.part == "calls":
        try:
            env = {**env, **traced.environment(folder)}
        except RuntimeError as error:
            raise NotMeasured(str(error)) from None
    aware = parts.get("aware-2", {})
    if "failed" in aware:  # an MPI that has ended that job would end others, too
        env["WAGMA_CUDA_AWARE"] = "0"
    if "tests" in job.part:
        env |= gpu_tests.environment(job.part == "direct-tests" and aware.get("aware", False))
    return env


def names_of(text):
    """Return the parts that --parts names, separated by commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}: there are {', '.join(PARTS)}")
    return names


def main():
    made = parser(__doc__)
    which = made.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="all parts, each in a job of its own")
    which.add_argument(
        "--parts", type=names_of, metavar="NAMES", help="these parts, separated by commas"
    )
    which.add_argument("--check", action="store_true", help="say what is missing, no more")
    which.add_argument("--part", choices=PARTS, help="one, in the job that this is a rank of")
    add = made.add_argument
    add("--limit", type=float, default=LIMIT, help=f"seconds for all parts (default {LIMIT:.0f})")
    add("--kib", type=int, default=100_000, help="of a vector (default: 25.6 million float32)")
    add("--parameters", type=int, default=25_600_000, help="of the model (default: ResNet-50's)")
    add("--busy-mib", type=int, default=1024, help="of what is filled to keep a device busy")
    add("--most-ranks", type=int, default=4, help="leave out jobs of more (default 4)")
    add("--rounds", type=int, default=11, help="at most (default 11)")
    add("--seconds", type=float, default=15.0, help="of measuring, for a part (default 15)")
    add("--tests", metavar="NAMES", default="", help="of the tests only these, as pytest's -k")
    add("--torch-device", metavar="MODULE", help="one whose load() gives torch a device, for tests")
    began, arguments = time.monotonic(), made.parse_args()
    arguments.results = arguments.results.resolve()
    if arguments.part:
        return measure(arguments)
    if not planned(arguments):
        made.error(f"none of these parts has jobs of at most {arguments.most_ranks} ranks")
    # If terminated, the run still ends its job, MPS, and the process that holds the context.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return measure_all(arguments, began)


if __name__ == "__main__":
    sys.exit(main())
