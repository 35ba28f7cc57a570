"""Ranks with different data: averaged momentum and control variates, in simulated time.

    python benchmarks/learning_shards.py
    python benchmarks/learning_shards.py --part ablations

8 ranks learn scikit-learn's digits, with S = 4 and τ = 10, momentum 0.9 and batches of 32: by the
small network of `wagma train`, and by an MLP with 64 hidden units. Shards are identically
distributed, drawn by Dirichlet(0.1), or sorted by label. All ranks make 400 steps of 0.2 s with 5 %
of jitter; "one slow" lasts as long, and rank 0 takes four times as long for each step.

methods    accuracy of the ranks' mean model at the end, mean ± deviation over the seeds, and p of
           paired t-tests over the seeds: WAGMA with both against each method by equal steps, and
           own pace with both against each method where one rank is slow
ablations  averaged momentum, control variates, or both; in every version, or only in averages over
           all ranks; τ = 10 and 40
batchnorm  a network with BatchNorm: its statistics as they are averaged, and those that
           torch.optim.swa_utils.update_bn takes from the whole training set
adamw      AdamW's moments averaged in every version, every third, every sixth, or over all ranks
"""

import os
import statistics
from concurrent.futures import ProcessPoolExecutor

import torch
from common import former, markdown, parser, report
from learning import Run, train_all
from scipy import stats
from torch import nn

from wagma.data import load_digits
from wagma.simulated_training import Alone
from wagma.simulation import MACHINES, steps, train
from wagma.simulation.gradients import threads
from wagma.tasks import digits

STEP, JITTER, SLOW = 0.2, 0.05, 4.0
GROUPS = "group_size=4"
STATE, VARIATES = "average_state", "correction=control-variates"
BOTH = f"{STATE}:{VARIATES}"
RARE_VARIATES = f"{VARIATES}:correction_every=all-ranks"
METHODS = {
    "Allreduce": "allreduce",
    "local SGD": "local-sgd",
    "local SGD, both": f"local-sgd:{BOTH}",
    "AD-PSGD": "ad-psgd",
    "AD-PSGD, both": f"ad-psgd:{BOTH}",
    "WAGMA": f"wagma:{GROUPS}",
    "WAGMA, both": f"wagma:{GROUPS}:{BOTH}",
    "own pace": f"wagma:{GROUPS}:pace=own",
    "own pace, both": f"wagma:{GROUPS}:pace=own:{BOTH}",
}
CASES = {
    "iid": ("iid", None, 1.0),
    "Dirichlet(0.1)": ("dirichlet", 0.1, 1.0),
    "label-sorted": ("label-sorted", None, 1.0),
    "label-sorted, one slow": ("label-sorted", None, SLOW),
    "Dirichlet(0.1), one slow": ("dirichlet", 0.1, SLOW),
}
PACES = {"WAGMA": f"wagma:{GROUPS}", "own pace": f"wagma:{GROUPS}:pace=own"}
PARTS = {
    "neither": "",
    "momentum": f":{STATE}",
    "momentum, all ranks": f":{STATE}=all-ranks",
    "variates": f":{VARIATES}",
    "variates, all ranks": f":{RARE_VARIATES}",
    "both": f":{BOTH}",
    "both, all ranks": f":{STATE}=all-ranks:{RARE_VARIATES}",
}
EVERY = {
    "local": "",
    "every": f":{STATE}",
    "every 3rd": f":{STATE}=3",
    "every 6th": f":{STATE}=6",
    "all ranks": f":{STATE}=all-ranks",
    "every, variates": f":{BOTH}",
}


def mlp():
    """Return a network of one hidden layer, with 4,810 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


MODELS = {"CNN": None, "MLP": mlp}


def run(name, label, case, seed, arguments, model=None, **settings):
    """Return a training of one case by one algorithm."""
    shards, alpha, slowness = CASES[case]
    count = arguments.steps
    times = steps.log_normal(count, arguments.ranks, STEP, JITTER, seed)
    length = {}
    if slowness > 1:
        length = {"seconds": STEP * count}
        times = steps.log_normal(2 * count, arguments.ranks, STEP, JITTER, seed)
        times[:, 0] *= slowness
    settings = {
        "shards": shards, "dirichlet_alpha": alpha, "batch_size": 32, "seed": seed, "model": model,
        **length, **settings,
    }  # fmt: skip
    return Run((*name, seed), label, times, MACHINES["aries"], settings)


def figures(values, others=()):
    """Return the mean and the deviation of accuracies, in %; and p beside others' by seeds."""
    mean, deviation = 100 * statistics.mean(values), 100 * statistics.stdev(values)
    found = {"mean": mean, "deviation": deviation, "accuracies": values}
    if others and others != values:
        found["behind"] = 100 * (statistics.mean(others) - statistics.mean(values))
        found["p"] = float(stats.ttest_rel(others, values).pvalue)
    return found


def accuracies(found, name, seeds):
    """Return the accuracies of a name's runs by seed."""
    return [found[(*name, seed)]["accuracy"] for seed in seeds]


def methods(arguments, seeds):
    """Return the rows of methods, with a cell for each model and case."""
    runs = [
        run((model, case, name), METHODS[name], case, seed, arguments, MODELS[model])
        for model in arguments.models
        for case in CASES
        for name in METHODS
        for seed in seeds
    ]
    found = train_all(runs)
    rows = {}
    for model in arguments.models:
        for case, (*_, slowness) in CASES.items():
            ours = "own pace, both" if slowness > 1 else "WAGMA, both"
            best = accuracies(found, (model, case, ours), seeds)
            for name in METHODS:
                values = accuracies(found, (model, case, name), seeds)
                rows.setdefault(f"{model}, {name}", {})[case] = figures(values, best)
    return rows


def ablations(arguments, seeds):
    """Return the rows of what is averaged, with a cell for each pace, period and case."""
    cases = "label-sorted", "iid"
    runs = [
        run((pace, period, case, part), f"{PACES[pace]}{PARTS[part]}:sync_period={period}", case,
            seed, arguments)
        for pace in PACES
        for period in (10, 40)
        for case in cases
        for part in PARTS
        for seed in seeds
    ]  # fmt: skip
    found = train_all(runs)
    rows = {}
    for pace in PACES:
        for period in (10, 40):
            for case in cases:
                former_values = accuracies(found, (pace, period, case, "neither"), seeds)
                for part in PARTS:
                    values = accuracies(found, (pace, period, case, part), seeds)
                    cell = figures(former_values, values)
                    cell |= figures(values) | {"ahead": cell.get("behind", 0.0)}
                    rows.setdefault(part, {})[f"{pace}, τ = {period}, {case}"] = cell
    return rows


def adamw(arguments, seeds):
    """Return the rows of how often AdamW's state is averaged, with a cell for pace and case."""
    cases = "label-sorted", "iid"
    runs = [
        run((pace, case, every), f"{PACES[pace]}{EVERY[every]}", case, seed, arguments,
            optimizer="adamw", lr=0.003)
        for pace in PACES
        for case in cases
        for every in EVERY
        for seed in seeds
    ]  # fmt: skip
    found = train_all(runs)
    return {
        every: {
            f"{pace}, {case}": figures(accuracies(found, (pace, case, every), seeds))
            for pace in PACES
            for case in cases
        }
        for every in EVERY
    }


def normalized():
    """Return the MLP with BatchNorm."""
    layers = nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)
    return nn.Sequential(*layers)


def batchnorm(arguments, seeds):
    """Return the rows of both kinds of statistics, with a cell for each method and case."""
    cases, rows = ("label-sorted", "iid"), {"averaged": {}, "update_bn": {}}
    for name in ("WAGMA", "WAGMA, both", "own pace, both"):
        for case in cases:
            runs = [
                run((name, case), METHODS[name], case, seed, arguments, normalized)
                for seed in seeds
            ]
            with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                pairs = list(pool.map(both_statistics, runs))
            for row, values in zip(rows, zip(*pairs, strict=True), strict=True):
                rows[row][f"{name}, {case}"] = figures(list(values))
    return rows


def both_statistics(run):
    """Return a training's accuracy with averaged statistics, and with those of all the data."""
    settings = dict(run.settings)
    shards, alpha = settings.pop("shards"), settings.pop("dirichlet_alpha")
    task = digits.task(shards, Alone(), alpha)._replace(model=settings.pop("model"))
    with threads(1):
        learned = train(task, run.label, run.step_times, run.machine, **settings)
    model = normalized()
    model.load_state_dict(learned.state)
    images = torch.from_numpy(load_digits()[0].images)
    torch.optim.swa_utils.update_bn([images], model)
    test = load_digits()[1]
    with torch.no_grad():
        found = model.eval()(torch.from_numpy(test.images)).argmax(1)
    return learned.summary["accuracy"], float((found.numpy() == test.labels).mean())


def tables(part, rows):
    """Return the tables of a part: of methods one for each model."""
    if part != "methods":
        return [table(rows)]
    models = list(dict.fromkeys(name.split(", ")[0] for name in rows))
    return [
        table({n.removeprefix(f"{m}, "): row for n, row in rows.items() if n.startswith(m)}, m)
        for m in models
    ]


def table(rows, corner=""):
    """Return a table, with p where a row is compared."""
    columns = list(next(iter(rows.values())))
    return markdown(
        corner,
        columns,
        {name: [cell_of(row[each]) for each in columns] for name, row in rows.items()},
    )


def cell_of(cell):
    """Return "97.7 ± 0.9", with p if that is known."""
    p = f", p {cell['p']:.1g}" if "p" in cell else ""
    return f"{cell['mean']:.1f} ± {cell['deviation']:.1f}{p}"


FUNCTIONS = {
    "methods": methods,
    "ablations": ablations,
    "adamw": adamw,
    "batchnorm": batchnorm,
}


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--seeds", type=int, default=10)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments.add_argument("--part", choices=FUNCTIONS, nargs="+", default=list(FUNCTIONS))
    arguments = arguments.parse_args()
    results = former(arguments, "learning-shards", arguments.ranks)
    for part in arguments.part:
        results[part] = FUNCTIONS[part](arguments, range(arguments.seeds))
        print(f"\n{part}\n")
        print(*tables(part, results[part]), sep="\n\n")
        report(arguments, "learning-shards", arguments.ranks, results)


if __name__ == "__main__":
    main()
