"""The ranks of one node, and the memory that they share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from collectives import cuda_ipc, survival, witness
from collectives.agreement import name_ranks
from collectives.errors import CudaError
from collectives.memory import other_processes

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from mpi4py import MPI

__all__ = ["Node"]


class Node:
    """The ranks of a communicator that are on this rank's node; its construction is collective.

    Attributes:
        ranks: their numbers in the communicator given, sorted.
        cores_per_rank: how many cores they may use, for each of them.
        processes: their processes, by rank, as far as known.
        elsewhere: a text that says which ranks are on one node; None if all are on one.
    """

    def __init__(self, comm: MPI.Intracomm):
        from mpi4py import MPI

        self._comm = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        survival.note(self._comm)
        mine = comm.rank, os.sched_getaffinity(0), witness.identity()
        everyone = self._comm.allgather(mine)
        self.ranks = [rank for rank, _, _ in everyone]
        self.processes = {rank: process for rank, _, process in everyone if process is not None}
        cores = len(set().union(*(cores for _, cores, _ in everyone)))
        self.cores_per_rank = cores / len(self.ranks)
        self.elsewhere = None
        if len(self.ranks) < comm.size:
            here = name_ranks(self.ranks)
            self.elsewhere = f"of the {comm.size} ranks, only {here} are on one node"

    def share(self, memory: Any) -> str | None:
        """Let a collective's ranks of this node share memory; return why not, or None; collective.

        Args:
            memory: this rank's, a `NodeMemory` or `NodeQueues`.
        """
        shortest = other_processes.shortest
        copies = shortest is not None and memory.longest >= shortest
        offer = other_processes.offer() if copies else None
        handles = self._comm.allgather((memory.handles, memory.missing, offer))
        error = next((error for _, error, _ in handles if error), None)
        if error is None:
            try:
                memory.map({rank: given[0] for rank, given in zip(self.ranks, handles)})
            except (OSError, CudaError) as caught:
                error = str(caught)
        copies = copies and all(other_processes.may_access(offer) for _, _, offer in handles)
        answers = self._comm.allgather((error, copies))
        error = next(filter(None, (error for error, _ in answers)), None)
        if error is None:
            memory.use(all(copies for _, copies in answers))
        else:
            memory.unmap()
            self._comm.Barrier()
        return error

    def why_not_mapped(self, device: int) -> str | None:
        """Return why the ranks cannot use each other's device memory, or None; collective.

        Args:
            device: number of this rank's device.
        """
        return cuda_ipc.why_not(self._comm, device)

    def free(self) -> None:
        """Free the node's communicator; collective."""
        self._comm.Free()
