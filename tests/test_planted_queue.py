"""Bugs planted into what queues passes on devices: the stand-in for the driver catches each."""

import device_passes
import planted
import pytest

pytestmark = pytest.mark.extra

JOB = """
import ctypes
import sys
import time

import numpy as np

import planted

planted.load({module!r})

import device_passes
import stand_in
from collectives.memory.device_queue import DeviceQueue
from collectives.memory.device_space import DeviceSpace

passes = device_passes.load(sys.argv[1])
device = stand_in.Device()
stream = device.create_stream()
x = device.array(np.ones(5000), stream)
space = DeviceSpace(["float64"], ["float64"], DeviceQueue(0))
address = passes.new_flag(space)
flag = ctypes.c_int.from_address(address)
for t in range(4):
    device.synchronize(stream)
    passes.make(space, "combine", 3 * [x.address], x.size, (1, 1))
    if t:
        flag.value = 1
        passes.make(space, "begin_all_finite", [address, x.address], x.size)
        ticket = passes.begun(space)
        while not passes.over(space, ticket):
            time.sleep(1e-4)
        assert flag.value == 1
    else:
        assert passes.make(space, "all_finite", [x.address], x.size)
    device.write(x, np.full(x.size, t), stream)
"""
MODULES = ("device_queue", "device_space")
CASES = planted.cases(MODULES)


def run(module, bug):
    env = {"STAND_IN_DELAY": "300", **planted.environment(bug, module)}
    return device_passes.run(JOB.format(module=module), **env)


@pytest.mark.parametrize("module", MODULES)
def test_no_bug_is_found_where_there_is_none(module):
    ended = run(module, None)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(("module", "bug"), CASES)
def test_a_planted_bug_is_found(module, bug):
    planted.check_found(run(module, bug), module, bug)
