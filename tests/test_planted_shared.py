"""Bugs planted into device memory that ranks share: the stand-in for the driver catches each."""

import planted
import pytest
import stand_in

pytestmark = [pytest.mark.extra, pytest.mark.launch]

JOB = """
import contextlib
import random
import signal
import sys
import time

import numpy as np

sys.path.insert(0, {tests!r})
import planted

from mpi4py import MPI

planted.load({module!r})

import stand_in

from collectives import GroupAllreduce

comm = MPI.COMM_WORLD
device = stand_in.Device()
stream = device.create_stream()
vector = device.array(np.zeros(1_300_000), stream)  # ten blocks
unequal = random.Random(comm.rank)


class Interrupted(Exception):
    pass


def interrupt(*_):
    raise Interrupted


signal.signal(signal.SIGALRM, interrupt)
for wait in ("nobody", "group"):
    with GroupAllreduce(comm, vector, group_size=2, sync_period=7, wait=wait) as average:
        assert (average.path, average.transport) == ("direct", "shared"), average.path_reason
        for t in range(10):
            device.write(vector, np.full(vector.size, 1.0), stream)
            device.synchronize(stream)
            if wait == "group" and t % 4 == 1:  # what rank 1 then changes its device adds
                with contextlib.suppress(Interrupted):
                    if comm.rank == 1:
                        signal.setitimer(signal.ITIMER_REAL, 0.1)
                    else:
                        time.sleep(0.2)
                    average(vector)
                    signal.setitimer(signal.ITIMER_REAL, 0)
            else:
                time.sleep(unequal.choice([0, 0, 0.003]))
                average(vector)
        average.synchronize(vector)
"""
MODULES = ("shared", "memory", "ports")
CASES = planted.cases(MODULES)


@pytest.fixture
def job(mpirun_text):
    path = stand_in.require()

    def run(bug, module):
        env = {"WAGMA_CUDA_LIBRARY": path, "STAND_IN_DELAY": "300", "STAND_IN_IPC": "1"}
        env |= {"WAGMA_CUDA_AWARE": "0", **planted.environment(bug, module)}
        tests = str(planted.ROOT / "tests")
        return mpirun_text(2, JOB.format(tests=tests, module=module), "", env=env)

    return run


def test_no_bug_is_found_where_there_is_none(job):
    assert job(None, "shared").check().stderr == ""


@pytest.mark.parametrize(("module", "bug"), CASES)
def test_a_planted_bug_is_found(job, module, bug):
    planted.check_found(job(bug, module), module, bug)
