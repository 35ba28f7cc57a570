"""Tests by trial whether the ranks of a node can use each other's device memory.

The driver refuses it between containers that do not see each other's processes, between parts of a
partitioned device (MIG), and to a process that may not open the other rank's device (cgroups);
CUDA_VISIBLE_DEVICES alone does not prevent it. It does not need a CUDA-aware MPI.
"""

from __future__ import annotations

import os
import random
from array import array
from typing import TYPE_CHECKING

from collectives.errors import CudaError

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from mpi4py import MPI

    from collectives.memory import device_memory

__all__ = ["SIZE", "VARIABLE", "why_not"]

SIZE = 64 << 10  # number of bytes compared
WRITTEN = 1024  # number of bytes after these that each rank's kernel writes on every other rank
VARIABLE = "WAGMA_CUDA_IPC"


def why_not(comm: MPI.Comm, device: int | None = None) -> str | None:
    """Return why these ranks cannot use each other's device memory; None if they can; collective.

    Each rank maps the memory of all others, compares its content, and has a kernel write to it, as
    averages do.

    Args:
        comm: an mpi4py intracommunicator of ranks of one node.
        device: this rank's device; None: there is no vector yet, and ranks use devices in turn.
    """
    from collectives.memory import device_memory
    from collectives.memory.plain_device import PlainDevice

    exported, handle = None, None
    error = f"{VARIABLE} is 0" if os.environ.get(VARIABLE) == "0" else None
    try:
        if error is None:
            device = PlainDevice(comm.rank).ordinal if device is None else device
            empty = bytes(WRITTEN * comm.size)
            exported = device_memory.export(device, _content(comm.rank) + empty)
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
    # No rank frees or reads its memory before all have unmapped it.
    error = next(filter(None, comm.allgather(error)), None)
    if error is None:
        assert device is not None
        error = next(filter(None, comm.allgather(_check_written(comm, device, exported))), None)
    return error


def _compare(comm: MPI.Comm, device: int, handles: list[bytes]) -> str | None:
    from collectives.memory import device_memory

    for rank, handle in enumerate(handles):
        try:
            if rank == comm.rank:
                continue
            if not device_memory.holds(device, handle, _content(rank)):
                return "device memory mapped from another process has different content"
            offset = SIZE + WRITTEN * comm.rank
            device_memory.write_by_kernel(device, handle, offset, _numbers(comm.rank, rank))
        except CudaError as error:
            return str(error)
    return None


def _check_written(
    comm: MPI.Comm, device: int, exported: device_memory.ExportedMemory | None
) -> str | None:
    from collectives.memory import device_memory

    assert exported is not None
    try:
        content = device_memory.content_of(exported, device, SIZE + WRITTEN * comm.size)
    except CudaError as error:
        return str(error)
    for rank in range(comm.size):
        begin = SIZE + WRITTEN * rank
        there = content[begin : begin + WRITTEN]
        if rank != comm.rank and there != _numbers(rank, comm.rank):
            return "what a kernel of another process has written to device memory is not there"
    return None


def _numbers(writer: int, owner: int) -> bytes:
    """Return the float32 numbers that one rank writes to the memory of another."""
    return array("f", [1 + writer + owner / 1024] * (WRITTEN // 4)).tobytes()


def _content(rank: int) -> bytes:
    return random.Random(rank).randbytes(SIZE)
