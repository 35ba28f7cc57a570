"""Timelines of whole jobs: by the variable, of jobs that end in any way, and of `wagma train`."""

import signal

import pytest
import traces

from wagma.cli import main
from wagma.timeline import merge

pytestmark = pytest.mark.launch

HEAD = """
import os, signal
import numpy as np
from mpi4py import MPI
from collectives import GroupAllreduce
comm = MPI.COMM_WORLD
x = np.zeros(1000)
CALLS = 20
"""
# What each rank does after its calls; a rank that others wait for in MPI ends the job.
ENDINGS = {
    "closed": "average.close()",
    "forgotten": "",
    "exception": "if comm.rank == 2: raise KeyError('mine')",
    "killed": f"if comm.rank == 2: os.kill(os.getpid(), {signal.SIGKILL:d})\ncomm.Barrier()",
    "terminated": f"if comm.rank == 2: os.kill(os.getpid(), {signal.SIGTERM:d})\ncomm.Barrier()",
    "aborted": "if comm.rank == 2: comm.Abort(3)\ncomm.Barrier()",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_was_recorded_survives_any_end_of_a_job(mpirun_text, tmp_path, ending):
    run = tmp_path / "run"
    body = f"""
average = GroupAllreduce(comm, x, group_size=2, sync_period=CALLS)
for _ in range(CALLS):
    average(x)
comm.Barrier()
{ENDINGS[ending]}
"""
    ended = mpirun_text(4, HEAD, body, env={"WAGMA_TIMELINE": str(run)})
    assert (ended.returncode == 0) == (ending in ("closed", "forgotten")), ended
    made = merge.load(run)
    assert made.ranks.keys() == {0, 1, 2, 3}
    for number, rank in made.ranks.items():
        assert rank.clock.aligned and rank.ring.torn <= 1
        assert number == 0 or len(rank.clock.times) >= 1
        calls = {each.name for each in rank.slices if each.kind == "call"}
        assert {f"call {turn}" for turn in range(20)} <= calls
    assert main(["timeline", str(run)]) == 0
    traces.check(traces.read(run / "timeline.json.gz"))


def test_training_tells_what_it_does(mpirun, tmp_path):
    options = ["--steps", "5", "--step-time", "1", "--slow-rank", "1:2", "--timeline"]
    command = ["-m", "wagma", "train", *options, "--runs-dir", tmp_path, "--name", "mine"]
    mpirun(2, *command, timeout=60, forked=True).check()
    assert main(["timeline", str(tmp_path / "mine")]) == 0
    made = merge.load(tmp_path / "mine")
    assert made.ranks.keys() == {0, 1}
    for number, rank in made.ranks.items():
        told = [each.name for each in rank.slices if each.kind in ("span", "lap")]
        assert told.count("loading") == told.count("step") == 5
        assert {"compute", "averaging"} <= set(told)
        assert ("injected delay" in told) == (number == 1)
        assert number == 0 or len(rank.clock.times) >= 2
