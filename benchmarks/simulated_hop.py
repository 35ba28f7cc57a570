"""Hop's figures in simulated time: graphs, backup workers, staleness, skipping, a placement.

    python benchmarks/simulated_hop.py

Hop's cluster (section 7.2): machines of four workers each, on Ethernet of 1 Gbit/s, and VGG11 on
CIFAR-10, of 9.2 million parameters. An undisturbed step takes 3.4 s in the median, about as long as
an iteration in Figure 18; steps are log-normal. At random, every worker takes 6 times as long with
probability 1/n (7.3.1), or one worker always takes 4 times as long (7.3.5). How many iterations a
rank may be ahead of those that average its model, which the paper does not state, is the default
(5; 7 with a staleness of 5), except in one table.

Tables: seconds per iteration on three graphs, with stragglers and without (Figure 12), and speedups
of other settings over the standard one (Figures 14 to 17), also by how far ranks may be ahead;
beside servers, on worker 0 and, as in the paper, on a further machine (Figure 13); with a rank that
is always slow, by iterations and by time (Figures 18 and 19); and 8 workers on machines with 4, 2
and 2 of them (Figures 20 and 21). All are means over the seeds. The last table has the jobs of
`hop.py`, without a network and without the load of a machine: 8 ranks with steps of 60 ms for 8
seconds, of which the same are slow with every graph and setting; medians over the seeds, with the
lowest and the highest.
"""

from dataclasses import replace
from statistics import mean, median

import numpy as np
from common import parser, report, simulated

from collectives import graphs
from wagma import imbalance
from wagma.simulation import FREE, MACHINES, Settings, simulate, steps

PARAMETERS = 9_231_114
STEP, SIGMA = 3.4, 0.05
GIGABIT = 1e9 / 8 * 1448 / 1538  # bytes of messages per second
CLUSTER = replace(MACHINES["10gbe"], injection=GIGABIT, ranks_per_node=4)
GRAPHS = ("ring", "ring-based", "double-ring")
SETTINGS = {
    "standard": "",
    "backup": ":backup=1",
    "staleness": ":staleness=5",
    "hybrid": ":backup=1:staleness=5",
    "notify-ack": ":mode=notify-ack",
}
SKIPPING = {
    "standard": "",
    "backup": ":backup=1",
    "backup, skips 2": ":backup=1:max_skip=2",
    "backup, skips 10": ":backup=1:max_skip=10",
    "staleness": ":staleness=5",
    "staleness, skips 10": ":staleness=5:max_skip=10",
}
SERVERS = tuple(f"parameter-server:mode={mode}" for mode in ("bsp", "asp"))
OTHERS = (
    "allreduce",
    *SERVERS,
    *(f"{server}:dedicated_server" for server in SERVERS),
    "ad-psgd",
    "wagma:pace=own",
    "wagma:pace=own:overlap",
)
GAPS = (1, 2, 5, 8, 20)
BY_GAP = (":backup=1", ":backup=2", ":staleness=5", ":staleness=20", ":backup=1:max_skip=10")
DRAWN_STEP, DRAWN_SECONDS, DRAWN_RANKS = 0.06, 8.0, 8  # those of hop.py
DRAWN = {
    **{name: SETTINGS[name] for name in ("standard", "backup", "staleness")},
    "staleness, gap 5": ":staleness=5:max_gap=5",  # as hop.py was measured
}
PLACED = ("ring-based", "hierarchical-4+2+2", "hierarchical-4+2+2-gateways-2")


def step_times(count, ranks, slow, seed, step=STEP):
    """Return the seconds of all ranks' steps: undisturbed, "random", or with ranks' factors."""
    made = steps.log_normal(count, ranks, step, SIGMA, seed)
    if slow == "random":
        return steps.delayed(made, slow, seed)
    for rank, factor in (slow or {}).items():
        made[:, rank] += imbalance.slow_rank_delay(factor, made[:, rank])
    return made


def run(label, times, machine, seconds=None):
    """Simulate a method with its own options."""
    method, options = simulated(label)
    return simulate(method, times, machine, Settings(4 * PARAMETERS, **options), seconds)


def iteration(arguments, label, ranks, slow=None, machine=CLUSTER, step=STEP):
    """Return the mean seconds per iteration."""
    taken = []
    for seed in range(arguments.seeds):
        times = step_times(arguments.iterations, ranks, slow, seed, step)
        taken.append(run(label, times, machine).wall / arguments.iterations)
    return mean(taken)


def on_graphs(arguments, results):
    for ranks in arguments.ranks:
        print(
            f"\n# {ranks} workers, {arguments.iterations} iterations: seconds per iteration\n"
            f"{'graph':<14}{'setting':<14}{'undisturbed':>12}{'random 6 ×':>12}{'÷':>7}"
            f"{'speed-up over standard':>24}"
        )
        for graph in GRAPHS:
            standard = None
            for setting, options in SETTINGS.items():
                label = f"hop:graph={graph}{options}"
                found = {
                    "undisturbed_s": iteration(arguments, label, ranks),
                    "random_s": iteration(arguments, label, ranks, "random"),
                }
                standard = standard or found["random_s"]
                found["slow_down"] = found["random_s"] / found["undisturbed_s"]
                found["speed_up"] = standard / found["random_s"]
                results[f"{ranks} workers: {label}"] = found
                print(
                    f"{graph:<14}{setting:<14}{found['undisturbed_s']:12.2f}"
                    f"{found['random_s']:12.2f}{found['slow_down']:7.2f}{found['speed_up']:24.2f}",
                    flush=True,
                )


def gaps(arguments, results):
    for ranks in arguments.ranks:
        standard = iteration(arguments, "hop:graph=ring-based", ranks, "random")
        print(
            f"\n# {ranks} workers, ring-based, random 6 ×: speed-up over standard by max_gap\n"
            f"{'setting':<24}{''.join(f'{gap:8}' for gap in GAPS)}"
        )
        for options in BY_GAP:
            labels = [f"hop:graph=ring-based:max_gap={gap}{options}" for gap in GAPS]
            found = [standard / iteration(arguments, label, ranks, "random") for label in labels]
            for label, speed_up in zip(labels, found):
                results[f"by gap, {ranks} workers: {label}"] = {"speed_up": speed_up}
            print(f"{options[1:]:<24}{''.join(f'{each:8.2f}' for each in found)}", flush=True)


def beside_servers(arguments, results):
    hop = [f"hop:graph={GRAPHS[1]}{SETTINGS[name]}" for name in ("standard", "backup", "staleness")]
    for ranks in arguments.ranks:
        print(
            f"\n# {ranks} workers: seconds per iteration, and steps of all per second by time\n"
            f"{'method':<44}{'undisturbed':>12}{'random 6 ×':>12}{'steps/s':>10}{'random':>10}"
        )
        for label in (*OTHERS, *hop):
            found = {
                "undisturbed_s": iteration(arguments, label, ranks),
                "random_s": iteration(arguments, label, ranks, "random"),
                "undisturbed_steps_per_s": by_time(arguments, label, ranks)["steps_per_s"],
                "random_steps_per_s": by_time(arguments, label, ranks, "random")["steps_per_s"],
            }
            results[f"beside servers, {ranks} workers: {label}"] = found
            seconds, rates = list(found.values())[:2], list(found.values())[2:]
            print(
                f"{label:<44}{''.join(f'{each:12.2f}' for each in seconds)}"
                f"{''.join(f'{each:10.2f}' for each in rates)}",
                flush=True,
            )


def by_time(arguments, label, ranks, slow=None):
    """Return steps and iterations of all ranks per second, and iterations of the slowest's."""
    made = []
    for seed in range(arguments.seeds):
        count = int(2 * arguments.seconds / STEP)
        result = run(label, step_times(count, ranks, slow, seed), CLUSTER, arguments.seconds)
        reached = result.reached
        made.append((result.throughput, reached.sum() / result.wall, reached[1:].mean()))
    steps_per_s, iterations_per_s, others = np.mean(made, axis=0).tolist()
    return {
        "steps_per_s": steps_per_s,
        "iterations_per_s": iterations_per_s,
        "iteration_of_others_s": arguments.seconds / others if others else None,
    }


def skipping(arguments, results):
    slow = {0: 4.0}
    for ranks in arguments.ranks:
        print(
            f"\n# {ranks} workers, ring-based, worker 0 always takes 4 times as long\n"
            f"{'setting':<22}{'undisturbed':>12}{'slow':>8}{'÷':>7}{'speed-up':>10}"
            f"{'steps/s':>10}{'others s':>10}"
        )
        standard = None
        for setting, options in SKIPPING.items():
            label = f"hop:graph=ring-based{options}"
            found = {
                "undisturbed_s": iteration(arguments, label, ranks),
                "slow_s": iteration(arguments, label, ranks, slow),
                **by_time(arguments, label, ranks, slow),
            }
            standard = standard or found["slow_s"]
            found["slow_down"] = found["slow_s"] / found["undisturbed_s"]
            found["speed_up"] = standard / found["slow_s"]
            results[f"one slow, {ranks} workers: {label}"] = found
            print(
                f"{setting:<22}{found['undisturbed_s']:12.2f}{found['slow_s']:8.2f}"
                f"{found['slow_down']:7.2f}{found['speed_up']:10.2f}{found['steps_per_s']:10.2f}"
                f"{found['iteration_of_others_s']:10.2f}",
                flush=True,
            )


def placement(arguments, results):
    """Compare placements, also with steps so short that most time is spent on the network."""
    machine = replace(CLUSTER, ranks_per_node=1, node_sizes=(4, 2, 2))
    print(
        f"\n# 8 workers on machines with 4, 2 and 2, seconds per iteration\n{'graph':<32}"
        f"{'gap':>8}{'with self':>10}{'undisturbed':>12}{'random 6 ×':>12}{'1/8 as long':>12}"
    )
    for graph in PLACED:
        edges = graphs.edges_of(graph, 8)
        label = f"hop:graph={graph}"
        found = {
            "spectral_gap": graphs.spectral_gap(edges, 8, self_loops=False),
            "spectral_gap_with_self_loops": graphs.spectral_gap(edges, 8),
            "undisturbed_s": iteration(arguments, label, 8, None, machine),
            "random_s": iteration(arguments, label, 8, "random", machine),
            "short_steps_s": iteration(arguments, label, 8, None, machine, STEP / 8),
        }
        results[f"placement: {label}"] = found
        print(
            f"{graph:<32}{found['spectral_gap']:8.4f}"
            f"{found['spectral_gap_with_self_loops']:10.4f}{found['undisturbed_s']:12.2f}"
            f"{found['random_s']:12.2f}{found['short_steps_s']:12.2f}",
            flush=True,
        )


def same_draws(arguments, results):
    """Compare what each setting gains where the same steps of the same ranks are slow."""
    print(
        f"\n# {DRAWN_RANKS} ranks, {DRAWN_SECONDS:g} s of steps of {DRAWN_STEP:g} s, random 6 ×, "
        f"no network: steps/s of a rank, median [lowest, highest] of {arguments.seeds} seeds\n"
        f"{'graph':<14}{'setting':<18}{'steps/s':>24}{'÷ standard, same graph':>26}"
        f"{'÷ ring-based, standard':>26}"
    )
    made = {
        (graph, setting): [
            drawn_steps(f"hop:graph={graph}{DRAWN[setting]}", seed)
            for seed in range(arguments.seeds)
        ]
        for graph in GRAPHS
        for setting in DRAWN
    }
    for method in OTHERS:
        made[method, ""] = [drawn_steps(method, seed) for seed in range(arguments.seeds)]
    for (graph, setting), rates in made.items():
        base = made["ring-based", "standard"]
        found = {"steps_per_s": spread(rates), "of_ring_based": spread(np.divide(rates, base))}
        if setting:
            own = made[graph, "standard"]
            found["of_standard"] = spread(np.divide(rates, own))
        label = f"hop:graph={graph}{DRAWN[setting]}" if setting else graph
        results[f"same draws: {label}"] = found
        print(
            f"{graph:<{14 if setting else 32}}{setting:<{18 if setting else 0}}"
            f"{in_words(found['steps_per_s']):>24}{in_words(found.get('of_standard')):>26}"
            f"{in_words(found['of_ring_based']):>26}",
            flush=True,
        )


def drawn_steps(label, seed):
    """Return steps per second of a rank, of a job without a network."""
    count = int(2 * DRAWN_SECONDS / DRAWN_STEP)
    times = steps.delayed(steps.constant(count, DRAWN_RANKS, DRAWN_STEP), "random", seed)
    method, options = simulated(label)
    result = simulate(method, times, FREE, Settings(1, **options), DRAWN_SECONDS)
    return result.throughput / DRAWN_RANKS


def spread(values):
    """Return the median, the lowest and the highest value."""
    return {"median": median(values), "lowest": min(values), "highest": max(values)}


def in_words(found):
    """Return what `spread` returned as text; a dash for None."""
    if found is None:
        return "–"
    return f"{found['median']:.2f} [{found['lowest']:.2f}, {found['highest']:.2f}]"


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    arguments.add_argument("--iterations", type=int, default=200)
    arguments.add_argument("--seconds", type=float, default=680.0)
    arguments.add_argument("--seeds", type=int, default=5)
    arguments = arguments.parse_args()
    results = {}
    for part in (on_graphs, gaps, beside_servers, skipping, placement, same_draws):
        part(arguments, results)
    report(arguments, "simulated-hop", 1, results)


if __name__ == "__main__":
    main()
