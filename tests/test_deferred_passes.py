"""Exchanges whose passes over memory are deferred: nothing is sent before it is written."""

import re
from pathlib import Path

import device_passes
import numpy as np
import pytest
from build_once import build_cython

HERE = Path(__file__).parent
SOURCE = HERE / "late" / "late_space.pyx"


@pytest.fixture(scope="module")
def extension():
    """Build the memory whose passes are deferred, where that has not been done."""
    options = ["-O1", "-ffp-contract=off"]
    return build_cython("late", SOURCE.read_text(), SOURCE.name, *options)


def differing(mpirun, *arguments):
    """Return how many calls gave other bits than without deferring, and how many passes were."""
    ended = mpirun(4, "-W", "ignore", HERE / "late" / "job.py", *arguments, timeout=100).check()
    found = re.fullmatch(r"(\d+) calls differ, (\d+) passes deferred\n", ended.stdout)
    return map(int, found.groups())


@pytest.mark.launch
def test_averages_have_the_same_bits(mpirun, extension):
    calls, passes = differing(mpirun, extension)
    assert (calls, passes > 500) == (0, True)


def test_what_is_asked_is_answered_when_the_ticket_is_over(extension):
    passes = device_passes.load(device_passes.build())
    space = device_passes.load(extension, "late_space").make(["float64"], ["float64"])
    x, flags = np.array([1.0, np.inf]), np.ones(2, np.int32)
    change = [array.ctypes.data for array in (x[:1], x[:1], x[1:])]
    passes.make(space, "begin_all_finite", [flags[:1].ctypes.data, x.ctypes.data], 2)
    passes.make(space, "begin_finite_change", [flags[1:].ctypes.data, *change], 1)
    ticket = passes.begun(space)
    assert not passes.over(space, ticket)
    assert flags.tolist() == [0, 1]
    assert not passes.over(space, ticket)
    assert passes.over(space, ticket)
    assert flags.tolist() == [0, 0]


@pytest.mark.launch
def test_sending_too_early_is_seen(mpirun, extension):
    """Where tickets are said to be over before they are."""
    calls, _ = differing(mpirun, extension, "lying")
    assert calls > 0
