"""Methods with stragglers that sleep, by time: throughput, updates, and time to an accuracy.

    python benchmarks/stragglers.py

Runs `wagma compare` with `--seconds` on four and on eight ranks: all train for the same time, so
fast ones make more steps. Undisturbed; one rank sleeps 2 or 5 step times longer at every step
(Ripples, section 7.4); every rank takes 6 times as long with probability 1/n (Hop, 7.3.1); three
ranks always take 1.87 times as long (what sharing an accelerator costs All-Reduce in Partial
Reduce, section 5.2). Steps sleep, so that ranks wait for each other and not for processors.

If a step averages in at most one group, "updates/s" counts averages of several ranks (each is one
update, Partial Reduce's equation 3), from the groups that ranks have recorded of their steps.

With `--methods`, results of the others stay as a former run has written them; ratios are always to
Allreduce in the same run.
"""

import json
import tempfile
from pathlib import Path
from statistics import median

from common import compare, former, parser, report

CASES = {
    "undisturbed": (),
    "one sleeps 2 steps": ("--slow-rank", "0:3"),
    "one sleeps 5 steps": ("--slow-rank", "0:6"),
    "random, 6 × slow": ("--imbalance", "random"),
    "three 1.87 × slow": sum((("--slow-rank", f"{rank}:1.87") for rank in range(3)), ()),
}
METHODS = (
    "allreduce",
    "parameter-server:mode=bsp",
    "parameter-server:mode=backup:backups=1",
    "parameter-server:mode=asp",
    "parameter-server:mode=hete",
    "ad-psgd",
    "eager-sgd:trigger=majority",
    "wagma",
    "wagma:pace=own",
    "wagma:pace=own:overlap",
    "partial-reduce:group_size=3",
    "partial-reduce:group_size=3:weights=dynamic",
    "ripples:groups=random",
    "ripples:groups=smart",
    "ripples:groups=static",
)
WITH = ("--batch-size", "16", "--target", "0.9")
GROUPED = ("partial-reduce", "ripples:groups=smart", "ripples:groups=static")


def methods(arguments):
    """Return the methods as on the command line, Allreduce always first."""
    nodes = f":ranks_per_node={arguments.ranks_per_node}" if arguments.ranks_per_node else ""
    names = [name for name in METHODS if name in ("allreduce", *arguments.methods)]
    return [name + nodes * name.startswith("ripples") for name in names]


def updates(directory, run, seconds):
    """Return the number of groups of several ranks in a run, per second."""
    total = 0.0
    for path in (Path(directory) / "runs" / run["directory"]).glob("rank-*.jsonl"):
        for line in path.read_text().splitlines():
            group = json.loads(line)["group"]
            total += len(group) > 1 and 1 / len(group)
    return total / seconds


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    arguments.add_argument("--seconds", type=float, default=10.0)
    arguments.add_argument("--step-time-ms", type=float, default=40.0)
    arguments.add_argument("--ranks-per-node", type=int, help="nodes, as Ripples sees them")
    arguments.add_argument("--seeds", type=int, default=1)
    arguments.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = arguments.parse_args()
    everywhere = arguments.ranks
    for ranks in everywhere:
        arguments.ranks = [ranks]
        results, ratios = {}, {}
        print(
            f"# {ranks} ranks, {arguments.seconds:g} s, steps of {arguments.step_time_ms:g} ms\n"
            f"{'':<20}{'method':<44}{'samples/s':>10}{'÷ allreduce':>13}{'of bounds':>11}"
            f"{'updates/s':>11}{'ms/update':>11}{'s to 0.9':>10}"
            f"{'accuracy':>10}{'ρ':>7}",
            flush=True,
        )
        for case, options in CASES.items():
            with tempfile.TemporaryDirectory() as directory:
                runs, figures = compare(
                    arguments, ranks, methods(arguments), (*WITH, *options), directory
                )
                for label, of in figures.items():
                    found = {name: of[name] for name in ("samples_per_s", "ratio", "bound_ratio")}
                    found |= {"target_s": of["target_s"], "accuracy": of["mean"]}
                    found["rho"] = runs[label][0].get("rho")
                    if label.startswith(GROUPED):
                        rates = [updates(directory, run, arguments.seconds) for run in runs[label]]
                        found["updates_per_s"] = median(rates)
                    results[f"{case}: {label}"] = found
                    print(f"{case:<20}{label:<44}{line(found)}", flush=True)
        results = {**former(arguments, "stragglers", ranks), **results}
        report(arguments, "stragglers", ranks, results, ratios=ratios)


def line(found):
    """Return the table's line of a method's results."""
    rate, target, rho = found.get("updates_per_s"), found["target_s"], found["rho"]
    each = f"{rate:11.2f}{1000 / rate:11.1f}" if rate else f"{'–':>11}{'–':>11}"
    reached = "–" if target is None else f"{target:.1f}"
    return (
        f"{found['samples_per_s']:10.0f}{found['ratio']:13.2f}{found['bound_ratio']:11.2f}{each}"
        f"{reached:>10}{found['accuracy']:10.1%}{'–' if rho is None else f'{rho:.2f}':>7}"
    )


if __name__ == "__main__":
    main()
