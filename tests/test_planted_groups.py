"""Bugs planted into formed groups of vectors on devices: the driver's stand-in catches each."""

import planted
import pytest
import stand_in

pytestmark = [pytest.mark.extra, pytest.mark.launch]

MODULES = "formed_groups", "group_port"
CASES = planted.cases(MODULES)
JOB = """
import signal
import sys
import threading

import numpy as np

sys.path.insert(0, {tests!r})
import planted

from mpi4py import MPI

planted.load({module!r})

import stand_in
from formed_groups import PlannedGroups
from test_formed_groups_mpi import form
from together import Interrupted, interrupt

import collectives.device

collectives.device.BLOCK = 2**16
comm = MPI.COMM_WORLD
device = stand_in.Device()
stream = device.create_stream()
vector = device.array(np.zeros(150_000), stream)
plan = [[(2 * t, (0, 1)), (2 * t + 1, (0, 1))] for t in range(6)]
signal.signal(signal.SIGALRM, lambda *_: interrupt())
with form(comm, vector, PlannedGroups, plan=plan) as average:
    assert average.path == "staged"
    for t in range(6):
        device.write(vector, np.full(vector.size, float(comm.rank + t)), stream)
        if (t, comm.rank) == (3, 1):
            with device.holding_copies(5):
                threading.Timer(0.2, device.open).start()
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                try:
                    average(vector)
                    raise AssertionError("not interrupted")
                except Interrupted:
                    pass
        else:
            average(vector)
            assert (vector.get() == t + 0.5).all()
"""


@pytest.fixture
def job(mpirun_text):
    path = stand_in.require()

    def run(bug, module):
        env = {"WAGMA_CUDA_LIBRARY": path, "STAND_IN_DELAY": "300"}
        env |= {"WAGMA_CUDA_AWARE": "0", "WAGMA_CUDA_IPC": "0", "WAGMA_TRANSPORT": "shared"}
        tests = str(planted.ROOT / "tests")
        text = JOB.format(tests=tests, module=module)
        return mpirun_text(2, text, "", env=env | planted.environment(bug, module))

    return run


def test_no_bug_is_found_where_there_is_none(job):
    assert job(None, "formed_groups").check().stderr == ""


@pytest.mark.parametrize(("module", "bug"), CASES)
def test_a_planted_bug_is_found(job, module, bug):
    planted.check_found(job(bug, module), module, bug)
