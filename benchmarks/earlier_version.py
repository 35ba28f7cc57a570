"""This version beside an earlier one, in turn: calls under skew, and training end to end.

    python benchmarks/earlier_version.py --earlier TREE

TREE is a checkout of the earlier version that has been built in place (`python setup.py build_ext
--inplace`); both run with this Python. Two comparisons, on 2 and 4 ranks:

- Calls under skew: after a barrier rank r computes for r times --skew-ms, then calls, with a vector
  of 16 MiB, float32, of the application's own, or, as optimizers have it, in a window if the
  version has windows; nobody waits, and the late rule is the default one. The time of a call, the
  mean of all ranks, is also compared with that of MPI_Allreduce under the same skew. To compute is
  to sleep.
- End to end: `wagma train` of a linear model with 25 M parameters, with steps of 2 ms and the
  gradients' own time. Steps per second of all ranks.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import mean, median

from common import figure, mpiexec, parser, ratio, report

HERE = Path(__file__).resolve()
VERSIONS = "earlier", "now"
METHODS = "wagma", "allreduce"
BOUND = 1 / 3  # of a call's time under skew, ÷ the earlier version's
WIDTH = 5000  # of the linear model
CALLS = 20

SCRIPT = f"""
import torch


def model():
    return torch.nn.Linear({WIDTH}, {WIDTH}, bias=False)


def data(rank, size, batch_size, seed):
    batches = [(torch.ones(1, {WIDTH}), torch.zeros(1, {WIDTH}))] * 4
    return batches, batches


def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""


def call_under_skew(kib, skew):
    """Be a rank of a job: print {way: milliseconds of a call, the mean of all ranks}."""
    import numpy as np
    from mpi4py import MPI

    import collectives

    comm = MPI.COMM_WORLD
    own = np.zeros(kib * 256, np.float32)
    vectors = {"array": own}
    if hasattr(collectives, "empty"):
        vectors["optimizer's"] = collectives.empty(comm, kib * 256)
        vectors["optimizer's"].fill(0)
    found = {}
    for way, vector in vectors.items():
        with collectives.GroupAllreduce(
            comm, vector, group_size=comm.size, sync_period=10**9
        ) as average:
            found[way] = time_under_skew(comm, partial(average, vector), skew)
            average.synchronize(vector)
    found["MPI_Allreduce"] = time_under_skew(comm, lambda: comm.Allreduce(MPI.IN_PLACE, own), skew)
    if comm.rank == 0:
        print(json.dumps(found))


def time_under_skew(comm, call, skew):
    times = []
    for _ in range(CALLS):
        comm.Barrier()
        time.sleep(comm.rank * skew)
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return mean(comm.allgather(median(times)))


def run(tree, ranks, *arguments):
    """Run a job with a version; return what it prints."""
    command = [*mpiexec(), "-n", str(ranks), sys.executable, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=tree, env=environment, check=True, timeout=300, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ).stdout  # fmt: skip


def commit_of(tree):
    command = ["git", "-C", tree, "log", "-1", "--format=%h %s"]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


def skewed(tree, ranks, arguments):
    told = run(tree, ranks, HERE, "--call", arguments.kib, arguments.skew_ms / 1000)
    return json.loads(told.splitlines()[-1])


def trained(tree, ranks, method, arguments):
    """Return the steps per second of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.py").write_text(SCRIPT)
        run(
            tree, ranks, "-m", "wagma", "train", "--script", f"{folder}/model.py",
            "--algorithm", method, "--steps", arguments.steps, "--step-time", 2, "--lr", 1e-6,
            "--runs-dir", folder, "--name", "run",
        )  # fmt: skip
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    return ranks * arguments.steps / summary["wall_s"]


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--earlier", type=Path, required=True, metavar="TREE")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--kib", type=int, default=16 * 1024)
    arguments.add_argument("--skew-ms", type=float, default=5.0)
    arguments.add_argument("--steps", type=int, default=100)
    arguments = arguments.parse_args()
    trees = dict(zip(VERSIONS, (arguments.earlier.resolve(), HERE.parents[1])))
    arguments.earlier = commit_of(arguments.earlier)
    results, found, figures = {}, {}, []
    for ranks in (2, 4):
        calls = {version: [] for version in VERSIONS}
        rates = {(version, method): [] for version in VERSIONS for method in METHODS}
        for _ in range(arguments.rounds):
            for version, tree in trees.items():
                calls[version].append(skewed(tree, ranks, arguments))
                for method in METHODS:
                    rates[version, method].append(trained(tree, ranks, method, arguments))
        name = f"{ranks} ranks"
        results[name] = {
            "milliseconds": {
                version: {way: median(each[way] for each in times) for way in times[0]}
                for version, times in calls.items()
            },
            "steps per second": {
                version: {method: median(rates[version, method]) for method in METHODS}
                for version in VERSIONS
            },
        }
        print(f"{name}: {json.dumps(results[name], indent=1)}", flush=True)
        before, now = (calls[version] for version in VERSIONS)
        for way in ("array", "optimizer's"):
            # What an optimizer averaged was an array of its own before there were windows.
            then = [each.get(way, each["array"]) for each in before]
            label = f"{name}: call under skew, {way}: now ÷ earlier"
            found[label] = ratio([each[way] for each in now], then)
            figures.append(figure(label, found[label], BOUND))
            label = f"{name}: call under skew, {way} ÷ MPI_Allreduce"
            found[label] = ratio(
                [each[way] for each in now], [each["MPI_Allreduce"] for each in now]
            )
        for method in METHODS:
            found[f"{name}: steps per second, {method}: earlier ÷ now"] = ratio(
                *(rates[version, method] for version in VERSIONS)
            )
    report(arguments, "earlier-version", 4, results, ratios=found, figures=figures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--call"]:
        call_under_skew(int(sys.argv[2]), float(sys.argv[3]))
    else:
        main()
