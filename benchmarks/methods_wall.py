"""Every method with stragglers that sleep: how much longer than its bound is the wall time?

    python benchmarks/methods_wall.py

Runs `wagma compare` with all methods on four and on eight ranks. Steps sleep, and two random ranks
sleep half a step, one or two steps longer at every step. A method's bound is the time that its run
would have taken if averaging took no time and ranks waited only for the ranks that they must wait
for, from the measured times of their steps; the wall time must be at most a ninth longer. Beside it
is a method's speedup over Allreduce-SGD, measured and if both were as fast as their bounds.
"""

import tempfile
from statistics import median

from common import compare, figure, parser, quartiles, report

from wagma.methods import METHODS as DECLARED

BOUND = 1 / 0.90
REFERENCE = "allreduce"
METHODS = [REFERENCE, *(name for name in DECLARED if name != REFERENCE)]


def figures_of(runs, reference):
    """Return a method's medians over the seeds, and the quartiles of wall ÷ the reference's."""
    pairs = list(zip(runs, reference, strict=True))
    return {
        "wall_s": median(run["wall_s"] for run in runs),
        "bound_s": median(run["bound_s"] for run in runs),
        "wall_over_bound": quartiles([run["wall_s"] / run["bound_s"] for run in runs]),
        "speed": median(other["wall_s"] / run["wall_s"] for run, other in pairs),
        "speed_of_bounds": median(other["bound_s"] / run["bound_s"] for run, other in pairs),
        "wall_over_reference": quartiles([run["wall_s"] / other["wall_s"] for run, other in pairs]),
    }


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    arguments.add_argument("--delays", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--step-time-ms", type=float, default=25.0)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments = arguments.parse_args()
    for ranks in arguments.ranks:
        results, ratios, figures = {}, {}, []
        print(
            f"# {ranks} ranks, {arguments.steps} steps of {arguments.step_time_ms:g} ms, two random"
            f" ranks delayed at every step\n{'delay ÷ step':<13}{'method':<20}{'wall s':>8}"
            f"{'bound/wall':>12}{'÷ allreduce':>13}{'of bounds':>11}",
            flush=True,
        )
        for delay in arguments.delays:
            scale = delay * arguments.step_time_ms / 320
            with tempfile.TemporaryDirectory() as directory:
                options = (
                    *("--evaluate-every", str(arguments.steps), "--batch-size", "4"),
                    *("--imbalance", "cloud", "--imbalance-scale", str(scale)),
                )
                runs, _ = compare(arguments, ranks, METHODS, options, directory)
            for method in METHODS:
                found = figures_of(runs[method], runs[REFERENCE])
                name = f"{method}, delay {delay:g} steps"
                results[name] = found
                over = found["wall_over_bound"]
                figures.append(figure(f"{name}: wall time ÷ its bound", over, BOUND))
                ratios[f"{name}: wall time ÷ its bound"] = over
                if method != REFERENCE:
                    ratios[f"{name}: ÷ {REFERENCE}"] = found["wall_over_reference"]
                print(
                    f"{delay:<13g}{method:<20}{found['wall_s']:8.2f}{1 / over['median']:12.2f}"
                    f"{found['speed']:13.2f}{found['speed_of_bounds']:11.2f}",
                    flush=True,
                )
        report(arguments, "methods-wall", ranks, results, ratios=ratios, figures=figures)


if __name__ == "__main__":
    main()
