"""Trainings with faults, each continued to its end: a few runs of `python -m tests.faults`."""

import subprocess
import sys

import pages
import pytest

from wagma.methods import METHODS

pytestmark = pytest.mark.launch


def play(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tests.faults", *arguments],
        cwd=pages.ROOT,
        capture_output=True,
        text=True,
    )


def test_a_training_of_one_rank_survives_each_fault():
    """With other algorithms and moments than the first ones would be of more ranks."""
    ended = play("--ranks", "1", "--runs", "19", "--seed", "0")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("19 runs, 0 failed\n")
    faults = {line.split(" (")[0].split(": ")[1] for line in ended.stdout.splitlines()[:-1]}
    assert len(faults) == 19


def test_the_table_of_faults_has_every_method():
    ended = play("--table")
    assert {*METHODS} <= {line.partition(":")[0] for line in ended.stdout.splitlines()}


@pytest.mark.extra
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_many_trainings_survive_their_faults(ranks):
    ended = play("--ranks", str(ranks), "--runs", "120" if ranks == 1 else "30", "--seed", "1000")
    assert ended.returncode == 0, ended.stdout + ended.stderr
