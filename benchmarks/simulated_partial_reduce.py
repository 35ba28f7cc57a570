"""Partial Reduce in simulated time: how alike steps are, and what its filter costs.

    python benchmarks/simulated_partial_reduce.py

Table 1 of the paper (Miao et al., 2021) as contributions to updates per second ÷ All-Reduce's, over
σ of the log-normal steps: 8 ranks as 2 × 4 on a Cray Aries network, steps of 0.2 s in the median,
ResNet-34's 21.8 million parameters, 120 s. All alike, and with three ranks that always take 1.87
times as long (what sharing an accelerator costs All-Reduce in the paper). A step is a contribution,
but the server with 3 backup workers drops what comes after the first 5 of a round, as in the paper.

The filter's cost: steps with the default history ÷ those without a filter, and ρ of both, where
some ranks are slow alike; steps of 0.1 s, 4 MB, 60 s.
"""

from dataclasses import replace
from statistics import median

import numpy as np
from common import parser, report, simulated

from collectives.topology import averaging_matrix, rho
from wagma.methods.method import load
from wagma.simulation import MACHINES, Settings, steps
from wagma.simulation.core import Simulation

RANKS, NODE = 8, 4
STEP = 0.2
PARAMETERS = 21_797_672
SIGMAS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5)
CASES = {"all alike": {}, "three 1.87 × slow": dict.fromkeys(range(3), 1.87)}
BACKUP = "parameter-server:mode=backup:backups=3"
METHODS = (
    "allreduce",
    "partial-reduce:group_size=3",
    "partial-reduce:group_size=5",
    "ad-psgd",
    BACKUP,
)
# Ranks, P', ranks that are slow, how many times, and σ.
SLOW_ALIKE = (
    *((4, 2, 2, 6, 0.001), (4, 2, 2, 6, 0.02), (4, 2, 2, 20, 0.02), (8, 2, 2, 6, 0.02)),
    *((8, 2, 4, 6, 0.02), (8, 2, 2, 1.87, 0.05), (8, 3, 3, 1.87, 0.05), (8, 4, 4, 2, 0.05)),
    *((16, 2, 2, 6, 0.02), (4, 2, 0, 1, 0.01)),
)


def run(method, times, seconds, **options):
    """Return the simulation of a method in that time, which logs the groups that it forms."""
    settings = {"nbytes": 4 * PARAMETERS} | options
    driver = load(method.simulated)(Settings(**settings), times.shape[1])
    if hasattr(driver, "log"):
        driver.log = []
    simulation = Simulation(driver, replace(MACHINES["aries"], ranks_per_node=NODE), times, seconds)
    simulation.run()
    return simulation


def contributions(label, slow, sigma, seconds, seed):
    """Return how many steps of all ranks per second enter an update."""
    times = steps.log_normal(int(3 * seconds / STEP), RANKS, STEP, sigma, seed)
    for rank, factor in slow.items():
        times[:, rank] *= factor
    method, options = simulated(label)
    simulation = run(method, times, seconds, **options)
    if label != BACKUP:
        return simulation.made.sum() / seconds
    ranks = range(simulation.ranks)
    return sum(simulation.method.protocol(rank).averagings for rank in ranks) / seconds


def alikeness(arguments, results):
    print(f"{'σ':<6}{'':<20}" + "".join(f"{label:>40}" for label in METHODS[1:]))
    for sigma in SIGMAS:
        for case, slow in CASES.items():
            found = {label: [] for label in METHODS[1:]}
            for seed in range(arguments.seeds):
                rates = [
                    contributions(label, slow, sigma, arguments.seconds, seed) for label in METHODS
                ]
                for label, rate in zip(METHODS[1:], rates[1:]):
                    found[label].append(rate / rates[0])
            medians = {label: median(ratios) for label, ratios in found.items()}
            results[f"σ = {sigma}, {case}"] = medians
            cells = "".join(f"{ratio:40.2f}" for ratio in medians.values())
            print(f"{sigma:<6}{case:<20}{cells}", flush=True)


def filter_cost(arguments, results):
    print(
        "\n# steps with the filter ÷ without it: of all ranks, of the fast ones; ρ with it, without"
    )
    method, _ = simulated("partial-reduce")
    for ranks, group_size, slow, factor, sigma in SLOW_ALIKE:
        found = []
        for seed in range(1, 1 + arguments.seeds):
            times = 0.1 * np.random.default_rng(seed).lognormal(0, sigma, (800, ranks))
            times[:, :slow] *= factor
            made, measured = [], []
            for history in (None, 10**6):
                options = {"group_size": group_size, "history": history, "nbytes": 4_000_000}
                simulation = run(method, times, 60, **options)
                made.append(simulation.made)
                groups = [group for group in simulation.method.log if len(group) > 1]
                measured.append(rho(averaging_matrix(groups, ranks)))
            filtered, free = made
            shares = filtered.sum() / free.sum(), filtered[slow:].sum() / free[slow:].sum()
            found.append((*shares, *measured))
        names = ("steps", "steps_of_fast", "rho", "rho_without")
        medians = dict(zip(names, map(median, zip(*found))))
        label = f"{ranks} ranks, P' = {group_size}, {slow} × {factor} slow, σ = {sigma}"
        results[f"filter: {label}"] = medians
        print(f"{label:<45}" + "".join(f"{value:8.3f}" for value in medians.values()), flush=True)


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=120.0)
    arguments.add_argument("--seeds", type=int, default=5)
    arguments = arguments.parse_args()
    results = {}
    alikeness(arguments, results)
    filter_cost(arguments, results)
    report(arguments, "simulated-partial-reduce", 1, results)


if __name__ == "__main__":
    main()
