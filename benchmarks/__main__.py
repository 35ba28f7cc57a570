"""Run the benchmarks, each under mpiexec with its numbers of ranks, and plot the results.

Each can be run alone, and then has options, such as for longer measurements:
`mpiexec -n 4 python benchmarks/latency.py --help`.
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import plots  # noqa: E402
from common import RESULTS, mpiexec  # noqa: E402

# The collectives that the benchmark of memory measures in a separate job each.
ALONE = (
    *("NeighborAverage", "QueuedNeighborAverage", "PushSum", "PairwiseAverage", "ParameterServer"),
    *("ReadyGroupAllreduce", "GeneratedGroupAllreduce", "FormedGroups", "TriggeredAverage"),
)
# Of figures about learning.
FIGURES = tuple(path.stem for path in sorted(HERE.glob("figure_*.py")))
# The numbers of ranks of each benchmark, with further options.
RANKS = {
    "latency": (2, 4),
    "late_call": (2, 4),
    "finite_check": (2,),
    "peer_latency": (2, 4),
    "group_calls": (2, 4),
    "controller_latency": (3,),
    "straggler_wait": (4,),
    "passive_latency": (2, 4),
    "waiting_callers": (4, 8),
    "idle": (2, 4),
    "timeline": (2, 4),
    "checkpoint": (2,),
    "memory": (
        4,
        *((3, "--collective", name) for name in ALONE),
    ),
    "torn": (4,),
    "straggler_training": (None,),
    "methods_wall": (None,),
    "late_rules": (4, 8),
    "late_gradients": (None,),
    "ablations": (None,),
    "comparisons": (None,),
    "overlap": (4,),
    "simulated_wall": (4, 8),
    "report_price": tuple((None, "--ranks", ranks) for ranks in ("4", "8")),
    "stragglers": (None,),
    "simulated_stragglers": (None,),
    "simulated_ripples": (None,),
    "simulated_partial_reduce": (None,),
    "partial_reduce_weights": (None,),
    "hop": (None,),
    "simulated_hop": (None,),
    "wp_sgd": (None,),
    "wp_sgd_wall": (4,),
    "simulated_training_speed": (None,),
    "learning_wall": (None,),
    "learning_stragglers": tuple((None, "--ranks", ranks) for ranks in ("8", "16", "64")),
    "learning_traces": (None,),
    "learning_own_pace": tuple((None, "--ranks", ranks) for ranks in ("4", "8")),
    "ablations_own_pace": tuple((None, "--ranks", ranks) for ranks in ("8", "64")),
    "learning_bias": (None,),
    "learning_shards": (None,),
    "learning_texts": (None,),
    "workloads": (
        (None, "--record"),
        *((None, "--tasks", name) for name in ("translation", "control", "language")),
    ),
    "workloads_wall": (None,),
    "shards_cost": (4,),
    "recovery": (None,),
    "other_optimizers": (4,),
    "step_cost": (4,),
    "own_pace": (4, 8),
    **dict.fromkeys(FIGURES, (None,)),
    "simulation_speed": (None,),
    "scaling_figures": (None,),
    "gpu": ((None, "--all"),),
}
# Benchmarks of methods rather than of the machine, or of a GPU, run by name only.
BY_NAME = (
    "gpu",
    "checkpoint",
    *("late_rules", "late_gradients", "ablations", "comparisons"),
    *("stragglers", "simulated_stragglers", "simulated_ripples", "hop", "simulated_hop", "wp_sgd"),
    *("wp_sgd_wall", "simulated_partial_reduce", "partial_reduce_weights"),
    *("learning_wall", "learning_stragglers", "learning_traces", "learning_own_pace"),
    *(
        "ablations_own_pace",
        "learning_bias",
        "learning_shards",
        "learning_texts",
        "workloads",
        "workloads_wall",
        "shards_cost",
        "own_pace",
        "recovery",
        "other_optimizers",
        *FIGURES,
    ),
)


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        help=f"of {', '.join(RANKS)} (default: all but {', '.join(BY_NAME)}; about 25 minutes)",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument(
        "--plot", action="store_true", help="measure nothing, draw the results that are there"
    )
    parser.add_argument(
        "--figures",
        action="store_true",
        help="measure nothing, draw the results of papers' figures in docs/figures",
    )
    arguments = parser.parse_args()
    if arguments.figures:
        plots.draw_figures(arguments.results)
        return
    names = arguments.names or [name for name in RANKS if name not in BY_NAME]
    if unknown := set(names) - set(RANKS):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(RANKS)}")
    for name in [] if arguments.plot else names:
        for each in RANKS[name]:
            ranks, *options = each if isinstance(each, tuple) else (each,)
            print(f"\n=== {' '.join([name, *options])}", flush=True)
            launcher = [*mpiexec(), "-n", str(ranks)] if ranks else []
            script = [sys.executable, str(HERE / f"{name}.py"), "--results", arguments.results]
            subprocess.run([*launcher, *script, *options], check=True, timeout=3600)
    plots.draw(arguments.results, [name.replace("_", "-") for name in names])


if __name__ == "__main__":
    main()
