"""The blocks in which devices average vectors."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from collectives.agreement import raise_collectively
from collectives.errors import CudaError

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from mpi4py import MPI

__all__ = ["LONGEST", "SHORTEST", "VARIABLE", "choose"]

VARIABLE = "WAGMA_CUDA_BLOCK"
# Bytes of the shortest and longest block that are chosen, and that may be given.
SHORTEST, LONGEST = 1 << 20, 8 << 20
LEAST, MOST = 1 << 16, 1 << 30


def choose(comm: MPI.Intracomm, size: int, measure: Callable[[], int]) -> int:
    """Return the bytes of the longest blocks, the same on all ranks; collective.

    Each block takes several passes, whose launches should take the host no longer than the passes
    take the device: so a block is as long as what a device reads during a launch, on the rank where
    that is most, from 1 to 8 MiB, unless WAGMA_CUDA_BLOCK says how long.

    Args:
        comm: an mpi4py intracommunicator.
        size: bytes of the vector, the same on all ranks.
        measure: returns how many bytes this rank's device reads while the host queues one pass.

    Raises:
        ValueError: the variable is invalid, or differs between ranks; on all ranks.
        CudaError: a device fails; on all ranks.
    """
    given = comm.allgather(os.environ.get(VARIABLE))
    error: Exception | None = None
    block, measured = SHORTEST, 0
    if len(set(given)) > 1:
        error = ValueError(f"{VARIABLE} differs between ranks")
    elif given[0] is not None:
        try:
            block = int(given[0])
        except ValueError:
            block = 0
        if not LEAST <= block <= MOST:
            error = ValueError(
                f"{VARIABLE} is {given[0]!r}, not a number of bytes from {LEAST} to {MOST}"
            )
    elif size >= 2 * LONGEST:
        try:
            measured = measure()
        except CudaError as caught:
            error = caught
    raise_collectively(comm, error)
    measured = max(comm.allgather(measured))
    while given[0] is None and block < min(measured, LONGEST):
        block *= 2
    return block
