"""The comparisons of docs/comparing.md and docs/unequal-work.md, by `wagma compare`.

    python benchmarks/comparisons.py

Stragglers that come and go, 8 ranks: 200 steps that sleep 20 ms, with two random ranks 40 ms longer
at every step ("cloud"), or with each rank six times as slow at a step with a probability of 1/8
("random"); and Allreduce and eager-SGD's solo trigger at two learning rates, with the former.

Unequal work, 4 ranks: 10 seconds of steps that sleep 20 ms on three ranks and 80 ms on one, with
shards that are alike ("iid") and that are not ("dirichlet").

Throughput is the median over the seeds of its ratio to Allreduce's; accuracies are of the averaged
model, mean ± standard deviation over the seeds. It takes 35 minutes, and prints the tables of the
pages. With `--methods`, only these are measured again, of the first table, beside Allreduce.
"""

import argparse
import tempfile

from common import compare, former, parser, report, spread

METHODS = {  # of the first table, each by its label of `wagma compare`
    "Allreduce": "allreduce",
    "DDP": "ddp",
    "local SGD": "local-sgd",
    "WAGMA": "wagma",
    "WAGMA, own pace": "wagma:pace=own",
    "eager-SGD, solo": "eager-sgd",
    "eager-SGD, majority": "eager-sgd:trigger=majority",
    "D-PSGD": "d-psgd",
    "SGP": "sgp",
    "AD-PSGD": "ad-psgd",
    "parameter server, 1 backup": "parameter-server:mode=backup:backups=1",
    "parameter server, asp": "parameter-server:mode=asp",
}
UNEQUAL = (
    "local-sgd",
    "local-sgd:trigger=solo",
    "local-sgd:trigger=solo:weights=work",
    "local-sgd:trigger=solo:weights=wp",
    "wagma",
    "wagma:weights=work",
)
CLOUD = ("--imbalance", "cloud", "--imbalance-scale", "0.125")
DELAYS = {"cloud": CLOUD, "random": ("--imbalance", "random")}
SHARDS = ("iid", "dirichlet")
RATES = (0.05, 0.025)  # the first is the command's default
LATE = ("Allreduce", "eager-SGD, solo")


def measure(arguments, ranks, labels, options, **length):
    """Return {label: its figures} of `wagma compare`, with the accuracy of each seed."""
    of = argparse.Namespace(seeds=arguments.seeds, step_time_ms=arguments.step_time_ms, **length)
    with tempfile.TemporaryDirectory() as directory:
        runs, results = compare(of, ranks, labels, options, directory)
    return {
        label: found | {"accuracies": [run["accuracy"] for run in runs[label]]}
        for label, found in results.items()
    }


def coming_and_going(arguments):
    """Return {delays: {label: figures}}, and those by learning rate, of 8 ranks."""
    common = ("--batch-size", "16", "--evaluate-every", "10", "--target", "0.95")
    labels = [METHODS[name] for name in METHODS if name in ("Allreduce", *arguments.methods)]
    found = {
        delays: measure(arguments, 8, labels, (*common, *options), steps=arguments.steps)
        for delays, options in DELAYS.items()
    }
    if len(labels) < len(METHODS):
        kept = former(arguments, "comparisons", 8)
        added = {
            delays: {**kept["delays"][delays], **{label: rows[label] for label in labels[1:]}}
            for delays, rows in found.items()
        }
        print(table_of_delays(added), end="\n\n", flush=True)
        return {**kept, "delays": added}
    print(table_of_delays(found), end="\n\n", flush=True)
    rates = {
        f"{rate:g}": measure(
            arguments,
            8,
            [METHODS[name] for name in LATE],
            (*common, *CLOUD, "--lr", str(rate)),
            steps=arguments.steps,
        )
        for rate in RATES
    }
    print(table_of_rates(rates), end="\n\n", flush=True)
    return {"delays": found, "learning rates": rates}


def unequal(arguments):
    """Return {shards: {label: figures}} of 4 ranks, one of which has a quarter of the speed."""
    found = {
        shards: measure(
            arguments,
            4,
            UNEQUAL,
            ("--slow-rank", "1:4", "--shards", shards, "--lr", "0.02"),
            seconds=arguments.seconds,
        )
        for shards in SHARDS
    }
    print(table_of_shards(found), end="\n\n", flush=True)
    return found


def table_of_delays(found):
    """Return throughputs and accuracies by method as Markdown."""
    lines = [
        "| | cloud: ÷ | accuracy, % | bound/wall | random: ÷ | accuracy, % | bound/wall |",
        "|---" * 7 + "|",
    ]
    for name, label in METHODS.items():
        if label not in next(iter(found.values())):
            continue
        cells = []
        for delays in DELAYS:
            row = found[delays][label]
            cells += [f"{row['ratio']:.2f}", accuracy(row), f"{row['bound_over_wall']:.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_rates(found):
    """Return accuracies by learning rate as Markdown."""
    lines = [f"| learning rate | {' | '.join(LATE)} |", "|---|---|---|"]
    for rate, rows in found.items():
        lines.append(f"| {rate} | {' | '.join(accuracy(rows[METHODS[name]]) for name in LATE)} |")
    return "\n".join(lines)


def table_of_shards(found):
    """Return accuracies, throughputs and waiting times by method as Markdown."""
    lines = [
        "| | accuracy, %, `iid` | accuracy, %, `dirichlet` | samples/s, `iid` | "
        "time spent waiting |",
        "|---" * 5 + "|",
    ]
    for label in UNEQUAL:
        rows = [found[shards][label] for shards in SHARDS]
        rate, waiting = rows[0]["samples_per_s"], rows[0]["waiting_share"]
        cells = [*map(accuracy, rows), f"{rate:,.0f}", f"{100 * waiting:.0f} %"]
        lines.append(f"| `{label}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy(row):
    """Return "mean ± standard deviation" of an accuracy, in percent."""
    return spread([100 * each for each in row["accuracies"]], 1).strip()


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=200, help="of a run on 8 ranks")
    arguments.add_argument("--seconds", type=float, default=10.0, help="of a run on 4 ranks")
    arguments.add_argument("--step-time-ms", type=float, default=20.0)
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = arguments.parse_args()
    report(arguments, "comparisons", 8, coming_and_going(arguments))
    if len(arguments.methods) < len(METHODS):
        return
    report(arguments, "comparisons", 4, unequal(arguments))


if __name__ == "__main__":
    main()
