"""What `wagma report` says a straggler costs, and what is gained when it is really taken away.

    python benchmarks/report_price.py --ranks 4

Trains by several methods with a straggler in the script, which sleeps, and three times without it,
of which the median counts. The report of each run with a straggler must name it, and price it
within 10 % of the difference of the measured wall times. On two ranks, each bound to a core of its
own, a busy loop also takes half of the core of one: it must be found outside the process.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import figure, mpiexec, parser, report

BOUND = 0.1
AGAIN = ", again"
SECONDS = 0.015  # of a delay; for every tenth step ten times as much
SCRIPT = """
import os
import subprocess
import sys
import time

import torch

RANK = None
CASE, STEPS, SECONDS = ...
step = 0


def model():
    return torch.nn.Linear(8, 1)


def data(rank, size, batch_size, seed):
    global RANK
    RANK = rank
    if CASE in ("stolen", "bound"):
        os.sched_setaffinity(0, range(os.cpu_count()))  # that of the training before
        core = sorted(os.sched_getaffinity(0))[rank]
        os.sched_setaffinity(0, [core])
        torch.set_num_threads(1)
        if rank == 1 and CASE == "stolen":
            busy = "import os\\nwhile os.getppid() == " + str(os.getpid()) + ": pass"
            subprocess.Popen([sys.executable, "-c", busy])  # it inherits the core

    def batches():
        while True:
            if rank == 1 and CASE == "data loading":
                time.sleep(SECONDS)
            yield torch.ones(batch_size, 8)

    return batches(), []


def delay():
    if RANK not in ((1, 2) if CASE == "two ranks" else (1,)):
        return 0.0
    if CASE in ("one rank", "two ranks"):
        return SECONDS
    if CASE == "every tenth step":
        return 10 * SECONDS if step % 10 == 4 else 0.0
    if CASE == "from the middle on":
        return 2 * SECONDS if step >= STEPS // 2 else 0.0
    if CASE == "growing":
        return 2 * SECONDS * step / STEPS
    return 0.0


def loss(model, batch):
    global step
    step += 1
    time.sleep(delay())
    if CASE in ("stolen", "bound"):
        ends = time.thread_time() + SECONDS
        while time.thread_time() < ends:
            pass
    return model(batch).square().mean()
"""
JOB = """
import json, sys
from wagma import cli

for words in json.loads(sys.argv[1]):
    if cli.main(words):
        sys.exit(1)
"""
CASES = {
    "one rank": ({1}, "always", "gradient"),
    "two ranks": ({1, 2}, "always", "gradient"),
    "every tenth step": ({1}, "now and then", "gradient"),
    "from the middle on": ({1}, "from a step on", "gradient"),
    "growing": ({1}, "growing", "gradient"),
    "data loading": ({1}, "always", "data"),
}
STOLEN = {"stolen": ({1}, "always", "outside")}


def train(arguments, ranks, cases, methods, step_time_ms, directory):
    """Train once for each case and method, and without a straggler; in one job."""
    lines = []
    for number, (case, method) in enumerate(itertools.product(cases, methods)):
        made = case.partition(AGAIN)[0]
        given = f"CASE, STEPS, SECONDS = {made!r}, {arguments.steps}, {SECONDS}"
        script = Path(directory) / f"straggler_{ranks}_{number}.py"  # imported once by its name
        script.write_text(SCRIPT.replace("CASE, STEPS, SECONDS = ...", given))
        name = f"{ranks},{case},{method}".replace(" ", "-")
        lines.append([
            "train", "--script", str(script), "--steps", str(arguments.steps),
            "--step-time", str(step_time_ms), "--algorithm", method,
            "--runs-dir", directory, "--name", name,
        ])  # fmt: skip
    command = [*mpiexec(), "-n", str(ranks), sys.executable, "-c", JOB, json.dumps(lines)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=1200, env=environment)
    done.check_returncode()


def repeated(without):
    """Return the names of the runs without a straggler."""
    return [without, f"{without}{AGAIN} 1", f"{without}{AGAIN} 2"]


def order(cases, without):
    """Return the cases, with a run without a straggler before, between and after them."""
    first, between, last = repeated(without)
    half = len(cases) // 2
    return [first, *list(cases)[:half], between, *list(cases)[half:], last]


def compare(ranks, cases, without, method, directory):
    """Yield for each case what the report says, and what was measured."""
    from wagma.report import of

    def report_of(case):
        return of(Path(directory) / f"{ranks},{case},{method}".replace(" ", "-"))

    shortest = statistics.median(report_of(each).wall_s for each in repeated(without))
    for case, (expected, pattern, part) in cases.items():
        found = report_of(case)
        named = {rank for each in found.stragglers for rank in each.ranks}
        gain = found.wall_s - shortest
        priced = found.cost.seconds if found.cost else 0.0
        first = found.stragglers[0] if found.stragglers else None
        yield (
            case,
            {
                "named": named == expected,
                "pattern": bool(first) and first.pattern == pattern,
                "part": bool(first) and first.part == part,
                "wall_s": found.wall_s,
                "gain_s": gain,
                "priced_s": priced,
                "off_by": abs(priced / gain - 1),
                "simulation_error": found.error,
            },
        )


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--step-time-ms", type=float, default=15.0)
    arguments.add_argument("--methods", nargs="+", default=["allreduce", "local-sgd", "wagma"])
    arguments = arguments.parse_args()
    results, figures = {}, []
    jobs = [(arguments.ranks, CASES, "nothing", arguments.methods, arguments.step_time_ms)]
    jobs.append((2, STOLEN, "bound", ["allreduce"], 0.0))
    with tempfile.TemporaryDirectory() as directory:
        for ranks, cases, without, methods, step_time_ms in jobs:
            train(arguments, ranks, order(cases, without), methods, step_time_ms, directory)
            for method in methods:
                for case, found in compare(ranks, cases, without, method, directory):
                    name = f"{method}, {ranks} ranks, {case}"
                    results[name] = found
                    print(f"{name:45} {found}", flush=True)
                    if step_time_ms:
                        label = f"{name}: price and gain differ by"
                        figures.append(figure(label, found["off_by"], BOUND))
                    wrong = sum(not found[key] for key in ("named", "pattern", "part"))
                    figures.append(figure(f"{name}: wrong answers", wrong, 0))
    report(arguments, "report-price", arguments.ranks, results, figures=figures)


if __name__ == "__main__":
    main()
