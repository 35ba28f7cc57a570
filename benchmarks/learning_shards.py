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
adamw      AdamW's moments averaged in every version, every third, every sixth, or over all ranks
"""

import statistics

from common import former, parser, report
from learning import Run, train_all
from scipy import stats
from torch import nn

from wagma.simulation import MACHINES, steps

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
    "WAGMA, variates, all ranks": f"wagma:{GROUPS}:{RARE_VARIATES}",
    "own pace": f"wagma:{GROUPS}:pace=own",
    "own pace, both": f"wagma:{GROUPS}:pace=own:{BOTH}",
    "own pace, variates, all ranks": f"wagma:{GROUPS}:pace=own:{RARE_VARIATES}",
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


def show(rows):
    """Print a table, with p where a row is compared."""
    columns = list(next(iter(rows.values())))
    print(f"| | {' | '.join(columns)} |")
    print("|---" * (1 + len(columns)) + "|")
    for name, row in rows.items():
        cells = []
        for column in columns:
            cell = row[column]
            p = f", p {cell['p']:.2g}" if "p" in cell else ""
            cells.append(f"{cell['mean']:.1f} ± {cell['deviation']:.1f}{p}")
        print(f"| {name} | {' | '.join(cells)} |")


FUNCTIONS = {"methods": methods, "ablations": ablations, "adamw": adamw}


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--seeds", type=int, default=10)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments.add_argument("--part", choices=FUNCTIONS, nargs="+", default=list(FUNCTIONS))
    arguments = arguments.parse_args()
    tables = former(arguments, "learning-shards", arguments.ranks)
    for part in arguments.part:
        tables[part] = FUNCTIONS[part](arguments, range(arguments.seeds))
        print(f"\n{part}\n")
        show(tables[part])
        report(arguments, "learning-shards", arguments.ranks, tables)


if __name__ == "__main__":
    main()
