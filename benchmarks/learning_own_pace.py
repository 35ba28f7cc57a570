"""What ranks at their own pace learn, in simulated time, beside the methods they are compared with.

    python benchmarks/learning_own_pace.py --ranks 8

One rank is 4 times as slow for good, and all train the digits' network for the same time, on shards
that are alike and on shards of few classes each (Dirichlet, α = 0.1); undisturbed, all make the
same number of steps, of which the accuracy is compared. Steps of 0.2 s and batches of 16; the
network takes the time of the digits' network's own numbers, so that methods differ by what they
wait for and learn, not by what they send. Means and medians over the seeds, with the spread.
"""

from common import parser
from learning import Run, tabulate, train_all

from wagma.simulation import MACHINES, steps

STEP, SLOW, EQUAL_STEPS = 0.2, 4.0, 150
LIMIT = STEP  # of DropCompute, which fast ranks keep
LOCAL = 4  # steps of asynchronous local SGD, for which the slow rank has time for one
METHODS = {
    "Allreduce": "allreduce",
    "local SGD": "local-sgd",
    "local SGD, solo": "local-sgd:trigger=solo",
    "WAGMA": "wagma",
    "own pace": "wagma:pace=own",
    "own, overlap": "wagma:pace=own:overlap",
    "AD-PSGD": "ad-psgd",
    "P-Reduce, P' = 3": "partial-reduce:group_size=3",
    "asp": "parameter-server:mode=asp",
    "ringmaster": "parameter-server:mode=ringmaster",
    "ringmaster, R = 2P": "parameter-server:mode=ringmaster:max_age={twice}",
    "async-local": "parameter-server:mode=async-local:local_steps={local}",
    "DropCompute": f"allreduce:compute_limit={LIMIT}",
}
# DropCompute divides a batch into micro-batches; a step of the slow rank begins one in time.
MICRO = {"DropCompute": {"batch_size": 4, "accumulate": 4}}
# By case: the slow ranks' factors, and the task's shards.
CASES = {
    "one 4 × slow, iid": ({0: SLOW}, {"shards": "iid"}),
    "one 4 × slow, Dirichlet(0.1)": ({0: SLOW}, {"shards": "dirichlet", "dirichlet_alpha": 0.1}),
    "equal samples, iid": ({}, {"shards": "iid"}),
}


def run(case, name, label, seed, arguments):
    """Return a training of a case."""
    slow, shards = CASES[case]
    equal = case.startswith("equal")
    count = EQUAL_STEPS if equal else int(arguments.seconds / STEP) + 1
    times = steps.constant(count, arguments.ranks, STEP)
    settings = {
        **shards,
        **({} if equal else {"seconds": arguments.seconds}),
        "batch_size": 16,
        "seed": seed,
        "evaluate_every_seconds": arguments.seconds / 80,
        **MICRO.get(name, {}),
    }
    local = "+".join(str(1 if rank in slow else LOCAL) for rank in range(arguments.ranks))
    label = label.format(ranks=arguments.ranks, twice=2 * arguments.ranks, local=local)
    times = steps.delayed(times, "none", seed, 1.0, slow)
    return Run((case, name, seed), label, times, MACHINES["aries"], settings)


def measure(doc, name, methods, cases):
    """Train by all methods in these cases, print their tables, and write the results."""
    arguments = parser(doc)
    arguments.add_argument("--ranks", type=int, default=8)
    arguments.add_argument("--seconds", type=float, default=40.0)
    arguments.add_argument("--seeds", type=int, default=10)
    arguments.add_argument("--target", type=float, default=0.9)
    arguments.add_argument("--methods", nargs="+", choices=methods, default=list(methods))
    arguments = arguments.parse_args()
    ranks = arguments.ranks
    found = train_all(
        [
            run(case, each, methods[each], seed, arguments)
            for case in cases
            for seed in range(arguments.seeds)
            for each in arguments.methods
        ]
    )
    rows = tabulate(arguments, name, ranks, found, cases, methods, f"{ranks} ranks")
    for case, row in rows.items():
        print(f"| {case} | {' | '.join(accuracy(row[each]) for each in arguments.methods)} |")


def accuracy(figures):
    """Return the mean accuracy and, of several seeds, its deviation, in percent."""
    mean = f"{100 * figures['accuracy']:.1f}"
    deviation = figures["deviation"]
    return mean if deviation is None else f"{mean} ± {100 * deviation:.1f}"


if __name__ == "__main__":
    measure(__doc__, "learning-own-pace", METHODS, list(CASES))
