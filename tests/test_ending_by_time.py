"""Trainings that end when their time is over: `--seconds` in the commands, and what they count."""

import argparse
import json
import math
import signal
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from launch import Signal
from mpi4py import MPI
from torch import nn
from training import TIMEOUT, metrics, train, train_several

from wagma import cli, pauses, progress
from wagma.compare import directory_name
from wagma.evaluation import copy_of, evaluate_kept
from wagma.methods import METHODS
from wagma.runs import POINTS, Curve, Tally, lasting, summarize
from wagma.simulation import FREE, MACHINES, Settings, simulate
from wagma.tasks import local
from wagma.tasks.contract import Task
from wagma.trainer import Trainer

# --- what is counted


def record(elapsed_s, own=1.0, samples=8):
    return {
        "compute_s": own,
        "delay_s": 0.0,
        "timely": True,
        "synchronized": False,
        "elapsed_s": elapsed_s,
        "loss": 0.5,
        "samples": samples,
    }


def test_throughput_is_of_the_steps_that_were_over_in_time():
    fast, slow = Tally(None, 3.5), Tally(None, 3.5)
    for elapsed in (1, 2, 3, 4):
        fast.add(record(float(elapsed)))
    for elapsed in (2, 3.5):
        slow.add(record(elapsed, own=1.75))
    seen = []

    def bound(seconds, limit):
        seen.append(([list(each) for each in seconds], limit))
        return 6

    summary = summarize([fast, slow], bound)
    assert seen == [([4 * [1.0], 2 * [1.75]], 3.5)]
    assert summary["samples_per_s"] == (3 + 2) * 8 / 3.5
    assert summary["wall_s"] == 3.5
    assert summary["bound_over_wall"] == pytest.approx(5 / 6)
    assert summary["steps_of_rank"] == [4, 2]


def test_what_is_counted_from_a_later_time_on_is_divided_by_the_time_since():
    """As on another number of ranks, where what was made before is not counted."""
    first, later = Tally(None, 3.0), Tally(None, 13.0)
    later.begin_at(10.0, 5)
    for elapsed in (1.0, 2.0, 3.5):
        first.add(record(elapsed))
        later.add(record(10 + elapsed))
    one, other = (summarize([tally], lambda seconds, limit: 2) for tally in (first, later))
    assert one == other
    assert first.loss.points == later.loss.points


def test_a_curve_over_time_is_thinned_to_means():
    curve = Curve(None, 30.0)
    steps = np.random.default_rng(0).uniform(0, 30, 2000)
    for number, elapsed in enumerate(np.sort(steps)):
        curve.add(elapsed, float(number))
    assert len(curve.points) == POINTS
    before = 0
    for place, (step, elapsed, loss) in enumerate(curve.points):
        assert 0.5 * place <= elapsed < 0.5 * (place + 1)
        assert loss == pytest.approx((before + step - 1) / 2)
        before = step
    assert before == 2000


def test_progress_is_about_ten_lines_over_the_time(capsys):
    shown = progress.start(0, None, 5.0)
    for step in range(1, 104):
        shown.update(step, step * 0.05, 0.5, 100.0)
    lines = capsys.readouterr().out.splitlines()
    assert 10 <= len(lines) <= 11
    assert lines[0] == "step 10  0.5 of 5 s  loss 0.5000  100 samples/s"
    assert lines[-1].startswith("step 100  5.0 of 5 s")


def test_a_rank_s_steps_are_repeated_for_as_long_as_is_wanted():
    table = lasting([[1.0, 2.0], [0.25], [4.0, 0.0, 4.0]], 9.0)
    assert (table.sum(axis=1) >= 9).all()
    assert table[0, :5].tolist() == [1, 2, 1, 2, 1]
    assert table[2, :4].tolist() == [4, 0, 4, 4]


# --- one rank, and a clock that only its steps move

COMPUTING, AVERAGING = 1.0, 0.5
TWO = "--accumulate", "2"
LIMITED = *TWO, "--algorithm", "allreduce:compute_limit=1000"


@pytest.fixture
def clock(monkeypatch):
    """Return the time, which stands still unless one changes it."""
    now = SimpleNamespace(seconds=100.0)

    def sleep(seconds):
        now.seconds += seconds

    monkeypatch.setattr("wagma.trainer.time", SimpleNamespace(sleep=sleep))
    return now


def trainer_of(clock, *words):
    """Return a trainer that computes for a second on each batch, and then averages for half of one.

    A batch is 8 units of work.
    """

    def loss(model, batch):
        clock.seconds += COMPUTING
        return (model(batch) - 1).square().mean()

    data = [torch.ones(8, 3)], []
    task = Task("line", lambda: nn.Linear(3, 1), lambda *_: data, loss=loss, work=len)
    given = cli.make_parser().parse_args(["train", "--algorithm", "allreduce", *words])
    given.check(given)
    local.resolve(given, task)
    trainer = Trainer(given, task, MPI.COMM_SELF, lambda: clock.seconds)
    step = trainer.local.step

    def average():
        step()
        clock.seconds += AVERAGING

    trainer.local.step = average
    return trainer


def test_no_step_begins_after_the_time(clock):
    trainer = trainer_of(clock, "--seconds", "6")
    ended = [each["elapsed_s"] for each in trainer.steps()]
    assert ended == [1.5, 3.0, 4.5, 6.0]
    # Of the first, which may have compiled a model, nothing is concluded.
    assert list(trainer.lasted) == 3 * [1.5] and trainer.longest == 1.5
    trainer.averager.close()
    trainer = trainer_of(clock, "--seconds", "6.1")
    assert len(list(trainer.steps())) == 5
    trainer.averager.close()


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (["--step-time", "500"], COMPUTING + 0.5),
        (["--step-time-per-work", "250"], 8 * 0.25),
        (["--step-time-per-work", "250", "--step-time", "500"], 0.5 + 8 * 0.25),
        (["--step-time-per-work", "50", "--step-time", "500"], COMPUTING),
        ([*TWO, "--step-time-per-work", "250", "--step-time", "500"], 0.5 + 16 * 0.25),
        ([*LIMITED, "--step-time-per-work", "250", "--step-time", "500"], 0.5 + 16 * 0.25),
    ],
)
def test_a_step_sleeps_for_what_its_computation_leaves_of_the_time_of_its_work(
    clock, words, seconds
):
    trainer = trainer_of(clock, "--steps", "3", *words)
    taken = [each["compute_s"] for each in trainer.steps()]
    trainer.averager.close()
    assert taken == 3 * [seconds]


def test_a_rank_that_skips_iterations_makes_fewer_steps_and_keeps_as_many_models(
    clock, monkeypatch
):
    trainer = trainer_of(clock, "--steps", "10", "--evaluate-every", "2")
    monkeypatch.setattr(Trainer, "skipped", property(lambda trainer: 2 * trainer.made))
    seconds = [array("d", (each["compute_s"] for each in trainer.steps()))]
    assert seconds[0].tolist() == 4 * [COMPUTING]
    assert [kept.steps for kept in trainer.kept] == [1, 2, 2, 3]
    assert trainer.bound(seconds, None) == 10 * COMPUTING
    trainer.averager.close()


def test_models_are_kept_as_they_were_at_each_time(clock):
    trainer = trainer_of(clock, "--seconds", "7.5", "--evaluate-every-seconds", "1.25")
    states = [copy_of(trainer.model)]
    for each in trainer.steps():
        states.append(copy_of(trainer.model))
        assert each["compute_s"] == COMPUTING
    # 1.25 is in the middle of the first average, 2.5 at the end of the second gradient, and so on.
    assert [(kept.elapsed_s, kept.steps) for kept in trainer.kept] == [
        (1.25, 1),
        (2.5, 1),
        (3.75, 2),
        (5.0, 3),
        (6.25, 4),
    ]
    for kept in trainer.kept:
        expected = states[kept.steps]
        assert all(torch.equal(kept.state[name], expected[name]) for name in expected)
    trainer.averager.close()
    evaluated, _ = evaluate_kept(trainer, MPI.COMM_SELF, lambda: False)
    assert [one["elapsed_s"] for one in evaluated] == [kept.elapsed_s for kept in trainer.kept]


def test_a_long_step_keeps_the_same_model_for_several_times(clock):
    trainer = trainer_of(clock, "--steps", "2", "--evaluate-every-seconds", "0.4")
    assert len(list(trainer.steps())) == 2
    assert [kept.steps for kept in trainer.kept] == [0, 0, 1, 1, 1, 1, 2]
    assert trainer.kept[0].state is trainer.kept[1].state
    trainer.averager.close()


def test_keeping_a_model_takes_no_time(clock, monkeypatch):
    def slow_copy(model):
        clock.seconds += 100
        return copy_of(model)

    monkeypatch.setattr("wagma.train.copy_of", slow_copy)
    trainer = trainer_of(clock, "--seconds", "6", "--evaluate-every-seconds", "1")
    records = list(trainer.steps())
    assert [each["elapsed_s"] for each in records] == [1.5, 3.0, 4.5, 6.0]
    assert [each["average_s"] for each in records] == 4 * [AVERAGING]
    trainer.averager.close()


# --- in simulated time


def test_all_ranks_of_a_simulation_make_steps_until_the_time_is_over():
    times = np.tile([1.0, 1.0, 1.0, 4.0], (40, 1))
    made = {
        name: simulate(name, times, FREE, Settings(1), 21.5).made.tolist()
        for name in ("allreduce", "local-sgd", "ad-psgd")
    }
    assert made["allreduce"] == 4 * [5]
    assert simulate("allreduce", times, FREE, Settings(1), 21.5).updates == 5
    # All synchronize at 40 s; until then each is as fast as it can.
    assert made["local-sgd"] == [9, 9, 9, 5]
    assert made["ad-psgd"] == [21, 21, 21, 5]
    modes = {
        mode: simulate("parameter-server", times, FREE, Settings(1, mode=mode), 21.5).made.tolist()
        for mode in ("bsp", "asp")
    }
    assert modes == {"bsp": 4 * [5], "asp": [21, 21, 21, 5]}


@pytest.mark.parametrize("name", METHODS)
def test_a_simulation_by_time_is_the_beginning_of_a_longer_one(name):
    times = np.random.default_rng(1).uniform(0.5, 2, (60, 8))
    machine, settings = MACHINES["10gbe"], Settings(10**8)
    whole = simulate(name, times, machine, settings)
    parts = [simulate(name, times, machine, settings, seconds) for seconds in (5, 10, 20)]
    for part in parts:
        assert part.waited.min() >= 0
        assert part.compute + part.waited == pytest.approx(part.wall)
        assert 0 < part.ideal_wall <= part.wall
        made = [each.cumsum()[count - 1] for each, count in zip(times.T, part.made) if count]
        assert all(seconds <= part.wall for seconds in made)
    assert (np.diff([part.made for part in parts], axis=0) > 0).all()
    # As many steps in all by the mean time that the whole one takes for these.
    rates = [part.throughput for part in parts]
    assert rates[-1] == pytest.approx(whole.throughput, rel=0.25)


def test_steps_that_do_not_last_are_refused():
    with pytest.raises(ValueError, match="the steps of rank 1 take less than 9 s"):
        simulate("allreduce", np.tile([1.0, 0.5], (10, 1)), FREE, Settings(1), 9)


def test_a_bound_by_time_is_how_many_steps_all_make():
    seconds = np.tile([[1.0], [4.0]], 30)
    bounds = {
        name: METHODS[name].bound_of_steps(seconds, {}, 24) for name in ("allreduce", "ad-psgd")
    }
    assert bounds == {"allreduce": 12, "ad-psgd": 30}


# --- on the command line


OWN_PACE = ["train", "--algorithm", "wagma:pace=own"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--seconds", "0"], "--seconds: must be a number above 0"),
        (["train", "--seconds", "2", "--steps", "3"], "--steps: not allowed with argument --sec"),
        (["train", "--seconds", "2", "--evaluate-every", "3"], "use --evaluate-every-seconds"),
        (["compare", "--seconds", "2", "--evaluate-every", "3"], "use --evaluate-every-seconds"),
        (
            ["train", "--evaluate-every", "2", "--evaluate-every-seconds", "3"],
            "--evaluate-every-seconds: not allowed with argument --evaluate-every",
        ),
        (["simulate", "--seconds", "-1"], "--seconds: must be a number above 0"),
        (["train", "--total-steps", "9", "--seconds", "2"], "--seconds: not allowed with argument"),
        (
            ["train", "--total-steps", "9"],
            "--total-steps: not allowed with argument --algorithm wagma: only ranks at their own",
        ),
        (
            ["train", "--total-samples", "9", "--algorithm", "ad-psgd"],
            "--total-samples: not allowed with argument --algorithm ad-psgd: only ranks at their",
        ),
        (
            [*OWN_PACE, "--total-steps", "9", "--evaluate-every", "3"],
            "not allowed with argument --total-steps, as ranks make different numbers of steps",
        ),
        (
            [*OWN_PACE, "--total-samples", "9", "--task", "control"],
            "--total-samples: not allowed where batches have other numbers of samples than",
        ),
        (
            [*OWN_PACE, "--total-samples", "9", "--task", "translation", "--batch-by", "tokens"],
            "--total-samples: not allowed where batches have other numbers of samples than",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(capsys, words, message):
    with pytest.raises(SystemExit):
        given = cli.make_parser().parse_args(words)
        given.check(given)
    assert message in capsys.readouterr().err


def test_compare_evaluates_twenty_times_either_way():
    for words, steps, seconds in (([], 20, None), (["--seconds", "5"], None, 0.25)):
        given = cli.make_parser().parse_args(["compare", *words])
        given.check(given)
        assert (given.evaluate_every, given.evaluate_every_seconds) == (steps, seconds)


def test_a_number_of_samples_is_one_of_steps():
    words = [*OWN_PACE, "--total-samples", "1001", "--batch-size", "10", "--accumulate", "2"]
    given = cli.make_parser().parse_args(words)
    given.check(given)
    assert (given.total_steps, given.steps) == (51, None)


def words_of(run):
    return json.loads((run / "summary.json").read_text())


SLOW = ("--step-time", 20, "--slow-rank", "2:5")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """The folder of two runs of a job of three, one of which is slow, and what the job printed."""
    folder = tmp_path_factory.mktemp("uneven")
    (folder / "scheduled.py").write_text(SCHEDULED)
    fast = ["--seconds", 3, "--evaluate-every-seconds", 0.5, "--algorithm", "ad-psgd", *SLOW]
    own = ["--total-steps", 90, "--algorithm", "wagma:pace=own:sync_period=4", *SLOW]
    runs = {"fast": fast, "own": [*own, "--script", folder / "scheduled.py"]}
    return folder, train_several(folder, runs, ranks=3, plots=True).check().stdout


@pytest.mark.launch
def test_fast_ranks_make_more_steps_and_all_have_one_model_in_the_end(uneven):
    run = uneven[0] / "fast"
    summary, everyone = words_of(run), [metrics(run, rank) for rank in range(3)]
    steps = [len(records) for records in everyone]
    assert summary["steps_of_rank"] == steps
    assert max(steps[:2]) > steps[2]  # one may be held up
    assert all(records[-2]["elapsed_s"] < 3 for records in everyone)
    assert all(records[-1]["elapsed_s"] > 1 for records in everyone)
    in_time = [one for records in everyone for one in records if one["elapsed_s"] <= 3]
    assert summary["samples_per_s"] == sum(one["samples"] for one in in_time) / 3
    assert summary["wall_s"] == 3
    assert 0 < summary["bound_over_wall"] <= 1.01
    *kept, last = summary["evaluations"]
    assert [one["elapsed_s"] for one in kept] == pytest.approx([0.5, 1, 1.5, 2, 2.5])
    assert last["accuracy"] == summary["accuracy"] > 0.3
    for one, at in zip(kept, (0.5, 1, 1.5, 2, 2.5)):
        made = [sum(each["elapsed_s"] <= at for each in records) for records in everyone]
        # A time in the middle of an average counts as after it.
        assert sum(made) / 3 <= one["step"] <= sum(made) / 3 + 1


@pytest.mark.launch
def test_methods_and_references_end_by_time_and_are_compared(mpirun, tmp_path):
    """References at the same step on all ranks."""
    algorithms = "allreduce,post-local-sgd,ad-psgd,wagma:overlap"
    options = ["--seconds", 3, "--algorithms", algorithms, "--runs-dir", tmp_path, "--name", "c"]
    arguments = ["-m", "wagma", "compare", *options, "--step-time", 20, "--slow-rank", "1:4"]
    mpirun(2, *arguments, timeout=TIMEOUT, forked=True).check()
    results = json.loads((tmp_path / "c" / "comparison.json").read_text())["results"]
    assert list(results) == algorithms.split(",")
    speeds = [
        words_of(tmp_path / "c" / "seed-0" / directory_name(label))["samples_per_s"]
        for label in ("ad-psgd", "allreduce")
    ]
    assert results["ad-psgd"]["ratio"] == pytest.approx(speeds[0] / speeds[1])
    for label in algorithms.split(","):
        run = tmp_path / "c" / "seed-0" / directory_name(label)
        summary = words_of(run)
        fast, slow = steps = summary["steps_of_rank"]
        # Each rank of ours looks at its own clock; torch's references agree on the last step.
        assert min(steps) >= 1 and (fast == slow or label != "post-local-sgd"), (label, steps)
        assert [len(metrics(run, rank)) for rank in range(2)] == steps
        times = [one["elapsed_s"] for one in summary["evaluations"]]
        assert times[:-1] == pytest.approx(np.arange(1, len(times)) * 3 / 20)
        assert times[-1] == pytest.approx(3) and len(times) > 10


def pausing_at(averaging):
    """Return the arguments of `Pauses` for a rank alone, whose averages are these."""
    settings = argparse.Namespace(checkpoint_every=None, time_limit=None, seconds=None)
    averager = SimpleNamespace(collective=averaging, comm=MPI.COMM_SELF)
    trainer = SimpleNamespace(
        **{"settings": settings, "options": {}, "some_idle": False, "total": None, "rank": 0},
        **{"made": 0, "longest": 0.0, "averager": averager},
    )
    return trainer, MPI.COMM_SELF, SimpleNamespace(received=0, began=0.0), settings


def test_ranks_stop_after_the_same_step_however_long_it_takes(monkeypatch):
    """Where they average after each step, all have said what is waited for, if not yet heard it."""
    monkeypatch.setattr(pauses, "RARE", 0.0)
    averaging = SimpleNamespace(sync_period=2, version=2)
    pausing = pauses.Pauses(*pausing_at(averaging))
    said = pauses.Said.STOP | pauses.Said.GOING
    pausing._rounds = SimpleNamespace(heard=lambda: None, wait=lambda: said, begun=True)
    averaging.version = 3
    assert not pausing.due()  # between common averages it does not wait
    averaging.version = 4
    assert pausing.due()


def test_a_job_of_long_steps_has_more_time_to_stop(monkeypatch):
    """Before Slurm's limit; the alarm comes at the same time, however long the steps are."""
    monkeypatch.setenv(pauses.END_TIME, "2000000000")
    averaging = SimpleNamespace(sync_period=1, version=0)
    trainer, comm, signals, settings = pausing_at(averaging)
    pausing = pauses.Pauses(trainer, comm, signals, settings)
    assert (2e9 - pausing.deadline, pausing.patience) == (90, 30)
    trainer.longest = 20.0
    assert (2e9 - pausing.deadline, pausing.patience) == (150, 90)
    pausing.writing = 200.0  # of a checkpoint
    assert (2e9 - pausing.deadline, pausing.patience) == (350, 90)
    averaging.sync_period = 10  # survivors hear of signals only then
    pausing = pauses.PausesOfSurvivors(trainer, comm, signals, settings)
    assert (2e9 - pausing.deadline, pausing.patience) == (90 + 260, 30 + 260)


@pytest.mark.launch
def test_a_time_in_which_nobody_ends_a_step_is_named(tmp_path):
    ended = train(tmp_path, "short", "--seconds", 0.01, "--step-time", 50, ranks=1)
    assert ended.returncode == 2
    assert (
        ended.complaints
        == "wagma: error: argument --seconds: no step was completed within 0.01 s\n"
    )


@pytest.mark.launch
def test_a_signal_ends_ranks_that_have_left_and_those_that_train(tmp_path, mpirun):
    """Rank 0's only step in a time that lets it leave at once; rank 1's takes five minutes."""
    options = ["--seconds", 0.1, "--slow-rank", "1:6000", "--step-time", 50, "--name", "stopped"]
    ended = mpirun(
        *(2, "-m", "wagma", "train", "--runs-dir", tmp_path, *options, "--algorithm", "ad-psgd"),
        timeout=TIMEOUT,
        forked=True,
        signals=[Signal(signal.SIGTERM, " of 0.1 s", "ranks")],
    )
    assert ended.returncode == 143
    assert "Traceback" not in ended.stderr
    assert "wagma: stopped by SIGTERM after" in ended.stderr


@pytest.mark.launch
def test_methods_are_simulated_by_time(mpirun, tmp_path):
    options = ["--seconds", 30, "--ranks", 4, "--slow-rank", "3:4", "--name", "mine"]
    options += ["--algorithms", "allreduce,ad-psgd"]
    ended = mpirun(
        None, "-m", "wagma", "simulate", *options, timeout=60, cwd=tmp_path, forked=True
    ).check()
    assert ended.stdout.startswith("# 30 s of log-normal steps, ")
    record = json.loads((tmp_path / "runs" / "mine" / "simulation.json").read_text())
    (allreduce,), (ad_psgd,) = record["results"].values()
    assert allreduce["wall_s"] == ad_psgd["wall_s"] == 30
    assert ad_psgd["steps_per_s"] > 2.5 * allreduce["steps_per_s"]
    assert math.isclose(allreduce["steps"] * 4 / 30, allreduce["steps_per_s"])


SCHEDULED = """
import torch
from wagma.tasks import digits
from wagma.simulated_training import Alone

task = digits.task("iid", Alone())
model, data, loss = task.model, task.data, task.loss


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


class Recorder(torch.optim.lr_scheduler.StepLR):
    def step(self, *arguments):
        super().step(*arguments)
        print("scheduled", self.last_epoch)


def scheduler(optimizer):
    return Recorder(optimizer, 5, gamma=0.5)
"""


@pytest.mark.launch
def test_a_job_ends_by_the_steps_of_all_ranks_which_its_schedule_follows(uneven):
    """A rank that is five times as slow makes a fifth of the others' steps."""
    folder, output = uneven
    summary = words_of(folder / "own")
    steps = summary["steps_of_rank"]
    assert 90 <= sum(steps) < 90 + 3 * 2 * 4
    assert steps[2] < max(steps[:2])  # one may be held up
    # Each knows the total after at most two periods, and then all ranks' schedules are at it.
    scheduled = output.count("scheduled") / 3 - 1  # its constructor makes a step, too
    assert 30 <= scheduled <= sum(steps) / 3
    assert 0 < summary["bound_over_wall"] <= 1.1
