"""What a process holds does not grow with its steps: memory, descriptors, shared memory."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path
from typing import NamedTuple

import pytest
from methods import backward, each_method, make_model

pytestmark = [pytest.mark.mpi, pytest.mark.extra]

WARMING = 200
# Growth that is noise: bytes that allocators and queues of messages keep, and mappings.
NOISE = 4 << 20
MAPPINGS = 16
STEPS = 500  # test_flat_memory.py has many more


class Held(NamedTuple):
    """What this process has.

    Args:
        private, shared: bytes of memory in use.
        mappings: number of mappings, of shared memory as well.
        descriptors: number of open ones.
    """

    private: int
    shared: int
    mappings: int
    descriptors: int


def held():
    gc.collect()
    here = Path("/proc/self")
    resident, shared = map(int, (here / "statm").read_text().split()[1:3])
    page = resource.getpagesize()
    return Held(
        private=(resident - shared) * page,
        shared=shared * page,
        mappings=len((here / "maps").read_text().splitlines()),
        descriptors=len(os.listdir(here / "fd")),
    )


@pytest.mark.timeout(300)
@each_method
def test_nothing_grows_with_the_steps(comm, method):
    model = make_model(comm.rank)
    backward(model, comm.rank, 0)  # one gradient for all steps: only those of the optimizer count
    with method.training(model, comm) as (optimizer, averager):
        with averager.join():
            for _ in range(WARMING):
                optimizer.step()
        comm.Barrier()
        before = held()
        with averager.join():
            for _ in range(STEPS):
                optimizer.step()
        comm.Barrier()
        after = held()
    grown = Held(*(b - a for a, b in zip(before, after, strict=True)))
    assert grown.private < NOISE and grown.shared < NOISE, grown
    assert grown.mappings < MAPPINGS and grown.descriptors == 0, grown
