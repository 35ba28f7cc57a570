"""Methods with stragglers, by what they learn in simulated time: throughput and time to 90 %.

    python benchmarks/learning_stragglers.py --ranks 8

The stragglers of `simulated_stragglers.py`; all ranks train the digits' network for the same
time (`--seconds`), by batches of 16, and the ranks' mean model is evaluated every second. The
network takes the time of ResNet-34's 21.8 million numbers. Medians over the seeds; the spread of
the time is over the seeds that reach the accuracy, whose number is shown if it is not all.
"""

from common import parser
from learning import Run, tabulate, train_all
from simulated_stragglers import CASES, NODE, PARAMETERS, step_times

from wagma.simulation import MACHINES

METHODS = {
    "Allreduce": "allreduce",
    "server, bsp": "parameter-server:mode=bsp",
    "1 backup": "parameter-server:mode=backup:backups=1",
    "asp": "parameter-server:mode=asp",
    "AD-PSGD": "ad-psgd",
    "D-PSGD": "d-psgd",
    "SGP": "sgp",
    "local SGD": "local-sgd",
    "eager, majority": "eager-sgd:trigger=majority",
    "WAGMA": "wagma",
    "own pace": "wagma:pace=own",
    "own, overlap": "wagma:pace=own:overlap",
    "P-Reduce, P' = 3": "partial-reduce:group_size=3",
    "dynamic": "partial-reduce:group_size=3:weights=dynamic",
    "Ripples, smart": f"ripples:groups=smart:ranks_per_node={NODE}",
    "static": f"ripples:groups=static:ranks_per_node={NODE}",
    "Hop, 1 backup": "hop:backup=1",
    "skips 10": "hop:backup=1:max_skip=10",
}


def runs_of(arguments, machine):
    """Return the trainings, of which each has the name (case, method, seed)."""
    nbytes = 4 * PARAMETERS
    return [
        Run(
            (case, name, seed),
            METHODS[name],
            step_times(arguments.ranks, slow, arguments.seconds, seed),
            machine,
            {
                "seconds": arguments.seconds,
                "nbytes": nbytes,
                "batch_size": 16,
                "seed": seed,
                "evaluate_every_seconds": 1.0,
            },
        )
        for case, slow in CASES.items()
        for name in arguments.methods
        for seed in range(arguments.seeds)
    ]


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=8)
    arguments.add_argument("--seconds", type=float, default=40.0)
    arguments.add_argument("--seeds", type=int, default=10)
    arguments.add_argument("--target", type=float, default=0.9)
    arguments.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = arguments.parse_args()
    machine = MACHINES["aries"]
    machine = type(machine)(**{**vars(machine), "ranks_per_node": NODE})
    found, ranks = train_all(runs_of(arguments, machine)), arguments.ranks
    tabulate(arguments, "learning-stragglers", ranks, found, CASES, METHODS, f"{ranks} ranks")


if __name__ == "__main__":
    main()
