"""The models that ranks published last, where other ranks of the node can read them afterwards."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI

LINE = 64  # bytes


class LastModels:
    """Two copies of each rank's vectors, of which the newer one is whole whenever the rank dies.

    The ranks of a node map each other's copies, so that these outlive their rank. The memory has no
    name that could be left behind. Where a system has no such memory, a rank has its own only.

    Args:
        comm: the ranks' communicator; construction is collective.
        memory: this rank's vectors, 1-D tensors, of the same lengths and dtypes on all ranks.
    """

    def __init__(self, comm: MPI.Intracomm, memory: list[torch.Tensor]):
        from mpi4py import MPI

        self._like = [torch.empty(0, dtype=vector.dtype) for vector in memory]
        self._lengths = [vector.numel() for vector in memory]
        self._rank = comm.rank
        self._copies: dict[int, _Copies] = {}
        descriptor = -1
        with suppress(AttributeError, OSError):  # memfd_create is Linux's
            descriptor = os.memfd_create("wagma-last-model")
            os.ftruncate(descriptor, self._size)
        node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        handles = node.allgather((comm.rank, os.getpid(), descriptor))
        for rank, process, handle in handles:
            if rank != comm.rank and handle >= 0:
                with suppress(OSError):  # another namespace, or another user's
                    opened = os.open(f"/proc/{process}/fd/{handle}", os.O_RDWR)
                    self._add(rank, opened)
        node.Barrier()  # all have opened this rank's
        node.Free()
        self._add(comm.rank, descriptor)

    @property
    def _size(self) -> int:
        """The bytes of a rank's memory: a line, then twice a line and the vectors."""
        each = zip(self._like, self._lengths, strict=True)
        return LINE + 2 * (LINE + sum(whole_lines(n * like.itemsize) for like, n in each))

    def _add(self, rank: int, descriptor: int) -> None:
        """Map a rank's memory; −1: of this process alone."""
        memory = mmap.mmap(descriptor, self._size)
        if descriptor >= 0:
            os.close(descriptor)
        self._copies[rank] = _Copies(memory, self._like, self._lengths)

    def publish(self, memory: list[torch.Tensor], step: int) -> None:
        """Copy this rank's vectors, as they are after this number of steps."""
        self._copies[self._rank].publish(memory, step)

    def of(self, rank: int) -> tuple[int, list[torch.Tensor]] | None:
        """Return the steps and the vectors that a rank published last; None: not known here."""
        copies = self._copies.get(rank)
        return None if copies is None else copies.last()

    @property
    def own(self) -> list[torch.Tensor]:
        """The vectors that this rank published last."""
        last = self.of(self._rank)
        assert last is not None, "nothing has been published"
        return last[1]


class _Copies:
    """A rank's two copies in memory: the first word says which is the newer one, from 1."""

    def __init__(self, memory: mmap.mmap, like: list[torch.Tensor], lengths: list[int]):
        self._newer = np.frombuffer(memory, np.int64, 1)
        self._steps, self._vectors = [], []
        start = LINE
        for _ in range(2):
            self._steps.append(np.frombuffer(memory, np.int64, 1, start))
            start += LINE
            vectors = []
            for each, length in zip(like, lengths, strict=True):
                size = length * each.itemsize
                part = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
                vectors.append(part.view(each.dtype))
                start += whole_lines(size)
            self._vectors.append(vectors)

    @torch.no_grad()
    def publish(self, memory: list[torch.Tensor], step: int) -> None:
        older = int(self._newer[0]) % 2
        for copy, vector in zip(self._vectors[older], memory, strict=True):
            copy.copy_(vector)
        self._steps[older][0] = step
        self._newer[0] = older + 1

    def last(self) -> tuple[int, list[torch.Tensor]] | None:
        newer = int(self._newer[0]) - 1
        return None if newer < 0 else (int(self._steps[newer][0]), self._vectors[newer])


def whole_lines(size: int) -> int:
    """Return a number of bytes, rounded up to lines; at least one."""
    return max(-(-size // LINE), 1) * LINE
