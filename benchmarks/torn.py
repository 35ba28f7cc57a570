"""100,000 calls while other ranks activate at random: is a vector ever torn, or `timely` wrong?

    mpiexec -n 4 python benchmarks/torn.py

Part r of the vector is rank r's contribution: the number of its call. Every call's result is
examined: each part must be constant (not torn), and this rank's own part must be this call's number
if and only if the call was timely.
"""

import random
import time

import numpy as np
from common import TRANSPORTS, figure, parser, report
from mpi4py import MPI

from collectives import GroupAllreduce

WIDTH = 32


def count(comm, calls, transport):
    """Return this rank's numbers of calls, of torn vectors, of wrong flags and of timely calls."""
    chance = random.Random(comm.rank)
    own = np.zeros((comm.size, WIDTH))
    torn = wrong = timely = 0
    with GroupAllreduce(
        comm, own.ravel(), group_size=comm.size, sync_period=10**9, late="paper", **transport
    ) as average:
        for t in range(calls):
            own[comm.rank] = t + 1
            vector = own.flatten()
            if chance.random() < 0.1:
                time.sleep(chance.random() * 2e-4)
            result = average(vector)
            sums = vector.reshape(comm.size, WIDTH)
            sums = sums * comm.size if result.timely else sums * (comm.size + 1) - own
            sums = np.rint(sums)
            torn += not (sums == sums[:, :1]).all()
            wrong += (sums[comm.rank, 0] == t + 1) != result.timely
            timely += result.timely
    return calls, torn, wrong, timely


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--calls", type=int, default=100_000, help="of all ranks together")
    arguments = arguments.parse_args()
    comm = MPI.COMM_WORLD
    results, figures = {}, []
    for name, transport in TRANSPORTS.items():
        begin = time.perf_counter()
        counts = count(comm, arguments.calls // comm.size, transport)
        seconds = time.perf_counter() - begin
        calls, torn, wrong, timely = (comm.allreduce(int(each)) for each in counts)
        if comm.rank == 0:
            share = f"{timely / calls:.2f} timely"
            print(f"# {comm.size} ranks, {name}: {calls} calls in {seconds:.1f} s, {share}")
            results[name] = {"calls": calls, "torn": torn, "wrong": wrong, "timely": timely}
            figures.append(figure(f"{name}: torn vectors", torn, 0))
            figures.append(figure(f"{name}: wrong timely flags", wrong, 0))
    if comm.rank == 0:
        report(arguments, "torn", comm.size, results, figures=figures)


if __name__ == "__main__":
    main()
