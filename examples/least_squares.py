"""Solve a least-squares problem by gradient descent on numpy arrays: collectives without torch.

    OMP_NUM_THREADS=1 mpiexec -n 4 python least_squares.py

Every rank has rows of its own. After each step of its own it averages with a group of ranks; one
that is late is not waited for, but in every tenth call.
"""

import argparse
import random
import time

import numpy as np
from mpi4py import MPI

from collectives import GroupAllreduce

ROWS, COLUMNS = 200, 50


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="of each rank (default: 200)")
    steps = parser.parse_args().steps
    comm = MPI.COMM_WORLD

    solution = np.random.default_rng(0).normal(size=COLUMNS)
    rows = np.random.default_rng((1, comm.rank)).normal(size=(ROWS, COLUMNS))
    values = rows @ solution
    delays = random.Random(comm.rank)

    x = np.zeros(COLUMNS)
    timely = 0
    with GroupAllreduce(comm, x, sync_period=10) as allreduce:
        for _ in range(steps):
            x -= 0.1 * rows.T @ (rows @ x - values) / ROWS
            if delays.random() < 0.1:  # a straggler
                time.sleep(0.02)
            result = allreduce(x)  # in place
            timely += result.timely
        allreduce.synchronize(x)
        timely, solutions = comm.gather(timely), comm.gather(x)
    if comm.rank == 0:
        print(f"calls of {steps} in which each rank was in time:", *timely)
        print("all ranks have the same solution:", all((s == x).all() for s in solutions))
        before, after = np.linalg.norm(solution), np.linalg.norm(x - solution)
        print(f"distance from the solution: {before:.1e} before, {after:.1e} after {steps} steps")
        print("expected on 4 ranks with default arguments: below 1e-3")


if __name__ == "__main__":
    main()
