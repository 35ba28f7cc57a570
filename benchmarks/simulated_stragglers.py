"""Methods with stragglers in simulated time: throughput, updates, and the sizes of groups.

    python benchmarks/simulated_stragglers.py

All ranks train for the same time (`--seconds`), so fast ones make more steps. Steps are log-normal,
of 0.2 s in the median; the model is ResNet-34's, 21.8 million numbers of single precision; nodes
have four ranks each on a Cray Aries network. Undisturbed; one rank sleeps 2 or 5 step times longer
at every step (Ripples, section 7.4); every rank takes 6 times as long with probability 1/n (Hop,
7.3.1); three ranks always take 1.87 times as long (what sharing an accelerator costs All-Reduce in
Partial Reduce, section 5.2).

A parameter server is on rank 0, or, as in the papers, on a node of its own (dedicated_server).

Tables: all methods on 8, 16 and 64 ranks, ÷ Allreduce with the same stragglers and ÷ the parameter
server on its own node without any; updates (one average of several ranks each, Partial Reduce's
equation 3) and the time for one; Partial Reduce with P' from 2 to 8; 1 to 32 ranks with P' = 4
beside a quarter of the ranks as backups; Ripples' threshold for slow workers.
"""

from common import parser, report, simulated

from wagma import imbalance
from wagma.simulation import MACHINES, Settings, simulate, steps

NODE = 4
STEP, SIGMA = 0.2, 0.05
PARAMETERS = 21_797_672
CASES = {
    "undisturbed": {},
    "one sleeps 2 steps": {0: 3.0},
    "one sleeps 5 steps": {0: 6.0},
    "random, 6 × slow": "random",
    "three 1.87 × slow": dict.fromkeys(range(3), 1.87),
}
READY = "partial-reduce"
METHODS = (
    "allreduce",
    "parameter-server:mode=bsp",
    "parameter-server:mode=backup:backups=1",
    "parameter-server:mode=asp",
    "parameter-server:mode=hete",
    "parameter-server:mode=bsp:dedicated_server",
    "parameter-server:mode=backup:backups=1:dedicated_server",
    "parameter-server:mode=asp:dedicated_server",
    "ad-psgd",
    "eager-sgd:trigger=majority",
    "wagma",
    "wagma:pace=own",
    "wagma:pace=own:overlap",
    f"{READY}:group_size=3",
    f"{READY}:group_size=3:weights=dynamic",
    f"{READY}:group_size=5",
    "ripples:groups=random",
    "ripples:groups=buffered",
    "ripples:groups=smart",
    "ripples:groups=static",
    "hop:backup=1",
    "hop:backup=1:max_skip=10",
)
SERVER = "parameter-server:mode=bsp:dedicated_server"
THRESHOLDS = (2, 4, 8)


def step_times(ranks, slow, seconds, seed=0):
    """Return the seconds of all ranks' steps that fill the time, of shape (steps, ranks)."""
    count = int(2 * seconds / STEP)
    made = steps.log_normal(count, ranks, STEP, SIGMA, seed)
    if slow == "random":
        return steps.delayed(made, slow, seed)
    for rank, factor in slow.items():
        if rank < ranks:
            made[:, rank] += imbalance.slow_rank_delay(factor, made[:, rank])
    return made


def measure(label, ranks, slow, seconds):
    """Return a method's results in that time."""
    method, options = simulated(label)
    if "ranks_per_node" in options:
        options["ranks_per_node"] = NODE
    if options.get("group_size"):
        options["group_size"] = min(options["group_size"], ranks)
    machine = MACHINES["aries"]
    machine = type(machine)(**vars(machine) | {"ranks_per_node": NODE})
    result = simulate(
        method,
        step_times(ranks, slow, seconds),
        machine,
        Settings(4 * PARAMETERS, **options),
        seconds,
    )
    updates = result.updates
    return {
        "steps_per_s": result.throughput,
        "idle_share": result.idle_share,
        "steps_of_slowest": int(result.made.min()),
        "updates_per_s": updates and updates / seconds,
        "seconds_per_update": seconds / updates if updates else None,
    }


def cell(found):
    """Return throughput, updates per second and milliseconds per update in words."""
    if found["updates_per_s"] is None:
        return f"{found['steps_per_s']:9.1f}{'–':>10}{'–':>12}"
    return (
        f"{found['steps_per_s']:9.1f}{found['updates_per_s']:10.2f}"
        f"{1000 * found['seconds_per_update']:12.1f}"
    )


HEADINGS = f"{'steps/s':>9}{'updates/s':>10}{'ms/update':>12}"


def all_methods(arguments, results):
    for ranks in arguments.ranks:
        nodes = -(-ranks // NODE)
        print(
            f"\n# {ranks} ranks as {nodes} × {NODE}, {arguments.seconds:g} s\n"
            f"{'':<20}{'method':<58}{HEADINGS}{'÷ allreduce':>13}{'÷ server':>10}{'idle':>8}"
        )
        server = None
        for case, slow in CASES.items():
            found = {label: measure(label, ranks, slow, arguments.seconds) for label in METHODS}
            server = server or found[SERVER]["steps_per_s"]
            for label, each in found.items():
                each["to_allreduce"] = each["steps_per_s"] / found["allreduce"]["steps_per_s"]
                each["to_undisturbed_server"] = each["steps_per_s"] / server
                results[f"{ranks} ranks, {case}: {label}"] = each
                print(
                    f"{case:<20}{label:<58}{cell(each)}{each['to_allreduce']:13.2f}"
                    f"{each['to_undisturbed_server']:10.2f}{each['idle_share']:8.1%}",
                    flush=True,
                )


def group_sizes(arguments, results):
    print(f"\n# 8 ranks, P' = 2…8\n{'':<20}{'method':<58}{HEADINGS}")
    for case, slow in CASES.items():
        for size in range(2, 9):
            for weights in ("constant", "dynamic"):
                label = f"{READY}:group_size={size}:weights={weights}"
                found = measure(label, 8, slow, arguments.seconds)
                results[f"8 ranks, {case}: {label}"] = found
                print(f"{case:<20}{label:<58}{cell(found)}", flush=True)


def scaling(arguments, results):
    print(
        f"\n# P' = 4 beside a quarter of the ranks as backups, steps/s\n{'':<20}{'ranks':>6}"
        f"{'P-Reduce':>10}{'backups':>10}{'allreduce':>10}"
    )
    for case, slow in CASES.items():
        for ranks in (1, 2, 4, 8, 16, 32):
            labels = (
                f"{READY}:group_size=4" if ranks > 1 else READY,
                f"parameter-server:mode=backup:backups={ranks // 4}:dedicated_server",
                "allreduce",
            )
            found = [measure(label, ranks, slow, arguments.seconds) for label in labels]
            for label, each in zip(labels, found):
                results[f"scaling, {ranks} ranks, {case}: {label}"] = each
            rates = "".join(f"{each['steps_per_s']:10.1f}" for each in found)
            print(f"{case:<20}{ranks:6}{rates}", flush=True)


def thresholds(arguments, results):
    print(f"\n# Ripples' threshold for slow workers\n{'':<20}{'ranks':>6}{'C_thres':>8}{HEADINGS}")
    for case, slow in CASES.items():
        for ranks in (8, 16):
            for threshold in THRESHOLDS:
                label = f"ripples:groups=smart:threshold={threshold}"
                found = measure(label, ranks, slow, arguments.seconds)
                results[f"{ranks} ranks, {case}: {label}"] = found
                print(f"{case:<20}{ranks:6}{threshold:8}{cell(found)}", flush=True)


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 64])
    arguments.add_argument("--seconds", type=float, default=120.0)
    arguments = arguments.parse_args()
    results = {}
    for part in (all_methods, group_sizes, scaling, thresholds):
        part(arguments, results)
    report(arguments, "simulated-stragglers", 1, results)


if __name__ == "__main__":
    main()
