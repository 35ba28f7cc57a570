"""After 100,000 steps of any method a process holds what it held: not 16 bytes a step more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from methods import METHODS

pytestmark = [pytest.mark.launch, pytest.mark.extra, pytest.mark.timeout(900)]

STEPS, WARMING = 100_000, 5_000
BOUND = 16 * STEPS  # bytes

JOB = f"""
import ctypes, gc, json, os, resource, sys
from pathlib import Path

sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from methods import METHODS, backward, make_model
from mpi4py import MPI

torch.set_num_threads(1)
comm, name, leaks = MPI.COMM_WORLD, sys.argv[1], sys.argv[2:] == ["leak"]
leaked = []


def held():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps of what was freed is no leak
    here = Path("/proc/self")
    mapped = [line.split()[0] for line in (here / "maps").open() if "/dev/shm/" in line]
    return {{
        "resident": int((here / "statm").read_text().split()[1]) * resource.getpagesize(),
        "descriptors": len(os.listdir(here / "fd")),
        "shared mappings": len(mapped),
        "shared memory": sum(
            int(last, 16) - int(first, 16) for first, last in (each.split("-") for each in mapped)
        ),
    }}


def run(averager, steps):
    optimizer = averager.optimizers.given[0]
    with averager.join():
        for step in range(steps):
            optimizer.step()
            if leaks:
                leaked.append(float(step))  # 24 bytes, and 8 for its place
    comm.Barrier()
    return held()


model = make_model(comm.rank, width=2)
backward(model, comm.rank, 0)  # one gradient for all steps: only those of the optimizer count
with METHODS[name].make(model, comm) as averager:
    before, after = run(averager, {WARMING}), run(averager, {STEPS})
everyone = comm.gather({{key: after[key] - before[key] for key in before}})
if comm.rank == 0:
    print(json.dumps(everyone))
"""


@pytest.fixture
def grown(mpirun, tmp_path):
    """Return a function that returns by how much what each of two ranks held has grown."""

    def run(*arguments):
        script = tmp_path / "job.py"
        script.write_text(JOB)
        ended = mpirun(2, script, *arguments, timeout=600).check()
        everyone = json.loads(ended.stdout)
        print(*arguments, everyone)
        return everyone

    return run


@pytest.mark.parametrize("name", METHODS)
def test_nothing_grows_with_the_steps(grown, name):
    for of_rank in grown(name):
        assert of_rank.pop("resident") < BOUND, of_rank
        assert not any(of_rank.values()), of_rank


def test_a_leak_of_32_bytes_a_step_is_found(grown):
    for of_rank in grown("local-sgd", "leak"):
        assert of_rank["resident"] > BOUND, of_rank
