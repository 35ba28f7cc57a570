"""Ripples' ways to make groups, in simulated time, and what its nodes are worth.

    python benchmarks/simulated_ripples.py

16 ranks on 4 nodes, as in Ripples' section 7: FDR InfiniBand, 6.8 GB/s, and four accelerators on
the PCIe of a node, 11 GB/s (our choice). The models are VGG-16 on CIFAR-10, 9.2 MB, and ResNet-50
on ImageNet, 196 MB; their steps are log-normal, of 50 and 150 ms in the median (our choice: the
paper does not state them). Every rank trains for the same time. Undisturbed, and with one rank that
sleeps 2 or 5 step times longer at every step (section 7.4). Throughput counts the steps of all
ranks; ÷ Allreduce with the same steps. ρ is that of the groups that have averaged.

Tables: methods and thresholds, among them smart groups that ignore nodes, on this machine and on
one whose nodes are no faster inside; the seconds of an average by placement (Figure 15); the share
of time that AD-PSGD waits (Figure 2b).
"""

from dataclasses import replace
from statistics import median

from common import parser, report, simulated

from collectives.topology import averaging_matrix, rho
from wagma import imbalance
from wagma.methods.method import load
from wagma.simulation import Machine, Settings, steps
from wagma.simulation.core import Simulation, mpi_allreduce_time, placed_allreduce_time
from wagma.simulation.formed_groups import FormedGroupMethod

RANKS, NODE = 16, 4
SIGMA = 0.05
MODELS = {"VGG-16": (9_230_000, 0.05), "ResNet-50": (196_000_000, 0.15)}  # bytes, seconds of a step
# The latencies are those of ConnectX-3 and of a copy between accelerators, about; an accelerator
# adds vectors at 200 GB/s.
FDR = Machine(0.7e-6, 0.2e-6, 0.3e-6, 1 / 6.8e9, injection=6.8e9, memory=200e9, ranks_per_node=NODE)
MACHINES = {"two levels": replace(FDR, local_latency=0.5e-6, local_byte_gap=1 / 11e9), "one": FDR}
# Figure 15: ranks per node of as many nodes.
PLACES = {
    "2 workers on 1 node": (2,),
    "4 workers on 1 node": (4,),
    "8 workers on 2 nodes": (4, 4),
    "16 workers on 4 nodes": (4, 4, 4, 4),
    "4 workers on 4 nodes": (1,) * 4,
    "8 workers on 8 nodes": (1,) * 8,
    "12 workers on 12 nodes": (1,) * 12,
}
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


def measure(label, slow, seconds, seed, model, machine):
    """Return the results of a method, with one rank that is so many times as slow."""
    method, options = simulated(label)
    nbytes, step = MODELS[model]
    times = steps.log_normal(int(2 * seconds / step), RANKS, step, SIGMA, seed)
    if slow:
        times[:, 0] += imbalance.slow_rank_delay(slow, times[:, 0])
    driver = load(method.simulated)(Settings(nbytes, **options), RANKS)
    if isinstance(driver, FormedGroupMethod):
        driver.log = []
    simulation = Simulation(driver, machine, times, seconds)
    simulation.run()
    made = int(simulation.made.sum())
    found = {
        "steps_per_s": made / seconds,
        "idle_share": simulation.waited.sum() / (RANKS * seconds),
        "messages_per_step": simulation.messages / made,
    }
    if isinstance(driver, FormedGroupMethod):
        found["groups_in_a_step_of_all"] = len(driver.log) / made * RANKS
        found["rho"] = rho(averaging_matrix(driver.log, RANKS))
    return found


def compared(arguments, results, model, name):
    labels = METHODS_COMPARED
    if (model, name) == ("VGG-16", "two levels"):
        labels += tuple(f"{SMART}:threshold={each}" for each in THRESHOLDS)
    print(
        f"\n# {model}, machine of {name}\n{'':<20}{'method':<54}{'÷ allreduce':>12}{'idle':>8}"
        f"{'ρ':>7}{'groups':>8}{'messages':>10}"
    )
    for case, slow in CASES.items():
        reference = None
        for label in labels:
            runs = [
                measure(label, slow, arguments.seconds, seed, model, MACHINES[name])
                for seed in range(arguments.seeds)
            ]
            found = {each: median(run[each] for run in runs) for each in runs[0]}
            reference = reference or found["steps_per_s"]
            found["to_allreduce"] = found["steps_per_s"] / reference
            results[f"{model}, {name}, {case}: {label}"] = found
            grouped = " " * 15
            if "rho" in found:
                grouped = f"{found['rho']:7.2f}{found['groups_in_a_step_of_all']:8.1f}"
            print(
                f"{case:<20}{label:<54}{found['to_allreduce']:12.2f}{found['idle_share']:8.1%}"
                f"{grouped}{found['messages_per_step']:10.2f}",
                flush=True,
            )


def placements(results):
    """Print the time of an average by placement: MPI_Allreduce's, and that of a group's slices."""
    print(f"\n# ms of an average, {'':<6}{'MPI_Allreduce':>16}{'a group':>10}")
    for model, (nbytes, _) in MODELS.items():
        for place, sizes in PLACES.items():
            size = sum(sizes)
            machine = replace(MACHINES["two levels"], node_sizes=sizes).for_job(size)
            nodes = [node for node, count in enumerate(sizes) for _ in range(count)]
            found = {
                "allreduce_s": mpi_allreduce_time(machine, size, nbytes),
                "group_s": placed_allreduce_time(machine, nodes, nbytes),
            }
            results[f"{model}: {place}"] = found
            cells = [f"{1000 * each:10.2f}" for each in found.values()]
            print(f"{model:<11}{place:<24}{''.join(cells)}")


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=60.0)
    arguments.add_argument("--seeds", type=int, default=5)
    arguments = arguments.parse_args()
    results = {}
    for model in MODELS:
        for name in MACHINES:
            compared(arguments, results, model, name)
    placements(results)
    report(arguments, "simulated-ripples", 1, results)


if __name__ == "__main__":
    main()
