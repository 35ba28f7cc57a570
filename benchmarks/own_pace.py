"""Ranks at their own pace beside AD-PSGD and Allreduce, with stragglers that sleep.

    mpiexec -n 4 python benchmarks/own_pace.py
    mpiexec -n 8 python benchmarks/own_pace.py

Each rank sleeps for a step and averages a vector of float32 (1 MB by default), for the same time
in every method, which take turns in each round. Undisturbed; one rank 4 times as slow for good;
two ranks 320 ms late at every step (WAGMA-SGD's cloud); each 6 times as slow with probability 1/P
(Hop's); steps that are log-normal, σ = 0.5. "Own, overlap" starts a call, and waits for it after
the next step; AD-PSGD averages in the background.

"÷ bound" is the steps of all ranks ÷ those that they could make if calls took no time; the share
"beyond" is of a rank's time in calls, without that of an exchange (the median of the timely calls
of the undisturbed ranks), of the rank with the most. Ratios are medians over the rounds, each
within its round. A step sleeps, so that ranks wait for each other and not for processors.
"""

import time
from statistics import median

import numpy as np
from common import parser, report
from mpi4py import MPI

from collectives import GroupAllreduce, PairwiseAverage
from wagma import imbalance

CASES = ("undisturbed", "one 4 × slow", "cloud", "random, 6 × slow", "log-normal")
METHODS = ("own pace", "own, overlap", "AD-PSGD", "common pace", "Allreduce")
SIGMA, PERIOD, SLOW = 0.5, 10, 4.0


def delay(case, rank, size, step, seconds):
    """Return how long a rank's step takes."""
    if case == "one 4 × slow":
        return seconds * (SLOW if rank == size - 1 else 1)
    if case == "log-normal":
        return seconds * float(np.random.default_rng([rank, step]).lognormal(0, SIGMA))
    kind = {"cloud": "cloud", "random, 6 × slow": "random"}.get(case, "none")
    return seconds + imbalance.delay(kind, 0, step, rank, size, seconds)


class Steps:
    """One rank's steps of one method, until a time is over."""

    def __init__(self, comm, case, arguments, first):
        self.comm, self.case, self.arguments = comm, case, arguments
        self.step, self.made = first, 0
        self.computing, self.calls, self.timely = 0.0, [], []
        comm.Barrier()
        self.began = time.perf_counter()

    def goes_on(self):
        return time.perf_counter() < self.began + self.arguments.seconds

    def compute(self):
        began = time.perf_counter()
        time.sleep(delay(self.case, self.comm.rank, self.comm.size, self.step, self.arguments.step))
        self.computing += time.perf_counter() - began
        self.step += 1

    def call(self, average):
        """Make a call, and count the step if it is over in time."""
        began = time.perf_counter()
        result = average()
        took = time.perf_counter() - began
        self.calls.append(took)
        if getattr(result, "timely", True) and result is not None:
            self.timely.append(took)
        self.made += self.goes_on()

    def figures(self):
        """Return the rank's figures."""
        elapsed = self.arguments.seconds
        bound = elapsed / (self.computing / len(self.calls))
        return {"made": self.made, "bound": bound, "calls": self.calls, "timely": self.timely}


def run(comm, name, case, vector, arguments, first):
    """Return this rank's figures of one method in one round."""
    if name == "Allreduce":
        total, over = np.empty_like(vector), np.empty(1, np.float32)
        steps = Steps(comm, case, arguments, first)
        going = True
        while going:
            steps.compute()

            def average():
                nonlocal going
                comm.Allreduce(vector, total)
                np.divide(total, comm.size, out=vector)
                over[0] = not steps.goes_on()
                comm.Allreduce(MPI.IN_PLACE, over)
                going = over[0] == 0

            steps.call(average)
        return steps.figures()
    if name == "AD-PSGD":
        with PairwiseAverage(comm, vector) as collective:
            steps = Steps(comm, case, arguments, first)
            while steps.goes_on():
                steps.compute()
                steps.call(lambda: collective(vector))
            return steps.figures()
    pace = "common" if name == "common pace" else "own"
    with GroupAllreduce(comm, vector, pace=pace, sync_period=PERIOD) as collective:
        steps = Steps(comm, case, arguments, first)
        pending = None
        while steps.goes_on():
            if name == "own, overlap":
                if pending is not None:
                    steps.compute()
                    steps.call(pending.wait)
                pending = collective.start(vector)
            else:
                steps.compute()
                steps.call(lambda: collective(vector))
        found = steps.figures()
        collective.join(vector)
        return found


def measure(comm, case, arguments):
    """Return {method: figures of all ranks in each round} on rank 0."""
    everyones = {name: [] for name in METHODS}
    for number in range(arguments.rounds):
        for name in METHODS:
            vector = np.full(arguments.kib << 8, comm.rank, np.float32)
            everyones[name].append(
                comm.gather(run(comm, name, case, vector, arguments, 1000 * number))
            )
    return everyones


def summary(everyones, exchange):
    """Return each method's figures: medians over the rounds."""
    rows = {}
    made = {
        name: [sum(rank["made"] for rank in ranks) for ranks in rounds]
        for name, rounds in everyones.items()
    }
    for name, rounds in everyones.items():
        bounds = [sum(rank["bound"] for rank in ranks) for ranks in rounds]
        row = {"steps": median(made[name])}
        row["of_bound"] = median(m / b for m, b in zip(made[name], bounds))
        for other in ("AD-PSGD", "Allreduce"):
            row[f"over_{other}"] = median(m / o for m, o in zip(made[name], made[other]))
        if exchange is not None:
            row["beyond"] = median(
                max(
                    sum(max(0.0, took - exchange) for took in rank["calls"]) / rank["seconds"]
                    for rank in ranks
                )
                for ranks in rounds
            )
        rows[name] = row
    return rows


def main():
    comm = MPI.COMM_WORLD
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=3.0, help="of a method in a round")
    arguments.add_argument("--step", type=float, default=0.04, help="seconds of a step")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--kib", type=int, default=1000, help="length of the vector")
    arguments = arguments.parse_args()
    rows, exchanges = {}, {}
    if comm.rank == 0:
        print(
            f"# {comm.size} ranks, {arguments.rounds} rounds of {arguments.seconds:g} s", flush=True
        )
        heads = "".join(f"{h:>14}" for h in ("÷ bound", "÷ AD-PSGD", "÷ Allreduce", "beyond"))
        print(f"{'':<20}{'method':<14}{heads}")
    for case in CASES:
        everyones = measure(comm, case, arguments)
        if comm.rank != 0:
            continue
        for rounds in everyones.values():
            for rank in (rank for ranks in rounds for rank in ranks):
                rank["seconds"] = arguments.seconds
        for name, rounds in everyones.items():
            timely = [took for ranks in rounds for rank in ranks for took in rank["timely"]]
            if case == "undisturbed" and timely:
                exchanges[name] = median(timely)
        of_own = exchanges["own pace"]
        rows[case] = summary(everyones, of_own)
        for name, row in rows[case].items():
            figures = (row["of_bound"], row["over_AD-PSGD"], row["over_Allreduce"])
            cells = "".join(f"{figure:14.3f}" for figure in figures)
            print(f"{case:<20}{name:<14}{cells}{row['beyond']:14.2%}", flush=True)
    if comm.rank == 0:
        rows["exchange_s"] = exchanges["own pace"]
        report(arguments, "own-pace", comm.size, rows)


if __name__ == "__main__":
    main()
