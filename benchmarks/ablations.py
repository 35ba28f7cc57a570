"""WAGMA-SGD's ablations (sections V-B and V-C) under both late rules, with two slow ranks a step.

    python benchmarks/ablations.py

❶ without group averages, which is local SGD; ❷ with fixed groups; ❸ with a group of all ranks;
❹ with smaller groups; beside them WAGMA-SGD itself, with groups of √P ranks, rounded up to a power
of two, and Allreduce-SGD. The small network of `wagma train` learns scikit-learn's digits, of which
each rank has another mixture (Dirichlet, 0.1). Steps sleep 20 ms, and two random ranks 40 ms longer
at every step (V-B has 320 ms). Accuracy is the averaged model's after the same number of steps,
mean ± standard deviation over the seeds; throughput is the median over the seeds of its ratio to
WAGMA-SGD's with the same period and rule. `wagma compare` runs them all seed by seed, so that load
affects all alike. It takes a quarter of an hour, and prints the tables of docs/comparing.md.
"""

import statistics
import tempfile

from common import compare, parser, report, spread

RULES = ("conserving", "paper")
WHOLE, ALONE = "WAGMA", "❶ no groups: local SGD"
PAPER = {  # V-B: top-1 accuracy, and ÷ of throughput; V-C: BLEU, and ÷
    WHOLE: "75.0 %, –",
    ALONE: "66.9 %, –",
    "❷ fixed groups": "73.5 %, 23.8",
    "❸ one group of all": "not higher, throughput ÷ 1.07, 1.28",
    "❹ smaller groups": "72.8 %, 23.3",
    "Allreduce": "75.8 %, –",
}


def labels(ranks, rule):
    """Return the algorithm of each row of `PAPER`, in `wagma compare`'s notation."""
    wagma = f"wagma:late={rule}"
    return {
        WHOLE: wagma,
        ALONE: "local-sgd",
        "❷ fixed groups": f"{wagma}:groups=fixed",
        "❸ one group of all": f"{wagma}:group_size={ranks}",
        "❹ smaller groups": f"{wagma}:group_size=2",
        "Allreduce": "allreduce",
    }


def measure(arguments, period):
    """Return {late rule: {row: its figures}} of a period τ."""
    both = {rule: labels(arguments.ranks, rule) for rule in RULES}
    algorithms = dict.fromkeys(label for of in both.values() for label in of.values())
    options = [
        *("--sync-period", str(period), "--shards", "dirichlet", "--dirichlet-alpha", "0.1"),
        *("--imbalance", "cloud", "--imbalance-scale", str(arguments.delay_ms / 320)),
        *("--batch-size", "16", "--evaluate-every", str(arguments.steps)),
    ]
    with tempfile.TemporaryDirectory() as directory:
        runs, _ = compare(arguments, arguments.ranks, algorithms, options, directory)
    return {
        rule: {row: figures_of(runs[label], runs[of[WHOLE]]) for row, label in of.items()}
        for rule, of in both.items()
    }


def figures_of(runs, whole):
    """Return a row's figures, from its runs and those of WAGMA-SGD with the same seeds."""
    accuracies = [run["accuracy"] for run in runs]
    pairs = list(zip(runs, whole, strict=True))
    return {
        "accuracy": accuracies,
        "samples_per_s": [run["samples_per_s"] for run in runs],
        "throughput": statistics.median(a["samples_per_s"] / b["samples_per_s"] for a, b in pairs),
        "bound_over_wall": statistics.median(run["bound_over_wall"] for run in runs),
        "timely_share": statistics.mean(run["timely_share"] for run in runs),
    }


def tables(results):
    """Return each period's table of docs/comparing.md, by its period, from the results."""
    return {period: table(period, of_rules) for period, of_rules in results.items()}


def table(period, of_rules):
    """Return a period's table as Markdown."""
    rules = " | ".join(f"{rule} rule: accuracy, % | ÷ | timely" for rule in RULES)
    lines = [f"| {period} | {rules} | the paper: V-B, V-C |", "|---" * (3 * len(RULES) + 2) + "|"]
    for row, published in PAPER.items():
        cells = [cell for rule in RULES for cell in cells_of(row, of_rules[rule][row])]
        lines.append(f"| {row} | {' | '.join(cells)} | {published} |")
    return "\n".join(lines)


def cells_of(row, found):
    """Return accuracy, throughput and timely share as text; of WAGMA-SGD only has shares."""
    accuracies = [100 * accuracy for accuracy in found["accuracy"]]
    share = "" if row in (ALONE, "Allreduce") else f"{found['timely_share']:.2f}"
    return (
        spread(accuracies, 1).strip(),
        f"{found['throughput']:.2f}",
        share,
    )


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=8)
    arguments.add_argument("--sync-periods", type=int, nargs="+", default=[10, 40])
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--step-time-ms", type=float, default=20.0)
    arguments.add_argument("--delay-ms", type=float, default=40.0)
    arguments.add_argument("--seeds", type=int, default=5)
    arguments = arguments.parse_args()
    results = {}
    for period in arguments.sync_periods:
        results[f"τ = {period}"] = measure(arguments, period)
        print(tables(results)[f"τ = {period}"], end="\n\n", flush=True)
    bounds = [row["bound_over_wall"] for of in results.values() for rows in of.values()
              for row in rows.values()]  # fmt: skip
    print(f"bound/wall {min(bounds):.2f} to {max(bounds):.2f}")
    report(arguments, "ablations", arguments.ranks, results)


if __name__ == "__main__":
    main()
