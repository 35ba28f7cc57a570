"""Latency of calls in which ranks send each other vectors, beside MPI_Sendrecv and numpy.

    mpiexec -n 4 python benchmarks/peer_latency.py

Vectors of float32 of 1 KiB to 96 MiB, all ranks of one node, which call together: D-PSGD's average
of a ring's neighbors (NeighborAverage), Hop's of the same (QueuedNeighborAverage), and push-sum to
one neighbor (PushSum). The reference does the same to a vector by hand: MPI_Sendrecv with the same
neighbors, and numpy's multiplications and additions in place. It publishes no change, and serves no
late rank.

The variants take turns in every round, each collective being the only one open then, after calls
to warm up; the first round is discarded, and all results are checked in it. A time is that of
the slowest rank, per call of several in a row. The table has medians over the rounds, and a ratio
is the median of the ratios round by round. A size ends after --rounds rounds or --seconds seconds,
whichever is first, but not before three rounds more.
"""

import contextlib
import functools

import numpy as np
from common import compare_by_size, time_warm
from mpi4py import MPI

from collectives import NeighborAverage, PushSum, QueuedNeighborAverage, graphs

SIZES = [1 << 10 << shift for shift in range(0, 18, 2)] + [96 << 20]
BOUND = 1.0


@contextlib.contextmanager
def neighbors(comm, vector):
    """Yield a function that makes D-PSGD's average by hand."""
    matrix = graphs.mixing_matrix(graphs.ring(comm.size), comm.size).astype(vector.dtype)
    # All send to the right first, and then to the left, or the ranks would wait in a cycle.
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
    """Yield a function that makes push-sum to one neighbor by hand; all weights stay 1."""
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


# {variant: (function that opens it, its reference's name or None)}
VARIANTS = {
    "D-PSGD": (functools.partial(opened, NeighborAverage), "Sendrecv, ring"),
    "Sendrecv, ring": (neighbors, None),
    "Hop": (
        functools.partial(opened, functools.partial(QueuedNeighborAverage, graph="ring")),
        "Sendrecv, ring",
    ),
    "push-sum": (functools.partial(opened, PushSum), "Sendrecv, one"),
    "Sendrecv, one": (push_sum, None),
}


def check(comm, call, vector):
    """Raise if calls do not make the vectors converge."""
    for _ in range(40):
        call()
    near = np.allclose(vector, (comm.size - 1) / 2, atol=1e-3)
    if not comm.allreduce(near, op=MPI.LAND):
        raise ArithmeticError(f"wrong result for {vector.nbytes} bytes: {vector[:3]}")


def main():
    comm = MPI.COMM_WORLD

    def timed(name, vector, calls, first):
        open_variant, _ = VARIANTS[name]
        vector[:] = comm.rank
        with open_variant(comm, vector) as call:
            if first and vector.nbytes <= 1 << 20:  # its forty calls take long with long vectors
                check(comm, call, vector)
            return time_warm(comm, call, calls)

    references = {name: reference for name, (_, reference) in VARIANTS.items()}
    compare_by_size(comm, __doc__, "peer-latency", SIZES, references, timed, BOUND)


if __name__ == "__main__":
    main()
