"""Trainings with faults, each continued to its end: a few runs of `python -m tests.faults`."""

import subprocess
import sys

import pages
import pytest
from faults.kinds import KINDS, OTHERS, PARTS, SURVIVED

from wagma.methods import METHODS

pytestmark = pytest.mark.launch


def play(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tests.faults", *arguments],
        cwd=pages.ROOT,
        capture_output=True,
        text=True,
    )


WITHOUT_SURVIVORS = [kind for kind in KINDS if kind not in SURVIVED]
OF_ONE = [kind for kind in WITHOUT_SURVIVORS if kind not in OTHERS]
OF_SEVERAL = [*PARTS, "killed after activation", "stopped", *OTHERS]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("ranks", "first", "runs", "kinds"),
    [
        (1, 0, 19, OF_ONE),
        (2, 0, 6, OF_SEVERAL),
        pytest.param(2, 6, 40, WITHOUT_SURVIVORS, marks=pytest.mark.extra),
    ],
)
def test_trainings_survive_each_fault(ranks, first, runs, kinds):
    """With other algorithms and moments each time."""
    options = "--ranks", ranks, "--runs", runs, "--seed", first, "--kinds", *kinds
    ended = play(*map(str, options))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith(f"{runs} runs, 0 failed\n")
    faults = {line.split(" (")[0].split(": ")[1] for line in ended.stdout.splitlines()[:-1]}
    assert faults == {*kinds}


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
