"""The ways on which vectors on devices are averaged, for the parts of gpu.py."""

from __future__ import annotations

import contextlib

MIB = 1 << 20
_answers = []


def answer_of(comm):
    """Return what this job's MPI does with device memory; collective, and asked once."""
    from collectives import cuda_aware

    if not _answers:
        _answers.append(cuda_aware.ask(comm))
    return _answers[0]


def paths(comm):
    """Return {path: what to believe of MPI so that a collective takes it}."""
    from collectives.cuda_aware import Answer

    answer = answer_of(comm)
    return {"staged": Answer(False, "for comparison")} | (
        {"direct": answer} if answer.aware else {}
    )


@contextlib.contextmanager
def using(answer, block=4 * MIB):
    """Let collectives that are made in the block believe that of MPI, and copy in such blocks."""
    from collectives import device

    before = device._answer, device.BLOCK
    device._answer, device.BLOCK = answer, block
    try:
        yield
    finally:
        device._answer, device.BLOCK = before


def collective_with(answer, comm, array, *, block=4 * MIB, transport="messages", **options):
    """Make a `GroupAllreduce` that believes that of MPI, and shares memory only if told to."""
    from collectives import GroupAllreduce

    with using(answer, block):
        return GroupAllreduce(comm, array, transport=transport, **options)
