"""What a command does at signals, in one process."""

import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from wagma import job
from wagma.continuing import Continuing
from wagma.pauses import Said

HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def signals():
    """Signals as a command has them, and the handlers as they were afterwards."""
    handlers = {number: signal.getsignal(number) for number in HELD}
    yield job.Signals()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", HELD)
def test_a_signal_is_held_back_until_it_may_be_raised(signals, number):
    os.kill(os.getpid(), number)
    assert signals.received == number
    with pytest.raises(job.Interrupted), signals.raising():
        pytest.fail("the signal is forgotten")
    with pytest.raises(job.Interrupted), signals.raising():
        pytest.fail("the signal is forgotten")


@pytest.mark.parametrize("number", HELD)
def test_inside_raising_a_signal_interrupts(signals, number):
    with pytest.raises(job.Interrupted), signals.raising():
        os.kill(os.getpid(), number)
        time.sleep(1)
    assert signals.received == number


def test_a_block_that_turns_out_to_take_longer_is_left_longer(signals):
    """Its patience is asked for when it begins, at the signal, and when the alarm comes."""
    asked = []

    def patience():
        asked.append(len(asked))
        return (1e-3, 1e-3, 600, 0.05)[min(len(asked), 4) - 1]

    with pytest.raises(job.Interrupted), signals.raising_after(patience, lambda: math.inf):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(2000):
            time.sleep(0.01)
    assert len(asked) >= 4


def test_a_signal_does_not_end_a_pause_that_waits_for_the_disk(signals):
    """It counts from the end of the pause on, for the steps that follow."""
    during, after = [], []

    def save(call):
        signal.raise_signal(signal.SIGUSR1)
        during.append(signal.getitimer(signal.ITIMER_REAL)[0])

    def saved():
        after.append(signal.getitimer(signal.ITIMER_REAL)[0])

    pauses = SimpleNamespace(
        wish=Said.SAVE, said_by_all=lambda mine: Said.SAVE, meet=lambda: Said.STOP, saved=saved
    )
    averager = SimpleNamespace(_recovery=SimpleNamespace(carried_out=save))
    trainer = SimpleNamespace(averager=averager, steps=lambda: [])
    its = SimpleNamespace(signals=signals, pauses=pauses, trainer=trainer)
    with signals.raising_after(lambda: 600.0, lambda: math.inf):
        assert list(Continuing.steps(its, metrics=None)) == []
    assert signals.received == signal.SIGUSR1
    assert during == [0, 0]
    assert after[0] > 500 and after[1] == 0  # the second pause ends the training


def test_a_deadline_ends_a_block_as_a_signal_does(signals):
    deadline = time.time() - 1
    with pytest.raises(job.Interrupted), signals.raising_after(lambda: 1e-3, lambda: deadline):
        time.sleep(20)
    with signals.raising_after(lambda: 1e-3, lambda: math.inf):
        signals.stopped()
    assert not signals.received


def test_what_batch_systems_send_again_is_ignored_for_a_while(signals, monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(job.time, "monotonic", lambda: now)
    os.kill(os.getpid(), signal.SIGTERM)
    for later in (0, job.CLOSING - 1):
        monkeypatch.setattr(job.time, "monotonic", lambda later=later: now + later)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
    assert signals.received == signal.SIGTERM


@pytest.mark.parametrize(
    ("first", "second", "closing"),
    [
        (signal.SIGTERM, signal.SIGTERM, 0),
        (signal.SIGUSR1, signal.SIGTERM, 0),
        (signal.SIGINT, signal.SIGINT, job.CLOSING),
    ],
)
def test_a_second_signal_kills_then(first, second, closing):
    program = f"""
import os, time
from wagma import job
job.CLOSING = {closing}
job.Signals()
os.kill(os.getpid(), {int(first)})
print("closing", flush=True)
os.kill(os.getpid(), {int(second)})
time.sleep(1)
print("still here")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (-second, "closing\n")


@pytest.mark.parametrize(("first", "status"), [(True, 0), (False, -signal.SIGTERM)])
def test_a_second_signal_does_not_kill_while_the_interpreter_ends(first, status):
    """The first one does, or else a process that hangs there could not be ended."""
    program = f"""
import os, signal
from wagma import job
class Last:
    def __del__(self, kill=os.kill, me=os.getpid()):
        kill(me, {int(signal.SIGTERM)})
last = Last()
job.Signals()
if {first}:
    os.kill(os.getpid(), signal.SIGTERM)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == status
