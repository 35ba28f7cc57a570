"""Whether fast ranks whose data are others pull the model to themselves, in simulated time.

    python benchmarks/learning_bias.py

8 ranks, of which those of even number are 4 times as slow for good, and have other data than the
fast ones: of the digits 0 to 4 instead of 5 to 9 (`unlike_digits.py`), or a target of −1 instead of
1 (`unlike_targets.py`), where the mean of all losses is least at 0. Both for 40 s, with steps of
0.2 s. The accuracy on all digits and on those of either ranks, and the place of the vector, which
is 0.6 where every step counts alike: of the ranks' mean models of the last 10 s, one every half
second (a method's models differ within its period). Means and deviations over the seeds.
"""

import statistics
from pathlib import Path

from common import parser, report
from learning import Run, train_all, with_former
from learning_own_pace import METHODS, SLOW, STEP

from wagma.simulation import MACHINES, steps

HERE = Path(__file__).parent
EVERY, LAST = 0.5, 20  # seconds from one evaluation to the next, and how many count
TASKS = {"digits": "unlike_digits.py", "targets": "unlike_targets.py"}
# By task and metric, what the table shows.
FIGURES = (
    ("digits", "accuracy", "accuracy"),
    ("digits", "even", "slow ranks' digits"),
    ("digits", "odd", "fast ranks' digits"),
    ("targets", "mean", "place"),
)
# Those of `learning_own_pace.py` whose options do not depend on which rank is slow.
COMPARED = {
    **{name: label for name, label in METHODS.items() if "{" not in label},
    "async-local": "parameter-server:mode=async-local:local_steps=4",
    "dynamic steps": "parameter-server:mode=async-local:local_steps=4:dynamic_steps",
    "D-PSGD": "d-psgd",
    "SGP": "sgp",
    "Hop, 1 backup": "hop:backup=1",
    "Ripples, smart": "ripples:groups=smart",
    "P-Reduce, dynamic": "partial-reduce:group_size=3:weights=dynamic",
}


def run(task, name, seed, arguments):
    """Return a training."""
    ranks = arguments.ranks
    slow = dict.fromkeys(range(0, ranks, 2), SLOW)
    times = steps.constant(int(arguments.seconds / STEP) + 1, ranks, STEP)
    times = steps.delayed(times, "none", seed, 1.0, slow)
    settings = {
        "task": HERE / TASKS[task],
        "seconds": arguments.seconds,
        "batch_size": 16 if task == "digits" else 1,
        "seed": seed,
        "evaluate_every_seconds": EVERY,
    }
    if name == "DropCompute":
        settings |= {"batch_size": settings["batch_size"] // 4 or 1, "accumulate": 4}
    return Run((task, name, seed), COMPARED[name], times, MACHINES["aries"], settings)


def figures(found, name, seeds):
    """Return a method's figures over the seeds."""
    rows = {}
    for task, metric, key in FIGURES:
        values = [
            statistics.mean(each[metric] for each in found[task, name, seed]["evaluations"][-LAST:])
            for seed in seeds
        ]
        rows[key] = {"mean": statistics.mean(values), "deviation": statistics.stdev(values)}
    return rows


def table(rows):
    """Return the table of Markdown."""
    lines = [
        "| | accuracy, % | slow ranks' digits, % | fast ranks' digits, % | place |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells = [
            f"{100 * row[key]['mean']:.1f} ± {100 * row[key]['deviation']:.1f}"
            for key in ("accuracy", "slow ranks' digits", "fast ranks' digits")
        ]
        place = f"{row['place']['mean']:.2f} ± {row['place']['deviation']:.2f}"
        lines.append(f"| {name} | {' | '.join(cells)} | {place} |")
    return "\n".join(lines)


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=8)
    arguments.add_argument("--seconds", type=float, default=40.0)
    arguments.add_argument("--seeds", type=int, default=10)
    arguments.add_argument("--methods", nargs="+", choices=COMPARED, default=list(COMPARED))
    arguments = arguments.parse_args()
    seeds = range(arguments.seeds)
    found = train_all(
        [
            run(task, name, seed, arguments)
            for task in TASKS
            for name in arguments.methods
            for seed in seeds
        ]
    )
    rows = {name: figures(found, name, seeds) for name in arguments.methods}
    rows = with_former(arguments, "learning-bias", arguments.ranks, rows)
    rows = {name: rows[name] for name in COMPARED if name in rows}
    arguments.methods = list(rows)
    print(table(rows))
    report(arguments, "learning-bias", arguments.ranks, rows)


if __name__ == "__main__":
    main()
