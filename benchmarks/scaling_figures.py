"""The scaling figures of the WAGMA-SGD paper, predicted in simulated time, beside the published.

    python benchmarks/scaling_figures.py

Each prediction is a ratio of throughputs. The parameters are the paper's if its section V gives
them, else published measurements, with their sources, else a guess, marked as such. None was chosen
to match a published ratio; their influence on one ratio is shown by varying one at a time.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np
from common import parser, report

from wagma.simulation import MACHINES, Machine, Settings, simulate, steps

# Guesses: the deviation of a balanced step's logarithm (without any, all ranks arrive together),
# and the bytes per second at which a rank copies and adds (Machine.memory's default).
JITTER = 0.02
# Piz Daint: one rank a node; models are averaged in host memory, over PCIe at 12 GB/s (CSCS's
# ReFrame tests, 2020: 12.6 from the device, 11.9 to it).
DAINT = dataclasses.replace(MACHINES["aries"], staging=12e9)


@dataclass(frozen=True)
class Case:
    """The settings of one of the paper's figures.

    Attributes:
        step: seconds of a step without delays; the median if `sigma` is more than jitter.
        sigma: deviation of the steps' logarithm; None for the reinforcement learner's steps.
        median: of the reinforcement learner's steps, between the 1.7 and 2 s of the paper.
        lasts: number of consecutive steps of a reinforcement learner that take equally long.
        doubling: whether WAGMA-SGD averages by recursive doubling: section III-B's phases, and in
            the published code its global averages, too.
        neighbors: number of ranks that each sends to in SGP, in that figure of the paper.
        clock: ranks that D-PSGD's ranks wait for: all, as in the paper.
        delays: "cloud": exactly two ranks a step; "binomial": each with probability 2/P.
    """

    parameters: int
    steps: int
    sync_period: int
    step: float = 0.0
    sigma: float | None = JITTER
    median: float = steps.MEDIAN
    lasts: int = 1
    delays: str = "none"
    group_size: int | None = None
    doubling: bool = True
    neighbors: int = 1
    clock: str = "global"
    trigger: str = "majority"
    machine: Machine = DAINT

    @property
    def settings(self):
        return Settings(
            4 * self.parameters,
            group_size=self.group_size,
            sync_period=self.sync_period,
            late="paper",
            trigger=self.trigger,
            doubling=self.doubling,
            neighbors=self.neighbors,
            clock=self.clock,
        )


# Section V-B. A step: 210 images/s on a P100 at a batch of 128, between the 201 (ReFrame's Horovod
# test on Piz Daint) and 219 (TensorFlow's benchmarks, 2017) that others measured at a batch of 64.
RESNET = Case(25_559_081, steps=200, sync_period=10, step=0.61, delays="cloud", neighbors=2)
# Section V-C. A full batch takes 0.74 s on a P100 (OpenNMT-tf issue 582: 11,060 tokens/s). Batches
# come from buckets of unequal lengths; their spread is that of the same authors' earlier paper on
# the same task (eager-SGD, PPoPP 2020: mean 475 ms, deviation 144 ms).
TRANSFORMER = Case(61_362_176, steps=200, sync_period=10, step=0.5, sigma=0.3, neighbors=1)
# Section V-D, with the τ of its figure 10.
HABITAT = Case(8_476_421, steps=96, sync_period=8, sigma=None, neighbors=4)

# The influence of other values on the predictions.
VARIATIONS = {
    "figure 4": {
        "a step takes 0.54 s": {"step": 0.54},
        "a step takes 0.66 s": {"step": 0.66},
        "a period of 11 steps, as in the published code": {"sync_period": 11},
        "delays drawn rank by rank": {"delays": "binomial"},
        "WAGMA-SGD averages with this library's schedules": {"doubling": False},
        "exchanges at 7.5 GB/s a direction": {
            "machine": dataclasses.replace(DAINT, byte_gap=1 / 7.5e9)
        },
        "no staging over PCIe": {"machine": MACHINES["aries"]},
        "copying and adding at 3 GB/s": {"machine": dataclasses.replace(DAINT, memory=3e9)},
        "copying and adding at 30 GB/s": {"machine": dataclasses.replace(DAINT, memory=30e9)},
        "steps vary by 0.5 %": {"sigma": 0.005},
        "steps vary by 8 %": {"sigma": 0.08},
    },
    "figure 7": {
        "copying and adding at 3 GB/s": {"machine": dataclasses.replace(DAINT, memory=3e9)},
        "steps vary half as much": {"sigma": 0.15},
        "steps vary twice as much": {"sigma": 0.6},
        "WAGMA-SGD averages with this library's schedules": {"doubling": False},
        "exchanges at 7.5 GB/s a direction": {
            "machine": dataclasses.replace(DAINT, byte_gap=1 / 7.5e9)
        },
    },
    "figure 10": {
        "a median of 1.75 s": {"median": 1.75},
        "a median of 1.99 s": {"median": 1.99},
        "a period of 16 steps": {"sync_period": 16},
        "a step is as long as the one before, every other time": {"lasts": 2},
        "steps are as long as the seven before": {"lasts": 8},
    },
}


@dataclass(frozen=True)
class Ratio:
    """WAGMA-SGD's throughput ÷ another method's, as the paper has it.

    Attributes:
        figure, ranks: where in the paper.
        against: the other method, in words.
        published: the ratio; two where the paper tells methods apart that are one in simulated
            time; "< 1" where it says no more than that.
        method: name of the other method.
        change: its settings, where they are not the figure's.
        otherwise: other settings of its own, in words, and their values.
    """

    figure: str
    ranks: int
    against: str
    published: tuple[float, ...] | str
    method: str
    change: dict[str, object] = field(default_factory=dict)
    otherwise: tuple[str, dict[str, object]] | None = None


# Local SGD averages every step unless the paper says otherwise (section V-A): then its simulation
# is Allreduce-SGD's. D-PSGD has one clock for all ranks, as in the paper. Eager-SGD averages by
# WAGMA-SGD's schedules, and its models every τ steps; section II has the majority trigger, "at most
# half" being stale.
ALLREDUCE = "Allreduce-SGD, and local SGD with τ = 1, which is the same in simulated time"
NEAR = ("if it waits for neighbors only", {"clock": "neighbors"})
PUBLISHED = (
    Ratio("figure 4", 64, ALLREDUCE, (1.26, 1.25), "allreduce"),
    Ratio("figure 4", 64, "itself with S = 64", (1.07,), "wagma", {"group_size": 64}),
    Ratio("figure 4", 64, "D-PSGD, one clock for all", (1.23,), "d-psgd", otherwise=NEAR),
    Ratio("figure 4", 64, "SGP, 2 neighbors", (1.25,), "sgp"),
    Ratio("figure 4", 64, "AD-PSGD, “only” it “is faster”", "< 1", "ad-psgd"),
    Ratio("figure 4", 64, "eager-SGD, majority", (1.13,), "eager-sgd"),
    Ratio("figure 4", 64, "eager-SGD, solo", (1.13,), "eager-sgd", {"trigger": "solo"}),
    Ratio("figure 4", 256, "“up to”: Allreduce-SGD", (1.37,), "allreduce"),
    Ratio("figure 7", 16, "itself with S = 16", (1.28,), "wagma", {"group_size": 16}),
    Ratio("figure 10", 1024, "local SGD, τ = 1, simulated as Allreduce-SGD", (2.33,), "allreduce"),
    Ratio("figure 10", 1024, "D-PSGD, one clock for all", (1.88,), "d-psgd", otherwise=NEAR),
    Ratio("figure 10", 1024, "SGP, 4 neighbors", (2.10,), "sgp"),
)
SCALED = {
    "wagma": "WAGMA-SGD",
    "allreduce": "Allreduce, local SGD",
    "d-psgd": "D-PSGD",
    "sgp": "SGP",
    "ad-psgd": "AD-PSGD",
    "eager-sgd": "eager-SGD",
}
SCALES = {
    "figure 4": (RESNET, (4, 16, 64, 256)),
    "figure 7": (TRANSFORMER, (4, 16, 64)),
    "figure 10": (HABITAT, (16, 64, 256, 1024)),
}


def step_times(case, ranks, seed):
    """Return the seconds of all steps, of shape (steps, ranks)."""
    if case.sigma is None:
        made = steps.long_tailed(case.steps // case.lasts, ranks, seed, case.median)
        return np.repeat(made, case.lasts, axis=0)
    made = steps.log_normal(case.steps, ranks, case.step, case.sigma, seed)
    if case.delays == "binomial":
        slow = np.random.default_rng([seed, 1]).random(made.shape) < min(1, 2 / ranks)
        return made + 0.320 * slow
    return steps.delayed(made, case.delays, seed)


def throughput(method, case, ranks, seed):
    return simulate(method, step_times(case, ranks, seed), case.machine, case.settings).throughput


def predict(case, of, seeds):
    """Return WAGMA-SGD's throughput ÷ the other method's: the geometric mean over the seeds."""
    other = dataclasses.replace(case, **of.change)
    logs = [
        math.log(
            throughput("wagma", case, of.ranks, seed) / throughput(of.method, other, of.ranks, seed)
        )
        for seed in range(seeds)
    ]
    return math.exp(sum(logs) / seeds)


def ratios(seeds):
    """Return each published ratio beside the predicted one, and what the unknown parameters do."""
    rows = []
    for of in PUBLISHED:
        case, _ = SCALES[of.figure]
        row = {name: getattr(of, name) for name in ("figure", "ranks", "against", "published")}
        row["predicted"] = predict(case, of, seeds)
        row["varied"] = {
            what: predict(dataclasses.replace(case, **change), of, seeds)
            for what, change in VARIATIONS[of.figure].items()
        }
        if of.otherwise:
            words, change = of.otherwise
            row["otherwise"] = {words: predict(dataclasses.replace(case, **change), of, seeds)}
        rows.append(row)
    return rows


def scaling():
    """Return the throughputs in steps per second, by figure and number of ranks."""
    found = {}
    for name, (case, sizes) in SCALES.items():
        for ranks in sizes:
            made = {method: throughput(method, case, ranks, 0) for method in SCALED}
            made["ideal"] = ranks / step_times(case, ranks, 0).mean()
            found[f"{name}, {ranks} ranks"] = made
    return found


def table(head, rows):
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def tables(results):
    """Return {title: table} of the results, as docs/simulation.md shows them."""
    head = ("paper's figure", "ranks", "÷", "published", "predicted", "one parameter varied")
    rows = []
    for of in results["ratios"]:
        published = of["published"]
        if not isinstance(published, str):
            published = ", ".join(f"{each:.2f}" for each in published)
        low, high = min(of["varied"].values()), max(of["varied"].values())
        spread = f"{low:.2f} to {high:.2f}"
        for words, value in of.get("otherwise", {}).items():
            spread += f"; {value:.2f} {words}"
        figure = of["figure"].removeprefix("figure ")
        rows.append(
            (figure, f"{of['ranks']:,}", of["against"], published, f"{of['predicted']:.2f}", spread)
        )
    over_ranks = [
        (*label.removeprefix("figure ").removesuffix(" ranks").split(", "),
         *(f"{value:.1f}" for value in made.values()))
        for label, made in results["scaling"].items()
    ]  # fmt: skip
    return {
        "ratios": table(head, rows),
        "scaling, steps/s": table(("figure", "ranks", *SCALED.values(), "ideal"), over_ranks),
    }


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments = arguments.parse_args()
    results = {
        "parameters": {name: dataclasses.asdict(case) for name, (case, _) in SCALES.items()},
        "ratios": ratios(arguments.seeds),
        "scaling": scaling(),
    }
    for title, text in tables(results).items():
        print(f"# {title}\n{text}\n")
    report(arguments, "scaling-figures", 1, results)


if __name__ == "__main__":
    main()
