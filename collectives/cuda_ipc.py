"""Tests by trial whether the ranks of a node can use each other's device memory.

A driver refuses that between containers that do not see each other's processes, between parts of a
partitioned device (MIG), or where a rank's device is hidden from another; and MPI need not know.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

from collectives.errors import CudaError

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from mpi4py import MPI

__all__ = ["SIZE", "VARIABLE", "why_not"]

SIZE = 64 << 10  # number of bytes compared
VARIABLE = "WAGMA_CUDA_IPC"


def why_not(comm: MPI.Intracomm, device: int | None = None) -> str | None:
    """Return why these ranks cannot use each other's device memory; None if they can; collective.

    Each maps the memory of all others, and compares its content.

    Args:
        comm: an mpi4py intracommunicator of ranks of one node.
        device: this rank's; None, where there is no vector yet: ranks use the devices in turn.
    """
    from collectives.memory import device_memory
    from collectives.memory.plain_device import PlainDevice

    exported, handle = None, None
    error = f"{VARIABLE} is 0" if os.environ.get(VARIABLE) == "0" else None
    try:
        if error is None:
            device = PlainDevice(comm.rank).ordinal if device is None else device
            exported = device_memory.export(device, _content(comm.rank))
            handle = exported.handle
    except CudaError as caught:
        error = str(caught)
    handles = comm.allgather((handle, error))
    error = next((error for _, error in handles if error), None)
    if error is None and comm.size == 1:
        error = "this rank is the only one of its node"
    if error is None:
        assert device is not None
        error = _compare(comm, device, [handle for handle, _ in handles])
    # No rank frees its memory before all have unmapped it.
    return next(filter(None, comm.allgather(error)), None)


def _compare(comm: MPI.Intracomm, device: int, handles: list[bytes]) -> str | None:
    from collectives.memory import device_memory

    for rank, handle in enumerate(handles):
        try:
            if rank != comm.rank and not device_memory.holds(device, handle, _content(rank)):
                return "device memory mapped from another process has different content"
        except CudaError as error:
            return str(error)
    return None


def _content(rank: int) -> bytes:
    return random.Random(rank).randbytes(SIZE)
