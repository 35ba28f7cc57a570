"""Tasks whose steps take unequal times by themselves, by time on 4 and 8 ranks, nothing injected.

    python benchmarks/workloads_wall.py --ranks 4 --tasks translation language

`wagma compare` with the methods of `workloads.py`. Where ranks share cores their computation would
compete, and be unequal by that; so they sleep where a GPU, or a simulator, would compute. How large
a part computation and waiting for a core are is printed, and by how much steps take longer than
they should; a machine with other load gives no figures.

Translation and language are trained as there, in slow motion: with 4 ranks a step takes 12 times
what its batch has cost on a core alone (`--step-time-per-work`; computation is a part of that), and
the training takes 12 times as long; with 8 ranks 24 times. In control each step of a rank's 4
environments sleeps for 4 ms.

All methods that are missing with a seed are trained in one job, and written when it has ended; a
later run goes on from there. A training takes 18, 8 and 10 seconds with 4 ranks, 36, 17 and 10 with
8, and its evaluations three more; a job begins within half a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from common import compare, parser
from workloads import METHODS, RATE, RECORDED, WORKLOADS, add, missing, read, table

BENCHMARK = "workloads-wall"  # in the names of the files of results
SCRIPT = Path(__file__).with_name("workload_script.py")
SLOWER = 3  # times the number of ranks: how slow the motion is
EPISODES = {"batch_size": 4, "seconds": 10.0, "environment_time_ms": 4.0}  # settings of control
EVALUATIONS = 10


def settings_of(name, ranks, recorded):
    """Return what a workload's trainings depend on, as JSON has it.

    Args:
        name, ranks: the workload's name, and the number of ranks.
        recorded: the step times that `workloads.py --record` has written.
    """
    if name == "control":
        return EPISODES
    of, line, slower = WORKLOADS[name], recorded[name]["trained"]["step"], SLOWER * ranks
    return {
        "batch_size": of.batch_size,
        "seconds": round(slower * of.seconds, 3),
        "step_time_ms": round(1e3 * slower * line["base_s"], 3),
        "step_time_per_work_ms": round(1e3 * slower * line["per_work_s"], 5),
    }


def options_of(name, settings):
    """Return the options of `wagma compare` by which a workload is trained with its settings."""
    every = settings["seconds"] / EVALUATIONS
    options = ["--batch-size", settings["batch_size"], "--evaluate-every-seconds", every]
    if name == "control":
        options += ["--task", "control", "--environment-time", settings["environment_time_ms"]]
    else:
        options += ["--script", SCRIPT, "--optimizer", "adamw", "--lr", RATE]
        options += ["--step-time-per-work", settings["step_time_per_work_ms"]]
    return options


def train_seed(name, settings, ranks, methods, seed):
    """Train over MPI with each method; return {method: figures as of `workloads.train_one`}.

    Figures have `shares_of` the run as well.
    """
    of = argparse.Namespace(
        seeds=1, seconds=settings["seconds"], step_time_ms=settings.get("step_time_ms", 0.0)
    )
    options = [*options_of(name, settings), "--seed", seed, "--no-straggler-warnings"]
    os.environ["WORKLOAD"] = name  # of the script
    with tempfile.TemporaryDirectory() as directory:
        labels = [METHODS[each] for each in methods]
        found, _ = compare(of, ranks, labels, map(str, options), directory)
        runs = {method: found[label][0] for method, label in zip(methods, labels)}
        return {
            method: figures_of(name, run)
            | shares_of(Path(directory) / "runs" / run["directory"], settings)
            for method, run in runs.items()
        }


def figures_of(name, run):
    """Return the figures and evaluations of a run of `wagma compare`."""
    return {
        "samples_per_s": run["samples_per_s"],
        "steps": run["evaluations"][-1]["step"],
        "computing": 1 - run["waiting_share"],
        "seconds": [each["elapsed_s"] for each in run["evaluations"]],
        **{
            metric: [float(f"{each[metric]:.5g}") for each in run["evaluations"]]
            for metric in WORKLOADS[name].targets
        },
    }


def shares_of(directory, settings):
    """Return what was not sleep in a run's steps, from its ranks' records.

    Returns:
        "processor" and "queued": the shares of the ranks' own time in which they computed, and in
        which they waited for a core; "longer": that time ÷ the time that the work of their steps
        should take, - 1, where it should take some.
    """
    files = directory.glob("rank-*.jsonl")
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    own, cpu, queued, work = (
        sum(each[part] for each in records) for part in ("compute_s", "cpu_s", "queued_s", "work")
    )
    shares = {"processor": cpu / own, "queued": queued / own}
    if "step_time_ms" in settings:
        by_work = settings["step_time_per_work_ms"] * work
        asked = (settings["step_time_ms"] * len(records) + by_work) / 1000
        shares["longer"] = own / asked - 1
    return shares


def shares_in_words(runs):
    """Return the medians of `shares_of` the runs that have them; "" without any."""
    words = {
        "processor": "computation is {:.0f} % of the ranks' own time",
        "queued": "waiting for a core {:.1f} %",
        "longer": "steps take {:.1f} % longer than their work should",
    }
    known = {name: [each[name] for each in runs if name in each] for name in words}
    return ", ".join(
        words[name].format(100 * statistics.median(of)) for name, of in known.items() if of
    )


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--tasks", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    arguments.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = arguments.parse_args()
    for ranks in arguments.ranks:
        for name in arguments.tasks:
            settings = settings_of(name, ranks, read(arguments, RECORDED))
            for seed in range(arguments.seeds):
                methods = missing(arguments, ranks, name, settings, seed, BENCHMARK)
                if methods:
                    made = train_seed(name, settings, ranks, methods, seed)
                    add(arguments, ranks, name, settings, seed, made, BENCHMARK)
                    said = shares_in_words(made.values())
                    print(f"{name}, {ranks} ranks, seed {seed}: {said}", flush=True)
            results = read(arguments, ranks, BENCHMARK)
            print(f"\n{name}\n\n{table(name, ranks, results)}\n")
            of_methods = results[name]["runs"].values()
            print(shares_in_words([run for runs in of_methods for run in runs.values()]))


if __name__ == "__main__":
    main()
