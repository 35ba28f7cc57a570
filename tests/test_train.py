"""`wagma train`: its metrics, its files, its repeatability, and how it ends."""

import io
import json
import logging
import math
import os
import pty
import re
import select
import sys
import time

import launch
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import metrics, said, train_several

from collectives.statistics import Statistics
from collectives.topology import group_of
from wagma import data, imbalance, progress
from wagma import train as train_module
from wagma.commands.simulate import SIMULATED
from wagma.methods import METHODS
from wagma.runs import (
    POINTS,
    Curve,
    JsonLines,
    Tally,
    last_recorded,
    notes,
    summarize,
    write_json,
)
from wagma.stopwatch import Stopwatch, Thread, Used
from wagma.tasks.digits import small_cnn
from wagma.train import log_end, lost, outcome_in_words

RANKS = 4
CPU = torch.device("cpu")
SETTINGS = ["--steps", 125, "--seed", 3, "--algorithm", "wagma:wait=group"]
UNEVEN = ["--step-time", 2, "--imbalance", "cloud", "--imbalance-scale", 0.05, "--slow-rank", "1:3"]
STATISTICS = Statistics(*(0,) * 5, (), *(0,) * 7)
RECORD = {
    "step",
    "version",
    "loss",
    "samples",
    "elements",
    "work",
    "timely",
    "source",
    "synchronized",
    "group",
    "compute_s",
    "data_s",
    "optimizer_s",
    "cpu_s",
    "queued_s",
    "faults",
    "throttled_s",
    "gpu_reasons",
    "delay_s",
    "average_s",
    "waiting_s",
    "elapsed_s",
}


def record(compute_s=0.0, delay_s=0.0, timely=True, synchronized=False, elapsed_s=0.0):
    return {
        "compute_s": compute_s,
        "delay_s": delay_s,
        "timely": timely,
        "synchronized": synchronized,
        "elapsed_s": elapsed_s,
        "loss": 0.5,
        "samples": 8,
    }


def tally_of(records):
    tally = Tally(len(records))
    for one in records:
        tally.add(one)
    return tally


def no_bound(seconds, limit):
    return 0.0


# --- what is counted, in one process


def test_the_bound_is_the_sum_over_periods_of_the_slowest_rank_s_own_time():
    first = tally_of([record(1.0), record(1.0, 2.0), record(1.0, elapsed_s=10.0)])
    second = tally_of([record(1.5), record(1.5), record(1.5, 0.5, elapsed_s=9.0)])
    method = METHODS["local-sgd"]

    def bound(seconds, limit):
        assert limit is None
        return method.bound(np.array(seconds), {"sync_period": 2})

    summary = summarize([first, second], bound)
    assert summary["bound_s"] == 4.0 + 2.0
    assert summary["wall_s"] == 10.0
    assert summary["bound_over_wall"] == 0.6
    assert summary["samples_per_s"] == 2 * 3 * 8 / 10.0


def test_synchronizations_are_no_timely_contributions():
    late, timely, synchronized = record(timely=False), record(), record(synchronized=True)
    first = tally_of([late, timely, synchronized, record(elapsed_s=1.0)])
    second = tally_of([late, late, synchronized, record(timely=False, elapsed_s=1.0)])
    summary = summarize([first, second], no_bound)
    assert summary["timely_share"] == 2 / 6
    assert summary["timely_share_of_rank"] == [2 / 3, 0.0]


def test_a_rank_s_time_is_shared_out_without_a_rest():
    tally = tally_of([record(1.0, 0.5, elapsed_s=3.0), record(1.0, elapsed_s=6.0)])
    tally.add_averaging(STATISTICS._replace(waiting=2.0, communicating=0.25))
    expected = {"compute": 2, "delay": 0.5, "waiting": 2, "communicating": 0.25, "other": 1.25}
    assert tally.seconds == expected
    assert summarize([tally], no_bound)["seconds_of_rank"] == [expected]


def test_waiting_before_and_after_the_local_step_is_averaging():
    parameter = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([parameter], lr=1.0)
    stopwatch = Stopwatch([sgd], CPU)
    sgd.register_step_pre_hook(lambda *_: time.sleep(0.03))
    for seconds, counted in ((0.04, stopwatch.computed), (0.02, stopwatch.delayed)):
        time.sleep(seconds)
        counted()
    time.sleep(0.05)
    sgd.step()
    time.sleep(0.06)
    stopwatch.averaged()
    assert stopwatch.compute >= 0.07
    assert stopwatch.delay >= 0.02
    assert stopwatch.average >= 0.11


def test_the_parts_of_a_rank_s_own_work_are_told_with_what_the_thread_has_used():
    times, used = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0]), iter(range(6))

    class Counting(Thread):
        def used(self):
            count = next(used)
            return Used(0.5 * count, 0.25 * count)

    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    stopwatch = Stopwatch([sgd], CPU, lambda: next(times), Counting(CPU))
    stopwatch.loaded()
    stopwatch.computed()
    stopwatch.delayed()
    sgd.step()
    assert (stopwatch.data, stopwatch.optimizer) == (1.0, 16.0)
    assert (stopwatch.compute, stopwatch.delay, stopwatch.average) == (1.0 + 2.0 + 16.0, 4.0, 8.0)
    assert (stopwatch.cpu, stopwatch.queued) == (3 * 0.5, 3 * 0.25)


def test_ranks_whose_losses_or_updates_are_not_finite_are_named():
    one = record(elapsed_s=1.0)
    lost, fine = tally_of([one | {"loss": math.nan}]), tally_of([one])
    lost.add_averaging(STATISTICS._replace(left_out=1200))
    assert list(notes(summarize([fine, lost], no_bound))) == [
        "no loss of rank 1 was finite",
        "left out of averages, as not finite: 1,200 of rank 1",
    ]
    assert not any("loss" in note for note in notes(summarize([lost, lost], no_bound)))  # unknown
    assert not list(notes(summarize([fine, fine], no_bound)))


def test_the_collectives_counts_are_put_together():
    tallies = [tally_of([record(elapsed_s=4.0)]) for _ in range(2)]
    assert summarize(tallies, no_bound)["mean_staleness"] is None
    for tally, staleness in zip(tallies, ((3, 1), (0, 0, 4))):
        tally.add_averaging(STATISTICS._replace(waiting=1.0, bytes_sent=8, staleness=staleness))
    summary = summarize(tallies, no_bound)
    assert summary["waiting_share"] == 0.25
    assert summary["bytes_sent_of_rank"] == [8, 8]
    assert summary["mean_staleness"] == (1 + 2 * 4) / 8


def test_what_a_method_reports_is_put_together():
    tallies = [tally_of([record(elapsed_s=1.0)]) for _ in range(3)]
    for rank, tally in enumerate(tallies):
        tally.report = {"rho": 0.5 if rank == 1 else None, "alone_of_rank": rank}
    summary = summarize(tallies, no_bound)
    assert (summary["rho"], summary["alone_of_rank"]) == (0.5, [0, 1, 2])


def test_rho_is_of_whom_all_ranks_have_met():
    """Of three ranks, in pairs, one half as fast as the others: Partial Reduce's 0.625."""
    tallies = [tally_of([record(elapsed_s=1.0)]) for _ in range(3)]
    for tally, met in zip(tallies, ([1.5, 1, 0.5], [1, 1.5, 0.5], [0.5, 0.5, 1])):
        tally.report = {"met": np.array(met)}
    assert summarize(tallies, no_bound)["rho"] == pytest.approx(0.625)
    for tally in tallies:
        tally.report = {"met": np.zeros(3)}
    assert summarize(tallies, no_bound)["rho"] is None


@given(steps=st.integers(1, 500))
def test_a_curve_is_thinned_to_means_and_keeps_its_ends(steps):
    curve = Curve(steps)
    for step in range(1, steps + 1):
        curve.add(10.0 * step, float(step))
    assert 1 <= len(curve.points) <= POINTS
    assert curve.points[-1][:2] == (steps, 10.0 * steps)
    before = 0
    for step, elapsed_s, loss in curve.points:
        assert elapsed_s == 10.0 * step
        assert loss == pytest.approx((before + 1 + step) / 2)
        before = step


def test_numbers_that_are_not_finite_are_null_in_the_metrics(tmp_path):
    with JsonLines(tmp_path / "lines") as lines:
        lines.write({"loss": math.nan, "step": 1})
        lines.write({"loss": 0.5, "step": 2})
    written = (tmp_path / "lines").read_text().splitlines()
    assert written == ['{"loss": null, "step": 1}', '{"loss": 0.5, "step": 2}']


def test_numbers_that_are_not_finite_are_null_in_all_json(tmp_path):
    value = {"a": [math.inf, (np.float64(math.nan), 1.5)], "b": {"c": -math.inf}, "d": tmp_path}
    write_json(tmp_path / "value.json", value)
    written = json.loads((tmp_path / "value.json").read_text())
    assert written == {"a": [None, [None, 1.5]], "b": {"c": None}, "d": str(tmp_path)}


def test_a_loss_is_lost_if_no_rank_that_trains_ends_with_a_finite_one():
    tally = Tally(9)
    record = {"compute_s": 0, "delay_s": 0, "elapsed_s": 0, "samples": 1, "synchronized": True}
    since = []
    for loss in (math.nan, 1.0, math.inf, math.nan):
        tally.add(record | {"loss": loss})
        since.append(tally.lost_since)
    assert since == [1, None, 3, 3]
    assert lost([3, 4, None], [4, 4, 0]) == 4
    assert lost([3, None], [4, 4]) is None
    assert lost([None], [0]) is None


def test_a_bar_is_not_drawn_before_the_first_step(monkeypatch):
    """Else an error before it would leave the terminal without a cursor."""
    monkeypatch.setenv("TERM", "xterm-256color")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as output:
        bar = progress.Bar(10, None, output)
        assert not select.select([ours], [], [], 0)[0]
        bar.update(1, 0.1, 0.5, 100.0)
        drawn = b""
        while b"1/10" not in drawn:  # it is read in several parts
            assert select.select([ours], [], [], 20)[0], drawn
            drawn += os.read(ours, 10_000)
        bar.close()
    os.close(ours)


def test_progress_is_about_ten_lines_without_a_terminal_and_nothing_above_rank_0(capsys):
    for rank in range(2):
        shown = progress.start(rank, 105)
        for step in range(1, 106):
            shown.update(step, 0.1 * step, 0.5, 12345.6)
        shown.close()
    lines = capsys.readouterr().out.splitlines()
    assert 10 <= len(lines) <= 12
    assert lines[-1] == "step 105/105  loss 0.5000  12,346 samples/s"


def test_the_outcome_has_what_a_new_user_looks_for_and_no_share_that_looks_like_a_fault():
    times = {"wall_s": 2.5, "samples_per_s": 1234.5, "bound_over_wall": 0.9}
    summary = {**times, "metrics": ["accuracy"], "accuracy": 0.95, "timely_share": 0.08}
    summary["recorded"] = []
    assert outcome_in_words("wagma", summary) == (
        "test accuracy 95.00%, wall time 2.50 s, 1,234 samples/s, bound/wall 0.90, algorithm wagma"
    )


def test_what_a_task_adds_to_records_is_in_the_summary_and_shown(capsys):
    ranks = [{"training_return": value} for value in (None, 20.0, 25.5)]
    added = last_recorded(ranks)
    assert added == {
        "recorded": ["training_return"],
        "training_return": 22.75,
        "training_return_of_rank": [None, 20.0, 25.5],
    }
    times = {"wall_s": 2.5, "samples_per_s": 10.0, "bound_over_wall": 0.9}
    outcome = outcome_in_words("wagma", {**times, "metrics": ["return"], "return": 31.0, **added})
    assert outcome.startswith("test return 31, training return 22.75, wall time 2.50 s, ")
    nothing = last_recorded(ranks[:1])
    assert nothing["training_return"] is None
    outcome = outcome_in_words("wagma", {**times, "metrics": [], **nothing})
    assert outcome.startswith("no test batches, wall time")
    shown = progress.start(0, 2)
    for step, of in enumerate(ranks[:2], 1):
        shown.update(step, 1.0, 0.5, 10.0, of)
    assert capsys.readouterr().out.splitlines() == [
        "step 1/2  loss 0.5000  10 samples/s",
        "step 2/2  loss 0.5000  10 samples/s  training return 20",
    ]


def test_the_outcome_has_the_work_per_second_where_the_task_tells_it():
    times = {"wall_s": 2.5, "samples_per_s": 10.0, "tokens_per_s": 1234.5, "bound_over_wall": 0.9}
    tested = {"metrics": ["loss"], "loss": 1.5}
    outcome = outcome_in_words("wagma", {**times, **tested, "recorded": []})
    assert ", 10 samples/s, 1,234 tokens/s, bound/wall 0.90, " in outcome
    tally = tally_of([record() | {"work": 3}, record() | {"work": 4.5}, record() | {"work": None}])
    assert tally.work == 7.5


def test_a_log_says_how_many_steps_were_timely_and_that_few_are_normal(caplog):
    late, timely, synchronized = record(timely=False), record(), record(synchronized=True)
    with caplog.at_level(logging.INFO):
        log_end(tally_of([late, timely, late, synchronized]), ranks=4)
        log_end(tally_of([timely, synchronized]), ranks=4)
    assert caplog.messages == [
        "made 4 steps in 0.0 s",
        "timely in 1 of 3 group averages, late for the others: over all ranks, about 1 in 4 is "
        "normal",
        "made 2 steps in 0.0 s",
    ]


# --- what an early end leaves


def test_rank_0_s_model_is_saved_before_others_are_waited_for_and_long_waits_are_said(
    tmp_path, monkeypatch
):
    # Not capsys: what another thread writes while readouterr() empties its buffer is lost.
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(train_module, "SILENCE", 0.05)
    model = small_cnn()
    with train_module.keeping_own(model, tmp_path, 1):
        assert not any(tmp_path.iterdir())
    with train_module.keeping_own(model, tmp_path, 0):
        saved = torch.load(tmp_path / "model.pt")
        deadline = time.monotonic() + 30
        while not said.getvalue().endswith("\n") and time.monotonic() < deadline:
            time.sleep(0.01)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    waits = f"waiting for the other ranks to stop: rank 0's own model is in {tmp_path}"
    assert said.getvalue() == f"wagma: {waits}\n"


# --- where the progress goes

SHOW = """
import sys
from wagma import progress
print("before", flush=True)
terminal = progress.terminal()
print("a terminal" if terminal else "no terminal", file=terminal, flush=True)
"""


@pytest.mark.launch
def test_a_file_that_the_launcher_writes_to_is_no_terminal_and_stays_as_it_is(mpirun):
    assert mpirun(1, "-c", SHOW, timeout=100).check().stdout == "before\nno terminal\n"


@pytest.mark.launch
def test_the_launcher_s_terminal_is_found():
    ours, launcher_s = pty.openpty()
    command = [*launch.mpiexec(), "-n", "1", sys.executable, "-c", SHOW]
    with launch.Job(command, stdout=launcher_s) as job:
        assert job.launcher.wait(timeout=100) == 0
    # Two ways lead to this terminal, so what came first on one may come last here.
    shown = ""
    while not ("before" in shown and "a terminal" in shown):
        assert select.select([ours], [], [], 20)[0], shown
        shown += os.read(ours, 1000).decode()


# --- a run of four ranks, and what it leaves


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ended(runs):
    """How a job ended that trained four times; of the overlapped, 118 steps.

    So the last one's average is outstanding at the end.
    """
    overlap = ["--algorithm", "wagma:overlap:wait=group", "--seed", 3, "--steps", 118, *UNEVEN]
    allreduce = ["--algorithm", "allreduce", "--steps", 40, "--slow-rank", "1:2"]
    trained = {
        "first": [*SETTINGS, *UNEVEN],
        "again": [*SETTINGS, "--slow-rank", "3:2"],
        "overlap": [*overlap, "--log-level", "info"],
        "allreduce": [*allreduce, "--log-level", "info"],
    }
    return train_several(runs, trained, ranks=RANKS, plots=True).check()


@pytest.fixture
def run(runs, ended):
    return runs / "first"


@pytest.mark.launch
def test_a_run_prints_its_progress_and_its_outcome_once(ended):
    lines, starting = said(ended), "wagma train: starting on 4 ranks, loading MPI and torch"
    assert lines[0] == starting and lines.count(starting) == 4
    *steps, outcome, where = lines[1 : lines.index(starting, 1)]
    assert all(re.match(r"step \d+/125  loss \d", line) for line in steps)
    assert 10 <= len(steps) <= 12
    assert re.match(r"test accuracy [\d.]+%, wall time [\d.]+ s, ", outcome)
    assert "timely" not in ended.stdout
    assert where.endswith("runs0/first")
    assert all(": info: " in line for line in ended.stderr.splitlines())  # the last two's


@pytest.mark.launch
def test_every_rank_records_every_step(run):
    for rank in range(RANKS):
        records = metrics(run, rank)
        assert all(set(one) == RECORD for one in records)
        assert [one["step"] for one in records] == list(range(125))
        assert [one["version"] for one in records] == list(range(125))
        for one in records:
            synchronized = (one["version"] + 1) % 10 == 0
            expected = range(RANKS) if synchronized else group_of(rank, RANKS, 2, one["version"])
            assert one["synchronized"] == synchronized
            assert one["group"] == list(expected)
            assert one["timely"]
            assert one["source"] == one["version"]
        elapsed = [one["elapsed_s"] for one in records]
        assert elapsed == sorted(elapsed)
        own = sum(one["compute_s"] + one["delay_s"] + one["average_s"] for one in records)
        assert 0.5 * elapsed[-1] < own < 1.001 * elapsed[-1]  # files are written in between


@pytest.mark.launch
def test_the_delays_are_the_ones_that_were_asked_for(run):
    for rank in range(RANKS):
        for one in metrics(run, rank):
            drawn = imbalance.delay("cloud", 3, one["step"], rank, RANKS, one["compute_s"]) * 0.05
            assert one["compute_s"] >= 0.002 + one["data_s"] + one["optimizer_s"]
            assert min(one["data_s"], one["optimizer_s"], one["cpu_s"]) > 0
            assert one["delay_s"] >= drawn + (0.004 if rank == 1 else 0)


@pytest.mark.launch
def test_sleeping_takes_no_processor_time(run):
    for rank in range(RANKS):
        records = metrics(run, rank)
        total = {name: sum(one[name] for one in records) for name in RECORD if name[-2:] == "_s"}
        slept = total["compute_s"] - total["cpu_s"] - total["queued_s"]
        assert slept > 0.5 * 0.002 * len(records)


@pytest.mark.launch
def test_the_configuration_is_complete(run):
    configuration = json.loads((run / "config.json").read_text())
    asked = {
        "steps": 125,
        "seed": 3,
        "algorithm": "wagma:wait=group",
        "wait": "group",
        "step_time_ms": 2.0,
        "imbalance": "cloud",
        "imbalance_scale": 0.05,
        "slow_rank": {"1": 3.0},
        "name": "first",
    }
    resolved = {"ranks": RANKS, "group_size": 2, "sync_period": 10, "batch_size": 32}
    assert configuration.items() >= (asked | resolved).items()
    assert configuration["late"] in ("paper", "conserving")
    assert configuration["threads"] >= 1
    assert configuration["versions"]["torch"] == torch.__version__
    assert configuration["versions"]["mpi"]


@pytest.mark.launch
def test_the_summary_agrees_with_the_metrics(run):
    summary = json.loads((run / "summary.json").read_text())
    everyone = [metrics(run, rank) for rank in range(RANKS)]
    assert summary["wall_s"] == max(records[-1]["elapsed_s"] for records in everyone)
    ended = RANKS * [0.0]
    for step, records in enumerate(zip(*everyone)):
        called = [end + one["compute_s"] + one["delay_s"] for end, one in zip(ended, records)]
        groups = [
            range(RANKS) if (step + 1) % 10 == 0 else group_of(rank, RANKS, 2, step)
            for rank in range(RANKS)
        ]
        ended = [max(called[member] for member in group) for group in groups]
    assert summary["bound_s"] == pytest.approx(max(ended))
    assert summary["timely_share"] == 1
    assert 0 < summary["bound_over_wall"] <= 1
    for records, seconds in zip(everyone, summary["seconds_of_rank"]):
        assert seconds["compute"] == pytest.approx(sum(one["compute_s"] for one in records))
        assert seconds["delay"] == pytest.approx(sum(one["delay_s"] for one in records))
        averaging = sum(one["average_s"] for one in records)
        assert 0 < seconds["waiting"] + seconds["communicating"] <= averaging
        assert sum(one["waiting_s"] for one in records) == pytest.approx(seconds["waiting"])
        assert sum(seconds.values()) == pytest.approx(records[-1]["elapsed_s"])


@pytest.mark.launch
def test_the_run_has_its_plots_and_every_rank_s_log(run):
    pytest.importorskip("matplotlib")
    for name in ("loss.png", "time.png"):
        assert (run / name).read_bytes().startswith(b"\x89PNG")
    for rank in range(RANKS):
        log = (run / f"rank-{rank:04}.log").read_text()
        assert f"INFO wagma.train: rank {rank} of 4 on " in log
        assert "INFO wagma.train: made 125 steps in " in log


@pytest.mark.launch
def test_the_model_file_has_the_accuracy_of_the_summary_and_it_is_good(run):
    model = small_cnn()
    state = torch.load(run / "model.pt")
    assert (run / "model.pt").stat().st_size < 1.2 * sum(v.nbytes for v in state.values()) + 10_000
    model.load_state_dict(state)
    _, test = data.load_digits()
    predicted = model(torch.from_numpy(test.images)).argmax(1)
    accuracy = (predicted.numpy() == test.labels).mean()
    assert accuracy > 0.9
    assert json.loads((run / "summary.json").read_text())["accuracy"] == pytest.approx(accuracy)


@pytest.mark.launch
def test_waiting_for_the_group_the_same_seed_gives_the_same_model_whoever_is_slow(runs, ended):
    first, again = (torch.load(runs / name / "model.pt") for name in ("first", "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    losses = [[one["loss"] for one in metrics(runs / name, 2)] for name in ("first", "again")]
    assert losses[0] == losses[1]


@pytest.mark.launch
def test_overlapped_training_learns_and_records_every_step_with_its_own_average(runs, ended):
    run = runs / "overlap"
    assert json.loads((run / "config.json").read_text())["overlap"] is True
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accuracy"] > 0.9
    assert summary["timely_share"] == 1
    assert 0 < summary["bound_over_wall"] <= 1
    assert summary["wall_s"] == max(metrics(run, rank)[-1]["elapsed_s"] for rank in range(RANKS))
    for rank, seconds in enumerate(summary["seconds_of_rank"]):
        records = metrics(run, rank)
        assert all(set(one) == RECORD for one in records)
        assert [one["step"] for one in records] == list(range(118))
        assert [one["version"] for one in records] == list(range(118))
        for one in records:
            assert one["synchronized"] == ((one["version"] + 1) % 10 == 0)
            if not one["synchronized"]:
                assert one["group"] == list(group_of(rank, RANKS, 2, one["version"]))
        averaging = sum(one["average_s"] for one in records)
        assert 0 < seconds["waiting"] + seconds["communicating"] <= averaging
        own = sum(one["compute_s"] + one["delay_s"] for one in records) + averaging
        assert 0.5 * records[-1]["elapsed_s"] < own < 1.001 * records[-1]["elapsed_s"]
    told = "late: conserving, weights: given, contraction: 0.9, overlap: True"
    assert told in (run / "rank-0000.log").read_text()


@pytest.mark.launch
def test_another_algorithm_is_recorded_with_its_own_bound(runs, ended):
    assert said(ended)[-2].endswith(", algorithm allreduce")
    run = runs / "allreduce"
    configuration = json.loads((run / "config.json").read_text())
    assert configuration["algorithm"] == "allreduce"
    assert configuration["options"] == {"compute_limit": None, "transport": None}
    assert "sync_period" not in configuration
    assert "wagma.train: algorithm: allreduce\n" in (run / "rank-0001.log").read_text()
    everyone = [metrics(run, rank) for rank in range(RANKS)]
    for one in (one for records in everyone for one in records):
        assert set(one) == RECORD
        assert one["synchronized"] and one["timely"] and one["group"] == list(range(RANKS))
    bound = sum(max(one["compute_s"] + one["delay_s"] for one in step) for step in zip(*everyone))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["bound_s"] == pytest.approx(bound)
    assert 0 < summary["bound_over_wall"] <= 1
    assert (run / "model.pt").exists()


@pytest.mark.launch
def test_its_steps_can_be_simulated(mpirun, run, tmp_path):
    options = ("--trace", run, "--ranks", "1,64", "--steps", "30", "--name", "mine")
    ended = mpirun(None, "-m", "wagma", "simulate", *options, timeout=60, cwd=tmp_path).check()
    lines = [line.split() for line in ended.stdout.splitlines()]
    walls = [float(line[2]) for line in lines if line[0].isdigit()]
    assert len(walls) == 2 * len(SIMULATED.split(","))
    assert all(wall > 30 * 0.002 for wall in walls)
