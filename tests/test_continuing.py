"""`wagma train` that saves checkpoints, is stopped, and continues."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import launch
import pages
import pytest
import torch
from training import TIMEOUT, metrics

from wagma import continuing
from wagma.checkpoint import files
from wagma.commands.checkpoints import LATEST
from wagma.continuing import Continuing
from wagma.job import UsageError
from wagma.methods import METHODS
from wagma.report import records

pytestmark = [pytest.mark.launch, pytest.mark.timeout(500)]

PAGE = pages.ROOT / "docs" / "checkpoints.md"

# Trains on a loader that shuffles, and sends its rank a signal after a step, where a file says so.
SCRIPT = """
import os, pathlib, random, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from wagma import pauses

SIGNALS = pathlib.Path(__file__).with_name("signals")
sys.modules["matplotlib"] = None  # plots take longer than these trainings
pauses.RARE = 0.0 if SIGNALS.with_name("rare").exists() else 5.0


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))


def data(rank, size, batch_size, seed):
    inputs = torch.randn(120, 4, generator=torch.Generator().manual_seed(seed))
    mine = TensorDataset(inputs[rank::size], inputs[rank::size].sum(1, keepdim=True))
    return DataLoader(mine, batch_size, shuffle=True), [mine[:20]]


calls = -2  # it is called before the first step, and for the test data


def loss(model, batch):
    global calls
    calls += 1
    if calls > 0 and not torch.is_grad_enabled() and SIGNALS.with_name("slow").exists():
        time.sleep(60)  # a long evaluation
    inputs, targets = batch
    noise = random.random()
    return nn.functional.mse_loss(model(inputs), targets + 0.1 * noise)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)


def log(record):
    said = SIGNALS.read_text().split() if SIGNALS.exists() else ()
    if said[:2] == [str(record["rank"]), str(record["step"])]:
        if "once" in said:
            SIGNALS.unlink()
        os.kill(os.getpid(), int(said[2]))
"""
# Each command's arguments, after what is done before it: files are copied and written.
JOB = """
import glob, json, os, shutil, sys
from mpi4py import MPI
from wagma import cli

comm, statuses = MPI.COMM_WORLD, []
for before, words in json.loads(sys.argv[1]):
    comm.Barrier()
    if comm.rank == 0:
        exec(before)
    comm.Barrier()
    sys.modules.pop("task", None)  # one process imports each script once
    try:
        status = cli.main(words)
    except SystemExit as ended:
        status = ended.code
    statuses.append(status)
if comm.rank == 0:
    print("statuses", statuses, flush=True)
"""


def model_of(run):
    return torch.load(run / "model.pt")


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def without_times(records):
    return [(one["step"], one["loss"], one["version"], one["samples"]) for one in records]


REPEATABLE = ("wagma:wait=group", "allreduce", "local-sgd", "d-psgd")


def name_of(algorithm):
    return algorithm.partition(":")[0]


def killed(name):
    """Return what makes a copy of a whole run that of one that was killed after its last step.

    What it had written after step 16 counts no more.
    """
    run = f"runs/{name}-again"
    lost = [f"{run}/{each}" for each in ("summary.json", "model.pt")]
    broken = [f"{run}/checkpoints/{each}" for each in ("000003-step-24", "000004-step-30")]
    return (
        f"shutil.copytree('runs/{name}', '{run}');"
        f"[os.remove(each) for each in {lost}]; [shutil.rmtree(each) for each in {broken}]"
    )


def told(rank, step, number):
    """Return what has a rank get a signal after a step of the next commands."""
    return f"open('signals', 'w').write('{rank} {step} {int(number)}')"


NO_SIGNAL = "os.path.exists('signals') and os.remove('signals')"
SPOIL = "[open(each, 'ab').write(b'x') for each in glob.glob('runs/run/checkpoints/*/*')]"
SAVE = "--checkpoint-every 1000"
OWN = f"--name own --algorithm wagma:pace=own --total-steps 60 --step-time 20 {SAVE}"
PAIRS = f"--name pairs --algorithm ad-psgd --steps 30 {SAVE}"
TIMED = "--name timed --algorithm partial-reduce --seconds 4 --step-time 5 --checkpoint-every 0.2s"
ALIKE = f"--algorithm allreduce --steps 30 {SAVE}"
RARE = f"--name rare --algorithm local-sgd:sync_period=5000 --steps 4000 --step-time 1 {SAVE}"
SKIPS = "--algorithm hop:backup=1:max_skip=10 --steps 60 --step-time 2 --slow-rank 1:20"
LIMIT = "--resume runs/limit --algorithm local-sgd"
RANKS = "--name ranks --algorithm local-sgd --checkpoint-every 6 --resume"
LONG = "--algorithm local-sgd --steps 6"
REFUSED = "--name run --algorithm local-sgd --steps 4 --checkpoint-every 2"
# What is done before a command, its arguments, and its exit status; in one job of two ranks.
COMMANDS = [
    *(
        (before, f"--algorithm {each} --name {name_of(each)}{flags}", 0)
        for each in REPEATABLE
        for before, flags in (
            ("", " --steps 30 --checkpoint-every 8 --checkpoint-keep 9 --evaluate-every 10"),
            (
                killed(name_of(each)),
                "-again --resume --steps 30 --checkpoint-every 8 --checkpoint-keep 9 "
                "--evaluate-every 10",
            ),
        )
    ),
    (NO_SIGNAL, f"--name whole {ALIKE}", 0),
    (told(1, 11, signal.SIGTERM), f"--name part {ALIKE}", 85),
    (NO_SIGNAL, f"--name part {ALIKE} --resume latest", 0),
    (told(0, 5, signal.SIGUSR1), f"{PAIRS} --requeue 7", 7),
    (NO_SIGNAL, "--resume runs/pairs --algorithm ad-psgd --steps 30", 0),
    (told(1, 5, signal.SIGTERM), OWN, 85),
    (NO_SIGNAL, f"{OWN} --resume", 0),
    (f"open('rare', 'w').close(); {told(1, 5, signal.SIGTERM)}", RARE, 85),
    (f"os.remove('rare'); {told(0, 3, signal.SIGINT)}", TIMED, 130),
    (NO_SIGNAL, f"{TIMED} --resume", 0),
    (told(0, 25, signal.SIGTERM), f"--name skips {SKIPS} {SAVE}", 85),
    (NO_SIGNAL, f"--resume runs/skips {SKIPS}", 0),
    ("", "--name limit --algorithm local-sgd --steps 9999 --step-time 5 --time-limit 0.01", 85),
    ("", f"{LIMIT} --steps 60 --step-time 5 --checkpoint-every 0.05s", 0),
    ("open('slow', 'w').close()", f"--name long {LONG} --time-limit 6 {SAVE}", 85),
    ("", f"--resume runs/long {LONG} --time-limit 3", 1),
    ("os.remove('slow')", f"--resume runs/long {LONG}", 0),
    ("", f"{RANKS} --steps 12", 2),
    ("", f"{RANKS} --steps 24", 0),
    ("", REFUSED, 0),
    ("", f"{REFUSED} --resume --batch-size 8", 2),
    ("", f"{REFUSED} --resume --sync-period 3", 2),
    ("", f"{REFUSED} --resume --evaluate-every 2", 2),
    ("", "--resume elsewhere", 2),
    (SPOIL, f"{REFUSED} --resume", 2),
]


def arguments(flags):
    return ["train", *flags.split(), "--script", "task.py"]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder of the commands' runs, and how their job ended."""
    folder = tmp_path_factory.mktemp("continued")
    (folder / "task.py").write_text(SCRIPT)
    alone = ["-m", "wagma", *arguments(f"{RANKS} --steps 12")]
    launch.mpirun(None, *alone, timeout=TIMEOUT, cwd=folder, forked=True).check()
    words = [(before, arguments(flags)) for before, flags, _ in COMMANDS]
    ended = launch.mpirun(
        2, "-c", JOB, json.dumps(words), timeout=4 * TIMEOUT, cwd=folder, forked=True
    ).check()
    (statuses,) = re.findall(r"^statuses (.*)$", ended.stdout, re.MULTILINE)
    assert json.loads(statuses) == [status for _, _, status in COMMANDS], ended
    assert "Traceback" not in ended.stderr
    return folder / "runs", ended


@pytest.fixture(scope="module")
def runs(job):
    return job[0]


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


@pytest.mark.parametrize("algorithm", [*map(name_of, REPEATABLE)])
def test_a_run_that_was_killed_continues_bit_for_bit(runs, algorithm):
    """Also what it draws at random, and in which order its data come."""
    whole, again = runs / algorithm, runs / f"{algorithm}-again"
    assert equal(model_of(whole), model_of(again))
    for rank in range(2):
        assert without_times(metrics(whole, rank)) == without_times(metrics(again, rank))
    assert summary_of(again)["steps_of_rank"] == [30, 30]
    first, second = (
        [(each["step"], each["loss"]) for each in summary_of(run)["evaluations"]]
        for run in (whole, again)
    )
    assert first == second and len(first) == 3
    resumed = json.loads((again / "config.json").read_text())["resumed"]
    assert resumed == [{"checkpoint": "000002-step-16", "step": 16, "ranks": 2}]


def test_the_files_of_a_continued_run_are_those_of_one_run(runs):
    """Times go on where they were, and the report reads them."""
    run = runs / "wagma-again"
    elapsed = [one["elapsed_s"] for one in metrics(run, 0)]
    assert elapsed == sorted(elapsed)
    assert records.read(run).counts == (30, 30)
    assert summary_of(run).keys() == summary_of(runs / "wagma").keys()


def test_a_signal_stops_ranks_that_average_together_after_the_same_step(job):
    runs, ended = job
    whole, part = (model_of(runs / name) for name in ("whole", "part"))
    # The statistics of BatchNorm are averaged in the checkpoint.
    assert equal({name: each for name, each in whole.items() if "running" not in name}, part)
    assert [len(metrics(runs / name, 1)) for name in ("whole", "part")] == [30, 30]
    stopped = r"wagma: stopped by SIGTERM after (\d+) steps: --resume runs/part continues from .*\1"
    (step,) = re.findall(stopped, ended.stderr)
    assert 12 <= int(step) <= 14


def test_a_time_limit_ends_an_evaluation(job):
    """And a job that has time for nothing else fails, or it would be requeued for ever."""
    runs, ended = job
    assert re.search(r"stopped by the time limit after 6 steps: --resume runs/long", ended.stderr)
    assert "leaves no time for a step, or for the evaluation" in ended.stderr
    assert summary_of(runs / "long")["steps_of_rank"] == [6, 6]


def test_any_algorithm_is_stopped_and_continues(job):
    """By a signal on one rank, or a time limit; also where ranks make different steps."""
    runs, ended = job
    assert [len(metrics(runs / "pairs", rank)) for rank in range(2)] == [30, 30]
    assert min(summary_of(runs / "timed")["steps_of_rank"]) > 10
    assert sum(summary_of(runs / "own")["steps_of_rank"]) >= 60
    assert "stopped by the time limit after 0 steps: --resume runs/limit " in ended.stderr
    assert metrics(runs / "limit", 0)[-1]["step"] == 59
    for name in ("timed", "limit"):  # at a stop, by time and at the end
        assert files.number_of(files.found(runs / name / "checkpoints")[0]) >= 3


def test_iterations_that_are_skipped_count_also_after_a_stop(runs):
    """Rank 1 has skipped some by itself, and further ones by the checkpoint."""
    summary = summary_of(runs / "skips")
    steps, skipped = summary["steps_of_rank"], summary["skipped_of_rank"]
    assert [sum(both) for both in zip(steps, skipped)] == [60, 60]
    assert steps[1] < steps[0]


def test_a_signal_is_not_kept_waiting_for_an_average_over_all_ranks(runs):
    """That would be after the last step; each rank stops after its own one."""
    made = [len(metrics(runs / "rare", rank)) for rank in range(2)]
    assert made[1] >= 6 and max(made) < 4000  # rank 1 has got the signal


def test_another_number_of_ranks_continues_a_run(runs):
    run = runs / "ranks"
    assert [len(metrics(run, rank)) for rank in range(2)] == [12, 12]
    assert [path.name for path in (run / "until-step-12").iterdir()] == ["rank-0000.jsonl"]
    assert len(metrics(run / "until-step-12", 0)) == 12
    assert metrics(run, 1)[0]["step"] == 12
    summary, before = summary_of(run), metrics(run / "until-step-12", 0)[-1]["elapsed_s"]
    elapsed = max(metrics(run, rank)[-1]["elapsed_s"] for rank in range(2))
    assert summary["wall_s"] <= elapsed - before  # of the steps that are counted
    last = summary["evaluations"][-1]
    assert (last["step"], last["elapsed_s"]) == (24, pytest.approx(elapsed))


def its_run(directory, **more):
    """Return a stand-in for a rank's part in a training, which has its files alone."""
    its = SimpleNamespace(run=directory, **more)
    for name in ("_before", "_moving", "_remove_metrics"):
        setattr(its, name, partial(getattr(Continuing, name), its))
    return its


def test_metrics_of_before_are_kept_where_a_job_was_killed_before_it_saved(tmp_path):
    """It and the next one resume from the same checkpoint, and so does one on as many ranks."""
    its, found = its_run(tmp_path), SimpleNamespace(step=60)
    first, second = (tmp_path / f"rank-000{rank}.jsonl" for rank in range(2))
    folder = tmp_path / "until-step-60"
    for text in ("until step 60", "of the killed job"):
        first.write_text(text)
        assert Continuing._clear(its, found, alike=False) == []
        second.write_text("of the killed job")
    assert not first.exists()
    assert [path.read_text() for path in folder.iterdir()] == ["until step 60"]
    first.write_text("of the killed job")
    Continuing._take_back(its, found)
    assert first.read_text() == "until step 60"
    assert not second.exists() and not folder.exists()
    Continuing._take_back(its, found)
    assert first.read_text() == "until step 60"


class Killed(BaseException):
    pass


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("moved", range(4))
def test_a_job_that_is_killed_while_it_moves_metrics_loses_none(
    tmp_path, monkeypatch, moved, alike
):
    """Between two files, and before and after the folder gets its name, in either direction."""
    its, found = its_run(tmp_path), SimpleNamespace(step=60)
    names = [f"rank-000{rank}.jsonl" for rank in range(3)]
    for name in names:
        (tmp_path / name).write_text(name)
    if alike:
        Continuing._clear(its, found, alike=False)
    calls = itertools.count()

    def killed_at(function):
        def called(*arguments):
            if next(calls) == moved:
                raise Killed
            return function(*arguments)

        return called

    with monkeypatch.context() as dying:
        for name in ("rename", "replace"):
            dying.setattr(Path, name, killed_at(getattr(Path, name)))
        with pytest.raises(Killed):
            Continuing._take_back(its, found) if alike else Continuing._clear(its, found, False)
    Continuing._clear(its, found, alike=False)
    folder = tmp_path / "until-step-60"
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict(zip(names, names))
    (tmp_path / names[0]).write_text("of the killed job")
    Continuing._take_back(its, found)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict(zip(names, names))


def test_a_run_that_begins_anew_on_fewer_ranks_has_no_others_metrics(tmp_path, monkeypatch):
    """A job on eight ranks was killed before it saved."""
    names = [f"rank-000{rank}.jsonl" for rank in range(8)]
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setattr(continuing.checkpoint, "load", lambda *arguments, **options: None)
    monkeypatch.setattr(continuing, "from_rank_0", lambda function, comm: function())
    its = its_run(
        tmp_path, trainer=MagicMock(), saver=MagicMock(), comm=SimpleNamespace(rank=0, size=4)
    )
    Continuing.resume(its)
    assert sorted(path.name for path in tmp_path.iterdir()) == names[:4]


HOLDS = """
import fcntl, sys
held = open(sys.argv[1], "w")
fcntl.lockf(held, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("restarts", "patience"), [("0", "ENDING"), ("1", "RESTARTED")])
def test_two_jobs_do_not_train_in_one_directory(tmp_path, monkeypatch, restarts, patience):
    """As where the jobs of an array have one name, or a job is submitted twice."""
    for name in ("ENDING", "RESTARTED"):
        monkeypatch.setattr(continuing, name, 0.3 if name == patience else 1000)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    run = tmp_path / "run"
    claim = run / "checkpoints" / ".claim"
    claim.parent.mkdir(parents=True)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS, claim], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdout.readline() == b"locked\n"
        its = SimpleNamespace(run=run)
        with pytest.raises(UsageError, match=f"another job trains in {run} now"):
            Continuing._try_to_write(its)
        other.kill()
    Continuing._try_to_write(its)
    Continuing._try_to_write(SimpleNamespace(run=run))  # a further training of the same job


@pytest.mark.parametrize("name", ["summary.json", "model.pt"])
def test_no_run_begins_anew_where_one_without_checkpoints_has_ended(tmp_path, name):
    """Or was stopped, with the average of its models."""
    settings = Namespace(resume=LATEST, name="run", runs_dir=tmp_path)
    (tmp_path / "run").mkdir()
    assert continuing.find(settings) == tmp_path / "run"
    (tmp_path / "run" / name).touch()
    with pytest.raises(UsageError, match="run has ended, and has no checkpoints"):
        continuing.find(settings)
    (tmp_path / "run" / "checkpoints" / "000001-step-4").mkdir(parents=True)
    assert continuing.find(settings) == tmp_path / "run"


@pytest.mark.parametrize(
    ("made", "left", "received", "status"),
    [
        (30, 5.0, signal.SIGTERM, 1),
        (30, 0.0, 0, 1),
        (30, math.inf, signal.SIGTERM, 85),  # of another reason than the time: preempted
        (31, 5.0, signal.SIGTERM, 85),
    ],
)
def test_a_job_whose_time_is_too_short_for_the_evaluation_is_not_requeued_for_ever(
    tmp_path, made, left, received, status
):
    """It has resumed after 30 steps, the last ones, and is stopped so long before its deadline."""
    its = SimpleNamespace(
        run=tmp_path,
        status=85,
        newest=tmp_path / "000001-step-30",
        resumed=[{"step": 30}],
        comm=SimpleNamespace(rank=0, allgather=lambda mine: [mine]),
        trainer=SimpleNamespace(made=made, started=1.0),
        pauses=SimpleNamespace(deadline=time.time() + left),
        _resumed_at=30,
    )
    assert Continuing.ended(its, [int(received)]) == status


def test_another_number_of_ranks_is_sent_positions_alone():
    """Not the models that are kept for evaluation."""
    sent, dealt = [], []
    parts = {0: {"batches": "at 3", "trains": True}, 2: {"batches": "at 7", "trains": True}}
    others = {**parts, 4: {"batches": "none", "trains": False}}
    found = SimpleNamespace(
        others={rank: {**part, "kept": ["a model"]} for rank, part in others.items()}
    )

    def allgather(mine):
        sent.append(mine)
        return [mine, {1: "at 5"}]

    batches = SimpleNamespace(deal=lambda *arguments: dealt.append(arguments))
    its = SimpleNamespace(
        trainer=SimpleNamespace(batches=batches, place=1, trainers=2),
        comm=SimpleNamespace(allgather=allgather),
    )
    Continuing._go_on_with_data(its, found, alike=False)
    assert sent == [{0: "at 3", 2: "at 7"}]
    assert dealt == [(["at 3", "at 5", "at 7"], 1, 2)]


def test_metrics_that_do_not_fit_on_a_disk_are_a_checkpoint_that_cannot_be_written():
    def size():
        raise OSError(errno.ENOSPC, "No space left on device")

    warnings = []
    its = SimpleNamespace(
        trainer=MagicMock(),
        tally=MagicMock(),
        saver=MagicMock(),
        comm=SimpleNamespace(allgather=lambda mine: [mine]),
        _warn=warnings.append,
    )
    its._state = partial(Continuing._state, its)
    Continuing._save(its, SimpleNamespace(size=size))
    assert list(map(str, warnings)) == ["cannot write the metrics: No space left on device"]


def test_options_that_an_optimizer_does_not_tell_are_compared_unless_they_are_defaults():
    """Such as a graph; whether vectors are in shared memory changes no result."""
    method = METHODS["d-psgd"]
    settings = Namespace(lr=0.1)
    some, others = (
        continuing.compared(SimpleNamespace(method=method, options=options, settings=settings))
        for options in (
            method.resolved({}),
            method.resolved({"graph": "double-ring", "transport": "messages"}),
        )
    )
    assert some["graph"] is None and "transport" not in others
    assert {name for name in some if some[name] != others[name]} == {"graph"}
    assert some["lr"] == 0.1


def test_what_cannot_be_continued_is_refused_in_one_line(job):
    _, ended = job
    errors = [line for line in ended.stderr.splitlines() if line.startswith("wagma: error: ")]
    patterns = [
        "the time limit leaves no time for a step, or for the evaluation",
        "cannot resume: runs/ranks has made all its steps, on 1 rank: give more of them",
        "cannot resume: .* was saved with batch_size = 32, and now it is 8",
        "cannot resume: .* was saved with sync_period = 10, and now it is 3",
        "cannot resume: .* was saved with evaluate_every = None, and now it is 2",
        "argument --resume: elsewhere has no checkpoints",
        "cannot resume: none of 2 checkpoints in .* is good: 000002-step-4: .*; 000001-step-2: .*",
    ]
    assert len(errors) == len(patterns)
    for error, pattern in zip(errors, patterns):
        assert re.match(f"wagma: error: {pattern}", error), error


@pytest.mark.parametrize(
    ("engine", "period", "refused"),
    [("none", None, True), ("none", 4, False), ("adaptive", None, False)],
)
def test_ranks_that_would_serve_nobody_in_a_pause_are_refused(monkeypatch, engine, period, refused):
    """Such as an asynchronous server without a progress thread, which others' calls wait for."""
    monkeypatch.setattr(continuing, "common_period", lambda trainer: period)
    trainer = SimpleNamespace(
        settings=SimpleNamespace(algorithm=SimpleNamespace(label="parameter-server:mode=asp")),
        averager=SimpleNamespace(collective=SimpleNamespace(engine=engine)),
    )
    comm = SimpleNamespace(allgather=lambda mine: ["adaptive", mine])
    told = pytest.raises(UsageError, match="of parameter-server:mode=asp need progress threads")
    with told if refused else contextlib.nullcontext():
        continuing.check_engines(trainer, comm)


def test_a_rank_that_waits_for_one_that_hangs_ends_the_job_to_be_continued(mpirun, tmp_path):
    """Rank 0 gets the signal while it waits in a step for rank 1, which computes for ever."""
    (tmp_path / "task.py").write_text(SCRIPT + HANGS)
    flags = "--script task.py --algorithm allreduce --steps 30 --checkpoint-every 4 --name run"
    ended = mpirun(2, "-c", STUCK, *flags.split(), timeout=TIMEOUT, cwd=tmp_path, forked=True)
    assert ended.returncode == 85, ended
    stuck = r"wagma: error: rank 0 cannot stop: it has waited (\d+\.\d) s for other ranks"
    stuck += "; --resume runs/run continues from 00000(1-step-4|2-step-8)\n"
    assert float(re.search(stuck, ended.stderr)[1]) >= 0.5


HANGS = """
import signal, threading, time
calls = 0


def loss(model, batch):
    global calls
    calls += 1
    if calls == 12:
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 1:
            time.sleep(1000)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)
"""
STUCK = """
import sys
from types import SimpleNamespace
from wagma import cli, pauses

pauses.STUCK = 0.5
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""


def test_a_failure_names_the_checkpoint(mpirun, tmp_path):
    (tmp_path / "task.py").write_text(SCRIPT.replace("os.kill(", "raise ValueError("))
    (tmp_path / "signals").write_text("1 9 9")
    flags = "--script task.py --algorithm allreduce --steps 30 --checkpoint-every 4 --name run"
    words = "-m", "wagma", "train", *flags.split()
    ended = mpirun(2, *words, timeout=TIMEOUT, cwd=tmp_path, forked=True)
    assert ended.returncode == 1 and "ValueError" in ended.stderr
    continues = "wagma: --resume runs/run continues from 00000(1-step-4|2-step-8)\n"
    assert len(re.findall(continues, ended.stderr)) == 1


@pytest.mark.parametrize(("status", "jobs"), [(0, 1), (1, 10), (2, 1), (85, 10), (130, 1)])
def test_the_loop_of_the_page_ends_where_another_job_is_of_no_use(status, jobs):
    """After the end of the training, an error of usage, and Ctrl-C."""
    job = f"mpiexec() {{ echo job; return {status}; }}"
    ended = subprocess.run(["bash", "-c", f"{job}\n{loop()}"], capture_output=True, text=True)
    assert ended.stdout.count("job\n") == jobs


def loop():
    """Return the page's loop."""
    blocks = [text for language, text in pages.blocks(PAGE) if language == "text"]
    (found,) = (text for text in blocks if "for attempt in" in text)
    return found


def test_the_loop_of_the_page_starts_a_job_again_that_a_kill_has_ended(tmp_path):
    """With one rank in place of the page's four, which is killed once."""
    (tmp_path / "task.py").write_text(SCRIPT)
    (tmp_path / "signals").write_text(f"0 9 {int(signal.SIGKILL)} once")
    command = shlex.join([*launch.mpiexec(), "-n", "1", sys.executable, "-m", "wagma"])
    flags = "--script task.py --algorithm local-sgd --steps 20 --checkpoint-every 4"
    script = loop().replace("mpiexec -n 4 wagma", command).replace("--checkpoint-every 60s", flags)
    assert command in script and flags in script
    env = {**os.environ, **launch.OPEN_MPI, "PYTHONPATH": str(launch.STARTUP)}
    ended = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert ended.returncode == 0, ended
    # The last one may not have been complete.
    continues = r"^continuing from runs/again/checkpoints/00000(1-step-4|2-step-8),"
    assert len(re.findall(continues, ended.stdout, re.MULTILINE)) == 1
    steps = [one["step"] for one in metrics(tmp_path / "runs" / "again", 0)]
    assert steps == list(range(20))
