"""Ripples' ways to make groups, in simulated time.

    python benchmarks/simulated_ripples.py

16 ranks on 4 nodes (`hdr`), a model of 9.2 MB (VGG-16 on CIFAR-10, Ripples, section 7), log-normal
steps of 50 ms in the median; every rank trains for the same time. Undisturbed, and with one rank
that sleeps 2 or 5 step times longer at every step (section 7.4). Throughput counts the steps of all
ranks; ÷ Allreduce with the same steps. ρ is that of the groups that have averaged.
"""

from dataclasses import replace
from statistics import median

from common import parser, report, simulated

from collectives.topology import averaging_matrix, rho
from wagma import imbalance
from wagma.methods.method import load
from wagma.simulation import MACHINES, Settings, steps
from wagma.simulation.core import Simulation
from wagma.simulation.formed_groups import FormedGroupMethod

RANKS, NODE = 16, 4
STEP, SIGMA = 0.05, 0.05
NBYTES = 9_230_000
CASES = {"undisturbed": None, "one sleeps 2 steps": 3.0, "one sleeps 5 steps": 6.0}
NODES = f":ranks_per_node={NODE}"
SMART = f"ripples:groups=smart{NODES}"
METHODS_COMPARED = (
    "allreduce",
    "parameter-server:dedicated_server",
    "ripples:groups=random",
    "ripples:groups=buffered",
    f"ripples:groups=static{NODES}",
    SMART,
    f"ripples:groups=smart:ranks_per_node={RANKS}",
    "partial-reduce:group_size=3",
    "ad-psgd",
)
THRESHOLDS = (2, 8, 10**6)


def measure(label, slow, seconds, seed):
    """Return the results of a method, with one rank that is so many times as slow."""
    method, options = simulated(label)
    times = steps.log_normal(int(2 * seconds / STEP), RANKS, STEP, SIGMA, seed)
    if slow:
        times[:, 0] += imbalance.slow_rank_delay(slow, times[:, 0])
    driver = load(method.simulated)(Settings(NBYTES, **options), RANKS)
    if isinstance(driver, FormedGroupMethod):
        driver.log = []
    machine = replace(MACHINES["hdr"], ranks_per_node=NODE)
    simulation = Simulation(driver, machine, times, seconds)
    simulation.run()
    made = int(simulation.made.sum())
    found = {"steps_per_s": made / seconds, "messages_per_step": simulation.messages / made}
    if isinstance(driver, FormedGroupMethod):
        found["groups_in_a_step_of_all"] = len(driver.log) / made * RANKS
        found["rho"] = rho(averaging_matrix(driver.log, RANKS))
    return found


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=60.0)
    arguments.add_argument("--seeds", type=int, default=5)
    arguments = arguments.parse_args()
    results = {}
    compared = METHODS_COMPARED + tuple(f"{SMART}:threshold={each}" for each in THRESHOLDS)
    print(f"{'':<20}{'method':<54}{'÷ allreduce':>12}{'ρ':>7}{'groups':>8}{'messages':>10}")
    for case, slow in CASES.items():
        for label in compared:
            runs = [
                measure(label, slow, arguments.seconds, seed) for seed in range(arguments.seeds)
            ]
            found = {name: median(run[name] for run in runs) for name in runs[0]}
            results[f"{case}: {label}"] = found
            found["to_allreduce"] = (
                found["steps_per_s"] / (results[f"{case}: allreduce"]["steps_per_s"])
            )
            grouped = " " * 15
            if "rho" in found:
                grouped = f"{found['rho']:7.2f}{found['groups_in_a_step_of_all']:8.1f}"
            print(
                f"{case:<20}{label:<54}{found['to_allreduce']:12.2f}"
                f"{grouped}{found['messages_per_step']:10.2f}",
                flush=True,
            )
    report(arguments, "simulated-ripples", 1, results)


if __name__ == "__main__":
    main()
