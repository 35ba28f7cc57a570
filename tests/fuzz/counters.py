"""How far each rank is, for the others to read at any time: what bounds are checked against."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI


class Counters:
    """One number of each rank, which may only grow, in memory that all ranks of a node share.

    Args:
        comm: ranks of one node.
    """

    def __init__(self, comm):
        self.rank = comm.rank
        size = np.dtype(np.int64).itemsize
        self._window = MPI.Win.Allocate_shared(size, size, comm=comm)
        self._numbers = [
            np.frombuffer(self._window.Shared_query(rank)[0], np.int64, 1)
            for rank in range(comm.size)
        ]
        self._numbers[comm.rank][0] = 0
        comm.Barrier()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._numbers = []
        self._window.Free()

    def set(self, number):
        """Say how far this rank is."""
        self._numbers[self.rank][0] = number

    def read(self):
        """Return how far each rank was at least."""
        return np.array([number[0] for number in self._numbers])
