"""The blocks in which devices average vectors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from mpi4py import MPI

__all__ = ["LONGEST", "SHORTEST", "VARIABLE", "choose"]

VARIABLE = "WAGMA_CUDA_BLOCK"
# Bytes of the shortest and longest block: by default, and those that the variable may set.
SHORTEST, LONGEST = 1 << 20, 8 << 20
LEAST, MOST = 1 << 16, 1 << 30
# Blocks are longer than SHORTEST only if a vector has at least this many, for members to share.
BLOCKS = 8


def choose(comm: MPI.Intracomm, size: int) -> int:
    """Return the bytes of the longest blocks, the same on all ranks; collective.

    Each block takes several passes. Launching a short pass and noticing its end costs the host more
    than the pass costs the device, so blocks have 1 to 8 MiB unless WAGMA_CUDA_BLOCK is set.

    Args:
        comm: an mpi4py intracommunicator.
        size: bytes of the vector, the same on all ranks.

    Raises:
        ValueError: the variable is invalid, or differs between ranks; on all ranks.
    """
    given = comm.allgather(os.environ.get(VARIABLE))
    if len(set(given)) > 1:
        raise ValueError(f"{VARIABLE} differs between ranks")
    if given[0] is None:
        block = SHORTEST
        while block < LONGEST and 2 * block * BLOCKS <= size:
            block *= 2
        return block
    block = int(given[0]) if given[0].isdecimal() else 0
    if not LEAST <= block <= MOST:
        raise ValueError(
            f"{VARIABLE} is {given[0]!r}, not a number of bytes from {LEAST} to {MOST}"
        )
    return block
