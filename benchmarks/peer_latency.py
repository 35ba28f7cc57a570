"""Latency of calls in which ranks send each other vectors, beside MPI_Sendrecv and numpy.

    mpiexec -n 4 python benchmarks/peer_latency.py

Vectors of float32 of 1 KiB to 96 MiB, all ranks of one node, which call together: D-PSGD's average
of a ring's neighbors (NeighborAverage), and push-sum to one neighbor (PushSum). The reference does
the same to a vector by hand: MPI_Sendrecv with the same neighbors, and numpy's multiplications and
additions in place. It publishes no change, and serves no rank that is late.

The variants take turns in every round, each collective being the only one open then, after calls
to warm up; the first round is thrown away, and all results are checked in it. A time is that of
the slowest rank, per call of several in a row. The table has medians over the rounds, and a ratio
is the median of the ratios round by round. A size ends after --rounds rounds or --seconds seconds,
whichever is first, but not before three rounds more.
"""

import contextlib
import time
from statistics import median

import numpy as np
from common import figure, machine, parser, ratio, ratio_label, report, time_calls
from mpi4py import MPI

from collectives import NeighborAverage, PushSum, graphs

SIZES = [1 << 10 << shift for shift in range(0, 18, 2)] + [96 << 20]
MIN_ROUNDS = 3
WARM_UP = 2
MAX_CALLS = 300
BOUND = 1.0


@contextlib.contextmanager
def neighbors(comm, vector):
    """D-PSGD's average by hand."""
    matrix = graphs.mixing_matrix(graphs.ring(comm.size), comm.size).astype(vector.dtype)
    # All to the right first, and then to the left, or the ranks would wait in a circle.
    shifts = (1, -1) if comm.size > 2 else (1,)
    around = [
        ((comm.rank + shift) % comm.size, (comm.rank - shift) % comm.size) for shift in shifts
    ]
    received, scaled = np.empty_like(vector), np.empty_like(vector)

    def call():
        np.multiply(vector, matrix[comm.rank, comm.rank], out=scaled)
        for destination, source in around:
            comm.Sendrecv(vector, destination, recvbuf=received, source=source)
            np.multiply(received, matrix[source, comm.rank], out=received)
            np.add(scaled, received, out=scaled)
        np.copyto(vector, scaled)

    yield call


@contextlib.contextmanager
def push_sum(comm, vector):
    """Push-sum to one neighbor by hand; all weights stay 1."""
    phases = graphs.exponential_phases(comm.size, 1)
    plan = [
        (graphs.destinations(edges, comm.rank)[0], graphs.sources(edges, comm.rank)[0])
        for edges in phases
    ]
    received = np.empty_like(vector)
    calls = 0

    def call():
        nonlocal calls
        destination, source = plan[calls % len(plan)]
        calls += 1
        np.multiply(vector, 0.5, out=vector)
        comm.Sendrecv(vector, destination, recvbuf=received, source=source)
        np.add(vector, received, out=vector)

    yield call


@contextlib.contextmanager
def opened(kind, comm, vector):
    with kind(comm, vector) as collective:
        yield lambda: collective(vector)


# {ours: (what opens it, the reference's name, what opens that)}
PAIRS = {
    "D-PSGD": (NeighborAverage, "Sendrecv, ring", neighbors),
    "push-sum": (PushSum, "Sendrecv, one", push_sum),
}


def variants():
    for name, (kind, other, by_hand) in PAIRS.items():
        yield name, lambda comm, vector, kind=kind: opened(kind, comm, vector)
        yield other, by_hand


def time_variant(comm, open_variant, vector, calls, checked):
    """Seconds per call that all ranks begin together."""
    vector[:] = comm.rank
    with open_variant(comm, vector) as call:
        if checked:
            for _ in range(40):
                call()
            near = np.allclose(vector, (comm.size - 1) / 2, atol=1e-3)
            if not comm.allreduce(near, op=MPI.LAND):
                raise ArithmeticError(f"wrong result for {vector.nbytes} bytes: {vector[:3]}")
        time_calls(comm, call, WARM_UP + calls // 10)
        return time_calls(comm, call, calls)


def measure(comm, size, rounds, seconds):
    """Return {variant: seconds per call in each round}; the variants take turns."""
    vector = np.empty(size // 4, np.float32)
    times = {name: [] for name, _ in variants()}
    share = seconds / (rounds + 1) / len(times)
    end = time.monotonic() + seconds
    for done in range(rounds + 1):
        if comm.bcast(done > MIN_ROUNDS and time.monotonic() > end):
            break
        for name, open_variant in variants():
            taken = times[name]
            calls = max(1, min(MAX_CALLS, int(share / min(taken)))) if taken else WARM_UP
            checked = not taken and size <= 1 << 20  # forty calls of long vectors take long
            taken.append(time_variant(comm, open_variant, vector, comm.bcast(calls), checked))
    return {name: taken[1:] for name, taken in times.items()}


def main():
    comm = MPI.COMM_WORLD
    arguments = parser(__doc__)
    arguments.add_argument("--max-kib", type=int, default=SIZES[-1] >> 10)
    arguments.add_argument("--rounds", type=int, default=11, help="at most (default 11)")
    arguments.add_argument("--seconds", type=float, default=10.0, help="for a size (default 10)")
    arguments = arguments.parse_args()
    rows, found = [], {}
    names = [name for name, _ in variants()]
    if comm.rank == 0:
        print(f"# {comm.size} ranks, {', '.join(str(value) for value in machine().values())}")
        print("# µs per call of the slowest rank, median of the rounds")
        print(f"{'# Size (B)':<12}" + "".join(f"{name:>16}" for name in names), flush=True)
    for size in [size for size in SIZES if size >> 10 <= arguments.max_kib]:
        times = measure(comm, size, arguments.rounds, arguments.seconds)
        if comm.rank == 0:
            medians = {name: 1e6 * median(taken) for name, taken in times.items()}
            print(f"{size:<12}" + "".join(f"{medians[name]:16.2f}" for name in names), flush=True)
            rows.append({"bytes": size, "rounds": len(times[names[0]]), "microseconds": medians})
            for name, (_, other, _) in PAIRS.items():
                found[ratio_label(size, name, other)] = ratio(times[name], times[other])
    if comm.rank == 0:
        figures = [figure(label, value, BOUND) for label, value in found.items()]
        report(arguments, "peer-latency", comm.size, rows, ratios=found, figures=figures)


if __name__ == "__main__":
    main()
