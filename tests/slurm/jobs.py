"""The Slurm scripts on a real Slurm of two virtual nodes: `make test-slurm`.

Slurm's limits have minutes, so that these tests take some.
"""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.slurm import cluster as slurm

ROOT = Path(__file__).parents[2]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
RANKS = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1")
QUICK = ("--steps", "20")
STEPS = 500
SLOW = ("--steps", str(STEPS), "--step-time", "100")  # at least 50 s


@pytest.fixture(scope="module")
def cluster():
    if slurm.missing():
        pytest.skip(slurm.missing())
    with slurm.running() as cluster:
        yield cluster


@pytest.fixture
def home(tmp_path):
    """Return a directory to submit from, which has all that the scripts need."""
    for name in (".venv", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def submit(cluster, home, *arguments, options=(), **variables):
    """Submit the script for CPU nodes with arguments for `wagma train`; return the job."""
    script = "slurm/train-cpu.sbatch"
    return cluster.submit(*RANKS, *options, script, *arguments, cwd=home, **variables)


def output(home, job):
    return (home / f"wagma-{job}.out").read_text()


def started(cluster, home, job, run, steps):
    """Wait until rank 0 of a run has made so many steps."""
    records = home / "runs" / run / "rank-0000.jsonl"
    cluster.wait_until(
        lambda: records.exists() and len(records.read_text().splitlines()) >= steps,
        f"{steps} steps of job {job}: {cluster.field(job, 'JobState')}",
        60,
    )


def checkpoints(home, run):
    return list(home.glob(f"runs/{run}/checkpoints/*-step-*"))


def complete(home, job, run):
    """Check that a run was continued, and that each rank has a record of every step."""
    summary = json.loads((home / f"runs/{run}/summary.json").read_text())
    assert summary["steps_of_rank"] == 4 * [STEPS], output(home, job)
    assert json.loads((home / f"runs/{run}/config.json").read_text())["resumed"]
    for rank in range(4):
        lines = (home / f"runs/{run}/rank-{rank:04}.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [*range(STEPS)]


def test_a_job_trains_on_two_nodes(cluster, home):
    job = submit(cluster, home, *QUICK, "--name", "plain")
    assert cluster.wait_for(job, *ENDED, seconds=60) == "COMPLETED", output(home, job)
    summary = json.loads((home / "runs/plain/summary.json").read_text())
    assert len(summary["steps_of_rank"]) == 4


def test_jobs_of_an_array_have_runs_of_their_own(cluster, home):
    options = ("--array=1-3", "--output=wagma-%A_%a.out")
    job = submit(cluster, home, *QUICK, options=options)
    for index in (1, 2, 3):
        name = f"{job}_{index}"
        assert cluster.wait_for(name, *ENDED, seconds=90) == "COMPLETED", output(home, name)
        assert len(list(home.glob(f"runs/job-{name}/summary.json"))) == 1


def test_of_an_array_only_the_job_that_was_stopped_is_requeued(cluster, home):
    """The one whose own number is the array's, by which `scontrol requeue` would mean all."""
    options = ("--array=1-2", "--output=wagma-%A_%a.out")
    job = submit(cluster, home, "--steps", "200", "--step-time", "100", options=options)
    names = [f"{job}_{index}" for index in (1, 2)]
    for name in names:
        started(cluster, home, name, f"job-{name}", 5)
    (stopped,) = [name for name in names if cluster.field(name, "JobId") == job]
    cluster.run("scancel", "--signal=TERM", stopped)
    for name in names:
        assert cluster.wait_for(name, "COMPLETED", seconds=120) == "COMPLETED", output(home, name)
        assert cluster.field(name, "Restarts") == str(int(name == stopped))
        run = home / f"runs/job-{name}"
        resumed = json.loads((run / "config.json").read_text())["resumed"]
        assert bool(resumed) == (name == stopped)
        assert len((run / "rank-0000.jsonl").read_text().splitlines()) == 200


def test_a_job_without_the_matching_mpi_fails(cluster, home):
    job = submit(cluster, home, *QUICK, SLURM_MPI_TYPE="none")
    assert cluster.wait_for(job, *ENDED, seconds=60) == "FAILED"
    assert cluster.field(job, "ExitCode") == "2:0"
    assert "MPI made each of the job's 4 tasks" in output(home, job)


def test_a_cancelled_job_saves_a_checkpoint_and_does_not_run_again(cluster, home):
    job = submit(cluster, home, "--steps", "100000", "--name", "cancelled")
    started(cluster, home, job, "cancelled", 5)
    cluster.run("scancel", job)
    assert cluster.wait_for(job, *ENDED, seconds=60) == "CANCELLED"
    cluster.wait_until(lambda: not cluster.processes(), "all ranks have ended", 30)
    assert "stopped by SIGTERM" in output(home, job)
    assert len(checkpoints(home, "cancelled")) == 1
    assert not cluster.run("squeue", "-h", "-j", job).stdout


def test_a_job_is_requeued_near_its_time_limit_until_it_is_done(cluster, home):
    job = submit(cluster, home, *SLOW, "--name", "long", options=("--time=2",))
    assert cluster.wait_for(job, *ENDED, seconds=400) == "COMPLETED", output(home, job)
    assert int(cluster.field(job, "Restarts")) >= 1
    complete(home, job, "long")


def test_a_job_ends_soon_after_the_death_of_a_rank(cluster, home):
    job = submit(cluster, home, *SLOW, "--name", "rank")
    started(cluster, home, job, "rank", 20)
    os.kill(ranks_on(cluster, "n2")[0], signal.SIGKILL)
    assert cluster.wait_for(job, *ENDED, seconds=10) == "FAILED"
    cluster.wait_until(lambda: not cluster.processes(), "all ranks have ended", 5)
    assert re.search(r"the process of rank \d has ended", output(home, job))


def ranks_on(cluster, node):
    """Return the processes of a node that train."""
    command = b"wagma\0train\0"
    found = cluster.processes_on(node)
    return [each for each in found if command in Path(f"/proc/{each}/cmdline").read_bytes()]


def test_a_job_goes_on_after_the_death_of_a_node(cluster, home):
    options = ("--checkpoint-every", "50", "--name", "node")
    job = submit(cluster, home, *SLOW, *options)
    started(cluster, home, job, "node", 120)
    cluster.kill_node("n2")
    try:
        cluster.wait_for(job, "PENDING", seconds=90)
    finally:
        cluster.start_node("n2")
    assert cluster.wait_for(job, *ENDED, seconds=200) == "COMPLETED", output(home, job)
    complete(home, job, "node")


def test_a_preempted_job_goes_on_later(cluster, home):
    job = submit(cluster, home, *SLOW, "--name", "preempted", options=("--exclusive",))
    started(cluster, home, job, "preempted", 20)
    options = ("--partition=urgent", "--exclusive", "--nodes=2", "--output=/dev/null")
    urgent = cluster.submit(*options, "--wrap", "true", cwd=home)
    assert cluster.wait_for(urgent, *ENDED, seconds=120) == "COMPLETED"
    assert cluster.wait_for(job, *ENDED, seconds=200) == "COMPLETED", output(home, job)
    assert int(cluster.field(job, "Restarts")) >= 1
    complete(home, job, "preempted")
