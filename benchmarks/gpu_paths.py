"""The paths by which vectors on devices are averaged, for the parts of gpu.py."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

MIB = 1 << 20
_answers = []


class Way(NamedTuple):
    """The assumption about MPI and the transport with which a path is taken."""

    answer: object = None
    transport: str = "messages"


def answer_of(comm):
    """Return whether this job's MPI takes device memory; collective, determined once."""
    from collectives import cuda_aware

    if not _answers:
        _answers.append(cuda_aware.ask(comm))
    return _answers[0]


def staged_way():
    """Return the `Way` by the host, which always exists."""
    from collectives.cuda_aware import Answer

    return Way(Answer(False, "for comparison"))


def paths(comm, device):
    """Return {path: its `Way`} of the paths that exist here; collective."""
    answer = answer_of(comm)
    ways = {"staged": staged_way()}
    if answer.aware:
        ways["direct"] = Way(answer)
    if why_not_mapped(comm, device) is None:
        ways["direct, shared"] = staged_way()._replace(transport="shared")
    return ways


def why_not_mapped(comm, device):
    """Return why these ranks cannot all use each other's device memory, or None; collective."""
    from mpi4py import MPI

    from collectives import cuda_ipc

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    reason = cuda_ipc.why_not(node, device.ordinal)
    if reason is None and node.size < comm.size:
        reason = "the ranks are on several nodes"
    node.Free()
    return comm.bcast(reason)


@contextlib.contextmanager
def using(answer, block=4 * MIB):
    """Let collectives made in the block assume this answer of MPI, and copy in such blocks."""
    from collectives import device

    before = device._answer, device.BLOCK
    device._answer, device.BLOCK = answer, block
    try:
        yield
    finally:
        device._answer, device.BLOCK = before


def collective_with(way, comm, array, *, block=4 * MIB, **options):
    """Make a `GroupAllreduce` that takes this path."""
    from collectives import GroupAllreduce

    with using(way.answer, block):
        return GroupAllreduce(comm, array, transport=way.transport, **options)
