"""Whether the ranks of a node can use each other's memory on devices, by trying it.

A driver refuses it between containers that see each other's processes not, between parts of a
device that is partitioned (MIG), or where a rank's device is hidden from another; and no MPI has to
know of it.
"""

from __future__ import annotations

import os
import random

from collectives.errors import CudaError

__all__ = ["SIZE", "VARIABLE", "ask", "why_not"]

SIZE = 64 << 10  # bytes that are compared
VARIABLE = "WAGMA_CUDA_IPC"


def ask(comm) -> str | None:
    """Return why ranks of one node cannot share device memory; None if they can; collective.

    For what has no vector yet: ranks have the devices in turn.

    Args:
        comm: an mpi4py intracommunicator of ranks of one node.
    """
    from collectives.memory.plain_device import PlainDevice

    device, error = 0, None
    try:
        device = PlainDevice(comm.rank).ordinal
    except CudaError as caught:
        error = str(caught)
    error = next(filter(None, comm.allgather(error)), None)
    if error is None and comm.size == 1:
        error = "there is one rank on this node"
    return error or why_not(comm, device)


def why_not(comm, device: int) -> str | None:
    """Return why these ranks cannot use each other's device memory; None if they can; collective.

    Each maps that of all others, and compares what is in it.

    Args:
        comm: an mpi4py intracommunicator of ranks of one node.
        device: this rank's, which has a context.
    """
    from collectives.memory import device_memory

    exported, handle = None, None
    error = f"{VARIABLE} is 0" if os.environ.get(VARIABLE) == "0" else None
    try:
        if error is None:
            exported = device_memory.export(device, _content(comm.rank))
            handle = exported.handle
    except CudaError as caught:
        error = str(caught)
    handles = comm.allgather((handle, error))
    error = next((error for _, error in handles if error), None)
    if error is None:
        error = _compare(comm, device, [handle for handle, _ in handles])
    # No rank frees its memory before all have let go of it.
    return next(filter(None, comm.allgather(error)), None)


def _compare(comm, device, handles) -> str | None:
    from collectives.memory import device_memory

    for rank, handle in enumerate(handles):
        try:
            if rank != comm.rank and not device_memory.holds(device, handle, _content(rank)):
                return "device memory of another process has other bytes than that process sees"
        except CudaError as error:
            return str(error)
    return None


def _content(rank: int) -> bytes:
    return random.Random(rank).randbytes(SIZE)
