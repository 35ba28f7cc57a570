"""Arrays that collectives average where they are, in memory that the ranks of a node share.

Averages of other arrays in shared memory copy them in and out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives import process, survival
from collectives.agreement import raise_collectively
from collectives.meeting import meet
from collectives.settings import limits

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from mpi4py import MPI

__all__ = ["empty", "empty_like"]

ALIGNMENT = 64  # bytes


def empty(comm: MPI.Intracomm, shape: int | Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Return a new array, filled with zeros, in memory that the ranks of each node share.

    Collectives of these ranks, such as `GroupAllreduce`, recognize it by its address, or a part of
    it, and average it where it is. It is an ordinary array otherwise: a forked process changes a
    copy of its own. It is freed once no rank has its array any more, at the latest when a rank then
    makes another one or closes a collective.

    Where the system provides no such memory, on all ranks of a node alike, the array is in memory
    of this process's own, and averages copy it.

    Args:
        comm: communicator of all ranks that average it; this is collective.
        shape: of the array, which may differ between ranks.
        dtype: its numpy dtype, such as float16, float32, float64, or bfloat16 of ml_dtypes.

    Raises:
        TypeError, ValueError: there are no arrays of this shape or dtype in shared memory; raised
            on all ranks.
        RankFailedError: another rank has failed in a collective.
    """
    meet(comm, "empty()", *limits({}))
    return new(comm, shape, dtype)


def new(comm: MPI.Intracomm, shape: int | Sequence[int], dtype: Any) -> np.ndarray:
    """Return an array as `empty` does; its first communication is that of `raise_collectively`."""
    return _new(comm, lambda: [_Like(shape, dtype)])[0]


def empty_like(comm: MPI.Intracomm, arrays: Any) -> Any:
    """Return new arrays with the shapes and dtypes of these; see `empty`.

    Args:
        comm: communicator of all ranks that average them; this is collective.
        arrays: an array or a list of arrays.

    Returns:
        An array or a list of arrays, filled with zeros.

    Raises:
        TypeError, ValueError, RankFailedError: as `empty` does.
    """
    meet(comm, "empty_like()", *limits({}))
    several = isinstance(arrays, (list, tuple))
    like = arrays if several else [arrays]
    made = _new(comm, lambda: [_Like(array.shape, array.dtype) for array in like])
    return made if several else made[0]


def _new(comm: MPI.Intracomm, describe: Callable[[], list[_Like]]) -> list[np.ndarray]:
    described: list[_Like] = []
    error = None
    try:
        described = describe()
    except (AttributeError, TypeError, ValueError) as caught:
        error = caught if not isinstance(caught, AttributeError) else TypeError(str(caught))
    raise_collectively(comm, error)
    buffers = _shared(comm, [each.bytes for each in described])
    if buffers is None:
        return [np.zeros(each.shape, each.dtype) for each in described]
    return [
        np.frombuffer(buffer, each.dtype).reshape(each.shape)
        for buffer, each in zip(buffers, described, strict=True)
    ]


class _Like:
    """A shape, a dtype, and how many bytes an array of them has."""

    def __init__(self, shape: int | Sequence[int], dtype: Any):
        self.dtype = np.dtype(dtype)
        if self.dtype.hasobject:
            raise TypeError(f"an array of dtype {self.dtype} cannot be in shared memory")
        self.shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        if any(length < 0 for length in self.shape):
            raise ValueError(f"an array of shape {self.shape} has a negative length")
        self.bytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def _shared(comm: MPI.Intracomm, sizes: list[int]) -> list[Any] | None:
    """Return buffers of these sizes in this rank's window; None if a rank has none; collective."""
    if process.place_of(comm) is not process:
        return None  # simulated ranks are in one process
    from mpi4py import MPI

    from collectives.memory import windows

    windows.unmap_released()
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    survival.note(node)
    family = None
    try:
        with contextlib.suppress(AttributeError, OSError, MemoryError):  # memfd_create is Linux's
            family = windows.Family(max(end, ALIGNMENT))
        number = int.from_bytes(os.urandom(7), "little") + 2  # lower ones have other meanings
        answers = node.allgather((family and family.handle, number))
        handles = [handle for handle, _ in answers if handle is not None]
        if family is None or len(handles) < node.size:
            return None
        mapped = True
        try:
            family.map(answers[0][1], handles)
        except (OSError, MemoryError):
            mapped = False
        if node.allreduce(mapped, op=MPI.LAND):
            return [family.window(start, size) for start, size in zip(starts, sizes, strict=True)]
        family.unmap()
        return None
    finally:
        node.Free()
