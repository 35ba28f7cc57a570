"""Bugs planted into the mirror of vectors on devices: the stand-in for the driver catches each."""

import planted
import pytest
import stand_in

pytestmark = [pytest.mark.extra, pytest.mark.launch]

JOB = """
import signal
import sys

import numpy as np

sys.path.insert(0, {tests!r})
import planted

planted.load({module!r})

import stand_in
from mpi4py import MPI

import collectives.device
from collectives import GroupAllreduce, NeighborAverage

if {direct}:
    opened = stand_in.opened_memory()
    opened.__enter__()

collectives.device.BLOCK = 8192

comm = MPI.COMM_WORLD
device = stand_in.Device()
# Nothing orders these two vectors' streams but the collective.
vectors = []
for _ in range(2):
    stream = device.create_stream()
    values = [np.full(length, float(comm.rank)) for length in (90_000, 5000)]
    vectors.append((stream, [device.array(array, stream) for array in values]))


class Interrupted(Exception):
    pass


def interrupt(*_):
    raise Interrupted


def train(vector, stream, t):
    for array in vector:
        device.write(array, np.full(array.size, float(comm.rank + t)), stream)


with GroupAllreduce(comm, vectors[0][1], wait="group", group_size=2) as average:
    for t in range(8):
        stream, vector = vectors[t // 2 % 2]
        train(vector, stream, t)
        average(vector) if t % 3 else average.start(vector).wait()
    signal.signal(signal.SIGALRM, interrupt)
    with device.holding(stream):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            average(vector)
            raise AssertionError("not interrupted")
        except Interrupted:
            pass
        train(vector, stream, 0)
    average.synchronize(vector)
    assert all((array.get() == 0.5).all() for array in vector)

if {peers}:
    x = device.array(np.full(400_000, float(comm.rank)), stream)  # of several blocks
    with NeighborAverage(comm, x) as average:
        for t in range(4):
            train([x], stream, t)
            average(x)
"""


@pytest.fixture
def job(mpirun_text):
    path = stand_in.require()

    def run(bug, module):
        planted_here = planted.environment(bug, module)
        direct = int(module == "in_place")
        env = {"WAGMA_CUDA_LIBRARY": path, "STAND_IN_DELAY": "300", **planted_here}
        env |= {"WAGMA_CUDA_AWARE": str(direct)}
        tests = str(planted.ROOT / "tests")
        peers = module in ("mirror", "peer_vectors")
        text = JOB.format(tests=tests, module=module, direct=direct, peers=peers)
        return mpirun_text(2, text, "", env=env)

    return run


MODULES = ("handover", "mirror", "peer_vectors", "in_place")
CASES = planted.cases(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_no_bug_is_found_where_there_is_none(job, module):
    assert job(None, module).check().stderr == ""


@pytest.mark.parametrize(("module", "bug"), CASES)
def test_a_planted_bug_is_found(job, module, bug):
    planted.check_found(job(bug, module), module, bug)
