"""`wagma report`: who is slow, what that costs, what would help, and what is no straggler."""

import contextlib
import dataclasses
import json
import re
import tracemalloc

import generated_runs
import numpy as np
import pages
import pytest
from generated_runs import KINDS, RANKS, STEPS, Run, alike
from training import TIMEOUT, train_several

from wagma import cli, report
from wagma.report import analysis, exchanged, live, price, records, slow, text
from wagma.report.exchanged import Exchange
from wagma.report.findings import PARTS, PATTERNS, Report

TRACES = pages.ROOT / "benchmarks" / "traces"


def made(directory, kind=generated_runs.one_rank, seed=0, **given):
    """Return a run's directory, with this culprit."""
    run = Run(seed, **given)
    kind(run)
    return run.write(directory / "run")


def slow_ranks(found):
    return {rank for each in found.stragglers for rank in each.ranks}


# --- who is slow


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_culprit_is_named_with_its_pattern_and_its_part(tmp_path, kind):
    ranks, pattern, part = KINDS[kind]
    found = report.of(made(tmp_path, kind))
    assert found.insufficient is None
    assert slow_ranks(found) == ranks
    for each in found.stragglers:
        assert (each.pattern, each.part) == (pattern, part)
        assert 0 < each.cost.share <= found.cost.share
    assert (found.cost is not None and found.cost.share > 0.05) == bool(ranks)
    expected = [kind in (generated_runs.a_node,)] * bool(ranks)
    assert [each.whole_node for each in found.stragglers[:1]] == expected


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_culprit_is_found_on_other_runs_and_numbers_of_ranks(kind):
    ranks, pattern, _ = KINDS[kind]
    for seed in range(1, 6):
        run = Run(seed, ranks=RANKS * (1 + seed % 2), spread=0.01 * seed)
        kind(run)
        found = slow.find(run.own())
        assert {each.rank for each in found} == ranks, seed
        assert {each.pattern for each in found} <= {pattern}, seed


def test_there_is_no_false_alarm_in_200_runs_of_ranks_that_are_alike():
    found = {seed: slow.find(alike(seed)) for seed in range(200)}
    assert {seed: of for seed, of in found.items() if of} == {}


def test_the_details_of_each_pattern(tmp_path):
    found = {
        kind: report.of(made(tmp_path / kind.__name__, kind)).stragglers[0]
        for kind in (
            generated_runs.a_node,
            generated_runs.every_tenth_step,
            generated_runs.from_step_300,
            generated_runs.growing,
        )
    }
    node, tenth, later, growing = found.values()
    assert (node.node, node.name) == ("b", "node b (ranks 4, 5, 6, 7)")
    assert (tenth.every, tenth.share) == (10, 0.1)
    assert tenth.ratio == pytest.approx(1 + 0.2 / 0.0855, rel=0.05)
    assert abs(later.since - 300) <= 2
    assert later.share == pytest.approx(0.25, abs=0.02)
    assert growing.since < STEPS / 3
    assert {each.pattern for each in found.values()} < set(PATTERNS)


def test_phases_are_told_with_their_first_and_last_steps():
    times = np.exp(np.random.default_rng(0).normal(0, 0.02, (300, 4)))
    times[50:90, 2] *= 2
    times[180:230, 2] *= 2
    (found,) = slow.find(times)
    assert (found.rank, found.pattern) == (2, "in phases")
    assert np.abs(np.array(found.phases) - [(50, 89), (180, 229)]).max() <= 3


def test_half_of_the_ranks_may_be_slow():
    times = np.exp(np.random.default_rng(0).normal(0, 0.05, (100, 4)))
    times[:, :2] *= 1.5
    found = [(each.rank, each.pattern) for each in slow.find(times)]
    assert found == [(0, "always"), (1, "always")]


def test_where_the_processor_was_lost_is_outside_the_process(tmp_path):
    (found,) = report.of(made(tmp_path, generated_runs.stolen_processor)).stragglers
    lost = found.excess["outside"]
    assert lost == pytest.approx(STEPS * 0.08, rel=0.1)
    assert abs(found.excess["gradient"]) < 0.1 * lost


def test_a_processor_limit_is_outside_the_process_if_the_kernel_counts_no_queue(tmp_path):
    """The cgroup's time is of several processors, and told every tenth step."""
    run = Run(0)
    run.prolong("gradient", 0.08, 4)
    run.queued[:, 4] = 0.08
    run.throttled[9::10, 4] = 10 * 3 * 0.08
    (found,) = report.of(without_queues(run, tmp_path / "run")).stragglers
    assert (found.ranks, found.part) == ((4,), "outside")
    assert found.excess["outside"] == pytest.approx(STEPS * 0.08, rel=0.1)
    assert found.throttled_s == pytest.approx(STEPS * 3 * 0.08)
    (line,) = text.limits(found)
    assert line.startswith("its cgroup's limit on processors stopped it for 96.00 s")


def without_queues(run, path):
    """Write a run of a kernel that does not count what a thread has waited for a core."""
    run.write(path)
    for file in path.glob("rank-*.jsonl"):
        records = [json.loads(line) | {"queued_s": 0.0} for line in file.open()]
        file.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def test_a_gpu_that_lowers_its_clock_is_outside_the_process(tmp_path):
    """All GPUs reach their power caps; one becomes hot, and slow."""
    run = Run(0)
    run.gpu[:] = 0x04
    run.prolong("gradient", 0.08, 1, slice(300, None))
    run.gpu[300:, 1] |= 0x20
    run.gpu[:300, 1] = 0
    (found,) = report.of(run.write(tmp_path / "run")).stragglers
    assert found.gpu_reasons == {"temperature": pytest.approx(1.0, abs=0.01)}
    assert [*text.limits(found)] == [
        "its GPU lowered its clock: temperature (in 100 % of its slow steps)"
    ]
    assert found.throttled_s == 0


def test_a_gpu_that_alone_lowers_its_clock_loses_its_excess_outside(tmp_path):
    run = Run(0)
    generated_runs.from_step_300(run)
    run.gpu[300:, 1] = 0x20
    (found,) = report.of(run.write(tmp_path / "run")).stragglers
    assert found.part == "outside" and found.excess["gradient"] < 0.1 * found.excess["outside"]
    assert found.excess["outside"] == pytest.approx(100 * 0.08, rel=0.1)


def test_a_rank_that_averages_slowly_is_named(tmp_path):
    run = Run(0)
    run.averaging[:, 2] += 0.04
    (found,) = report.of(run.write(tmp_path / "run")).stragglers
    assert (found.ranks, found.pattern, found.part) == ((2,), "always", "averaging")
    assert found.cost.seconds == pytest.approx(STEPS * 0.04, rel=0.1)


def test_ranks_that_are_woken_late_do_not_hide_the_one_that_they_wait_for(tmp_path):
    run = Run(0, steps=120, ranks=4)
    run.prolong("gradient", 0.2, 1, slice(4, None, 10))
    run.averaging[9::10] += run.rng.exponential(0.04, run.averaging[9::10].shape)
    path = run.write(tmp_path / "run")
    recorded = records.read(path)
    own = np.array([recorded.own(rank) for rank in range(4)]).T
    assert slow.find(own) == []
    (found,) = report.of(path).stragglers
    assert (found.ranks, found.pattern, found.part) == ((1,), "now and then", "gradient")


def test_never_all_ranks_are_slow(tmp_path):
    """One of two is slow only with its part of averaging, and the other one only without."""
    run = Run(0, ranks=2)
    run.prolong("gradient", 0.04, 1)
    run.averaging[:, 0] += 0.12
    (found,) = report.of(run.write(tmp_path / "run")).stragglers
    assert found.ranks == (0,) and found.cost.share > 0
    assert found.ratio == pytest.approx(0.207 / 0.127, rel=0.05)


def test_of_two_ranks_that_are_slow_in_turn_one_is_slow(monkeypatch):
    every = np.ones(20, dtype=bool)
    both = [slow.Found(rank, "always", every) for rank in range(2)]
    monkeypatch.setattr(slow, "find", lambda times: both)
    times = np.tile([2.0, 1.0], (20, 1))
    assert [each.rank for each in analysis.slow_ranks(times, times)] == [0]


# --- equal work


def test_unequal_batches_without_told_work_are_insufficient_evidence(tmp_path):
    run = Run(0)
    lengths = run.rng.integers(100, 400, run.shape)
    lengths[:, 3] = 400
    run.elements = 32 * lengths
    run.parts["gradient"] *= lengths / 250
    found = report.of(run.write(tmp_path / "run"))
    assert "the batches of the ranks differ in size" in found.insufficient
    assert found.stragglers == ()
    assert any(found.insufficient in line for line in text.lines(found))


def test_told_work_is_divided_out(tmp_path):
    run = Run(0)
    run.work = run.rng.integers(1000, 4000, run.shape)
    run.work[:, 3] = 4000
    for part in run.parts:
        run.parts[part] *= run.work / 2500
    assert report.of(run.write(tmp_path / "alike")).stragglers == ()
    run.parts["gradient"][:, 3] *= 1.5
    found = report.of(run.write(tmp_path / "slow"))
    assert slow_ranks(found) == {3}


def run_with_lengths(mean, base=0.003, per_work=8e-6, seed=0):
    """Return a run whose steps take `base` and `per_work` of their work, of ranks' mean works."""
    run = Run(seed, ranks=len(mean))
    run.work = np.rint(mean * np.exp(run.rng.normal(0, 0.15, run.shape)))
    whole = run.own()
    for part in run.parts:
        run.parts[part] *= (base + per_work * run.work) / whole.mean()
    return run


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_whose_batches_are_short_for_good_are_no_stragglers(tmp_path, ranks):
    mean = np.full(ranks, 360.0)
    mean[: ranks // 2 : 2] = 180.0
    assert report.of(run_with_lengths(mean).write(tmp_path / "run")).stragglers == ()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_slow_rank_with_long_batches_is_a_straggler(tmp_path, ranks):
    mean = np.full(ranks, 180.0)
    mean[-1] = 360.0
    run = run_with_lengths(mean)
    run.parts["gradient"][:, -1] *= 1.5
    found = report.of(run.write(tmp_path / "run"))
    assert slow_ranks(found) == {ranks - 1}
    (straggler,) = found.stragglers
    assert (straggler.pattern, straggler.part) == ("always", "gradient")
    # 1.38 with the millisecond of averaging; of two ranks, the slow one's line counts as much.
    assert 1.25 < straggler.ratio < 1.45


def test_samples_are_work_if_all_have_equally_many_elements(tmp_path):
    run = Run(0)
    run.samples[:, 2] = 64
    run.elements = 64 * run.samples
    for part in run.parts:
        run.parts[part][:, 2] *= 2
    found = report.of(run.write(tmp_path / "run"))
    assert found.insufficient is None and found.stragglers == ()


def test_equal_work_changes_no_time_and_its_line_is_found_in_spite_of_slow_ranks():
    times = np.random.default_rng(0).lognormal(0, 0.1, (40, 4))
    assert (analysis.scale_by(np.full(times.shape, 7.0), times) == 1).all()
    assert (analysis.scale_by(1 / times, times) == 1).all()  # less work does not take longer
    work = np.random.default_rng(1).integers(100, 400, times.shape)
    times = 3.0 + 0.01 * work
    times[:, 1] *= 2
    times[::5, 2] += 8
    assert analysis.line_of(work, times) == pytest.approx((3.0, 0.01))
    assert analysis.line_of(work, 0.01 * work - 0.5) == pytest.approx((0.0, 0.01))
    constant = np.broadcast_to([100, 200, 300, 400], times.shape)
    assert analysis.line_of(constant, 3.0 + 0.01 * constant) == pytest.approx((3.0, 0.01))


def test_few_steps_and_one_rank_are_insufficient(tmp_path):
    few = report.of(made(tmp_path / "few", steps=10))
    assert few.insufficient == "10 steps are too few: 16 are needed"
    alone = report.of(Run(0, ranks=1).write(tmp_path / "alone"))
    assert alone.insufficient == "there is one rank" and alone.imbalance is None


# --- what it costs, and what would help


def test_the_price_is_the_time_that_the_job_would_save(tmp_path):
    """In synchronous training: the sum over the steps of what the slowest rank takes longer."""
    run = Run(0)
    generated_runs.from_step_300(run)
    own = run.own()
    (straggler,) = report.of(run.write(tmp_path / "run")).stragglers
    others = np.delete(own, 1, axis=1).max(axis=1)
    assert straggler.cost.seconds == pytest.approx((own.max(axis=1) - others).sum(), rel=0.02)
    assert straggler.cost.share == pytest.approx(1 - 1 / straggler.cost.slowdown)
    assert 0.9 < straggler.cost.explained < 1.2


def test_the_simulation_s_own_error_is_told(tmp_path):
    found = report.of(made(tmp_path))
    assert found.wall_s == pytest.approx(found.simulated_s, rel=0.01)
    assert found.error == found.simulated_s / found.wall_s - 1
    assert any(f"{found.error:+.1%}" in line for line in text.lines(found))


def test_the_price_is_by_the_method_of_the_run(tmp_path):
    """Two ranks that are slow in different steps of a period delay its end by one of them."""
    run = Run(0)
    run.prolong("gradient", 0.2, 2, slice(3, None, 10))
    run.prolong("gradient", 0.2, 6, slice(7, None, 10))
    waits = report.of(run.write(tmp_path / "allreduce"))
    avoids = report.of(run.write(tmp_path / "local", "local-sgd", options={"sync_period": 10}))
    assert slow_ranks(waits) == slow_ranks(avoids) == {2, 6}
    saved, half = (each.cost.share * each.simulated_s for each in (waits, avoids))
    assert half == pytest.approx(saved / 2, rel=0.05)


def test_methods_are_told_by_throughput_with_their_bounds(tmp_path):
    found = report.of(made(tmp_path, generated_runs.every_tenth_step))
    rates = [each.steps_per_s for each in found.remedies]
    assert rates == sorted(rates, reverse=True)
    assert all(each.bound >= 0.999 * each.steps_per_s for each in found.remedies)
    of = {each.algorithm: each for each in found.remedies}
    assert len(of) == len(found.remedies) > 10
    assert of["allreduce"].ratio == 1
    assert of["allreduce"].loss == pytest.approx(found.stragglers[0].cost.share, rel=0.05)
    assert of["wagma"].loss < of["allreduce"].loss


def test_a_slower_network_slows_methods_that_send_more(tmp_path):
    run = made(tmp_path)
    (run / "config.json").write_text(
        json.dumps(json.loads((run / "config.json").read_text()) | {"model_bytes": 10**9})
    )
    fast, slow_one = (
        {each.algorithm: each for each in report.of(run, machine).remedies}
        for machine in ("hdr", "10gbe")
    )
    assert slow_one["allreduce"].steps_per_s < 0.5 * fast["allreduce"].steps_per_s


def test_ranks_that_trained_for_a_time_are_priced_by_their_steps(tmp_path):
    run = Run(0)
    generated_runs.one_rank(run)
    seconds = 20.0
    found = report.of(run.write(tmp_path / "run", seconds=seconds))
    (straggler,) = found.stragglers
    assert found.wall_s == seconds
    own = run.own()
    without = np.delete(own, 3, axis=1).max(axis=1).mean() / own.max(axis=1).mean()
    assert straggler.cost.share == pytest.approx(1 - without, abs=0.02)


def test_a_run_for_a_time_that_has_not_ended_is_measured_so_far(tmp_path):
    run = Run(0)
    generated_runs.one_rank(run)
    found = report.of(run.write(tmp_path / "run", seconds=10_000.0))
    so_far = float((run.own() + run.averaging).max(axis=1).sum())
    assert found.wall_s == pytest.approx(so_far)
    assert found.error == pytest.approx(0, abs=0.02)
    assert found.steps_per_s == pytest.approx(run.own().size / so_far)
    assert 0 < found.cost.seconds < so_far


def test_steps_for_a_time_last_for_it_without_the_straggler_as_well(tmp_path):
    """The others are slow in turn: their median is far shorter than the steps of each."""
    run = Run(0, ranks=4)
    run.prolong("gradient", 0.4, 3)
    for rank in range(3):
        run.prolong("gradient", 0.2, rank, slice(rank, None, 3))
    found = report.of(run.write(tmp_path / "run", seconds=1000.0))
    assert slow_ranks(found) == {3}
    assert found.stragglers[0].cost == found.cost and 0 < found.cost.share < 1
    assert found.remedies


def test_what_cannot_be_simulated_has_no_cost(tmp_path, monkeypatch):
    path = made(tmp_path)

    def fail(job, without):
        raise price.NotSimulated("no")

    monkeypatch.setattr(price.Job, "cost", fail)
    found = report.of(path)
    assert slow_ranks(found) == {3} and found.simulated_s > 0
    assert found.cost is found.stragglers[0].cost is found.imbalance.cost is None
    assert text.headline(found) is None and len([*text.lines(found)]) == 3


@pytest.mark.parametrize("own", [0.0, 1e-12])
def test_steps_that_take_no_time_do_not_last(tmp_path, own):
    with pytest.raises(price.NotSimulated, match="next to no time"):
        price.lasting(np.array([[1.0, 1.0], [own, own]]), 10.0)
    table = tmp_path / "table.csv"
    table.write_text(40 * f"1,1,{own}\n")
    assert report.of(table).remedies == ()
    table.write_text(40 * "0,0,0\n")
    assert report.of(table).simulated_s is None


def test_where_no_step_ends_in_the_run_s_time_no_method_is_compared(tmp_path, monkeypatch):
    run = Run(0)
    written = run.write(tmp_path / "run", seconds=20.0)
    assert report.of(written).remedies
    monkeypatch.setattr(price.Job, "rate", lambda *arguments: 0.0)
    assert report.of(written).remedies == ()


def test_a_line_that_is_completed_while_it_is_read_is_left_out():
    class Growing:
        """A file of which more is written when its end was reached."""

        def __init__(self, *lines):
            self.lines = iter(lines)

        def open(self, mode):
            return contextlib.nullcontext(self)

        def __iter__(self):
            return self

        def __next__(self):
            if (line := next(self.lines)) is None:
                raise StopIteration
            return line

    line = b'{"compute_s": 1.0, "delay_s": 0.5}\n'
    columns = records.columns_of(Growing(line, line[:9], None, line[9:], line, None))
    assert columns["compute_s"].tolist() == [1.0]


def test_ranks_that_made_different_numbers_of_steps_trained_for_a_time(tmp_path):
    path = made(tmp_path)
    file = path / "rank-0003.jsonl"
    file.write_text("".join(file.open().readlines()[: STEPS * 2 // 3]))
    config = json.loads((path / "config.json").read_text())
    own_pace = {"algorithm": "wagma:pace=own", "options": {"pace": "own"}}
    (path / "config.json").write_text(json.dumps(config | own_pace))
    found = report.of(path)
    assert slow_ranks(found) == {3}
    assert [rank.steps for rank in found.ranks[2:5]] == [STEPS, STEPS * 2 // 3, STEPS]
    # No other rank waits for it: a rank of 8 is missing for a part of the time.
    assert 0 < found.cost.share < 1 / RANKS


def test_a_method_that_cannot_be_simulated_has_no_price(tmp_path):
    run = Run(0)
    generated_runs.one_rank(run)
    found = report.of(run.write(tmp_path / "run", "sorcery"))
    assert slow_ranks(found) == {3}
    assert found.stragglers[0].cost is None and found.simulated_s is None
    assert found.remedies == () and text.headline(found) is None
    assert text.advice(found) == text.slowness(found.stragglers[0])


# --- the line at the end of a training


def test_several_stragglers_are_priced_together(tmp_path):
    found = report.of(made(tmp_path, generated_runs.two_ranks))
    assert found.cost.share > 10 * max(each.cost.share for each in found.stragglers)
    line = text.headline(found)
    first, second = (each.name for each in found.stragglers)
    assert line.startswith(f"{first} took 1.6 ×") and f", as {second} did: " in line
    assert f"{100 * found.cost.share:.0f} % of the throughput" in line


def test_the_line_at_the_end_names_and_prices_the_straggler(tmp_path):
    found = report.of(made(tmp_path, generated_runs.data_loading))
    share = f"{100 * found.stragglers[0].cost.share:.0f} %"
    start = "rank 0 took 1.7 × the others' median in 100 % of steps, in data loading: "
    assert text.headline(found).startswith(f"{start}{share} of the throughput; --algorithm ")
    assert text.advice(found) == text.headline(found)


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        (generated_runs.nothing, "no rank costs 5 % of the throughput; "),
        (generated_runs.noise, "no straggler, but unequal steps on all ranks: "),
    ],
)
def test_no_straggler_is_named_where_there_is_none(tmp_path, kind, start):
    found = report.of(made(tmp_path, kind))
    assert text.headline(found) is None and text.advice(found).startswith(start)


@pytest.mark.parametrize("own", ["allreduce", "wagma:pace=own"])
def test_the_line_at_the_end_names_the_method_that_would_make_the_most_steps(tmp_path, own):
    run = Run(0)
    generated_runs.one_rank(run)
    found = report.of(run.write(tmp_path / "run", own, options={"pace": "own"}, seconds=20.0))
    best = next(each for each in found.remedies if each.algorithm != own)
    said = f"; --algorithm {best.algorithm} would make about {best.ratio:.2f} × the steps in the"
    least = dataclasses.replace(best, ratio=1.04)
    assert (said in text.advice(found)) == (best.ratio >= 1.05) == (own == "allreduce")
    few = text.advice(dataclasses.replace(found, remedies=(least,)))
    assert few.endswith("; no other method would make 5 % more steps")
    assert text.advice(dataclasses.replace(found, remedies=())).endswith(" of the throughput")


def test_the_line_at_the_end_prices_steps_that_are_unequal_on_all_ranks():
    line = text.advice(report.of(TRACES / "bytedance-SE.csv"))
    start = "no straggler, but unequal steps on all ranks: 24 % of the throughput; --algorithm "
    assert line.startswith(start)


def test_the_line_at_the_end_says_why_there_is_no_evidence(tmp_path):
    found = report.of(Run(0, steps=10).write(tmp_path / "run"))
    assert text.advice(found) == f"insufficient evidence of who is slow: {found.insufficient}"


@pytest.mark.parametrize("otherwise", ["", "nothing is known"])
def test_a_report_that_fails_does_not_fail_the_training(
    tmp_path, monkeypatch, caplog, capsys, otherwise
):
    from wagma.train import print_report  # not at the top: it loads MPI and torch

    def fail(run):
        raise price.NotSimulated("no such thing")

    monkeypatch.setattr(report, "of", fail)
    with caplog.at_level("INFO", "wagma"):
        print_report(tmp_path, {"steps_of_rank": [3]}, text.advice, otherwise)
    (record,) = caplog.records
    assert record.levelname == "INFO" and record.exc_info and "no such thing" in record.message
    line = f"{otherwise} (wagma report {tmp_path})\n" if otherwise else ""
    assert capsys.readouterr().out == line


def test_a_long_run_is_not_read_at_its_end(tmp_path, monkeypatch, capsys):
    from wagma import train  # not at the top: it loads MPI and torch

    monkeypatch.delattr(report, "of")
    train.print_report(tmp_path, {"steps_of_rank": [train.PRICED, 1]}, text.advice, "it was long")
    assert capsys.readouterr().out == f"it was long (wagma report {tmp_path})\n"


# --- warnings while a job runs


def looked(path, caplog, seconds):
    """Return the warnings of a rank that looks after these seconds."""
    clock = [0.0]
    watch = live.Watch(path, clock=lambda: clock[0])
    caplog.clear()
    with caplog.at_level("INFO", "wagma"):
        for clock[0] in seconds:
            watch.look()
    return caplog.messages


def test_a_slow_rank_is_warned_of_once_a_minute(tmp_path, caplog):
    path = made(tmp_path, generated_runs.from_step_300)
    assert looked(path, caplog, [1, 59]) == []
    message = "in the last steps, rank 1 took 1.9 × the others' median in 50 % of steps, in forward"
    warnings = looked(path, caplog, [61, 62, 100, 122])
    assert [each[: len(message)] for each in warnings] == 2 * [message]


@pytest.mark.parametrize("kind", [generated_runs.nothing, generated_runs.noise])
def test_there_is_no_warning_of_ranks_that_are_alike(tmp_path, caplog, kind):
    assert looked(made(tmp_path, kind), caplog, [61]) == []


def test_ranks_that_are_at_other_steps_are_compared_by_those_of_all(tmp_path, caplog):
    path = made(tmp_path)
    file = path / "rank-0003.jsonl"
    file.write_text("".join(file.open().readlines()[:-50]) + '{"step": 3')
    (warning,) = looked(path, caplog, [61])
    assert "rank 3 took 1.5 × the others' median in 100 % of steps" in warning


def test_ranks_that_have_no_step_in_common_are_compared_by_the_last_ones_of_each(tmp_path, caplog):
    """As at their own pace, where the slow one is hundreds of steps behind."""
    path = made(tmp_path)
    file = path / "rank-0003.jsonl"
    file.write_text("".join(file.open().readlines()[: STEPS - live.LAST]))
    (warning,) = looked(path, caplog, [61])
    assert "rank 3 took 1.5 × the others' median in 100 % of steps" in warning
    file.write_text("".join(file.open().readlines()[: slow.ENOUGH]))
    assert looked(path, caplog, [61]) == []


def test_ranks_that_make_no_steps_are_left_out(tmp_path, caplog):
    path = made(tmp_path)
    (path / "rank-0000.jsonl").write_text("")
    (warning,) = looked(path, caplog, [61])
    assert "rank 3 took 1.5 ×" in warning
    found = report.of(path)
    assert slow_ranks(found) == {3} and [rank.rank for rank in found.ranks] == [*range(1, RANKS)]


def test_nothing_is_said_of_ranks_that_have_written_nothing_here(tmp_path, caplog):
    path = made(tmp_path)
    (path / "rank-0005.jsonl").unlink()
    (message,) = looked(path, caplog, [61])
    assert message.startswith("no look for stragglers: ") and "rank-0005" in message


def test_a_look_that_fails_is_logged_only(tmp_path, caplog, monkeypatch):
    def fail(recorded):
        raise ZeroDivisionError("by chance")

    monkeypatch.setattr(live, "compared", fail)
    assert looked(made(tmp_path), caplog, [61]) == ["no look for stragglers: by chance"]
    assert caplog.records[0].exc_info


def test_of_many_ranks_some_are_looked_at():
    assert live.evenly(3) == [0, 1, 2] and live.evenly(64) == [*range(64)]
    for ranks in (65, 100, 1024):
        looked_at = live.evenly(ranks)
        assert len({*looked_at}) == live.RANKS and {*looked_at} <= {*range(ranks)}
    assert live.evenly(128) == [*range(0, 128, 2)]


def test_only_the_ranks_looked_at_are_read(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(live, "RANKS", 4)
    path = made(tmp_path, generated_runs.two_ranks)  # ranks 2 and 6
    for rank in range(1, RANKS, 2):
        (path / f"rank-{rank:04}.jsonl").unlink()
    (warning,) = looked(path, caplog, [61])
    assert "rank 2 took" in warning or "rank 6 took" in warning


@pytest.mark.parametrize("more", [0, 50, 5000])
def test_as_many_steps_are_compared_whatever_the_length_of_a_record(tmp_path, more):
    """Every tenth record is longer, and the last one is not whole."""
    file = tmp_path / "rank-0000.jsonl"
    written = [{"step": n, "group": (more if n % 10 == 9 else more // 2) * [0]} for n in range(900)]
    file.write_text("".join(json.dumps(each) + "\n" for each in written) + '{"step": 900')
    assert live.end_of(file) == written[-live.LAST :]
    file.write_text('{"step": 0}\n{"step": 1')
    assert live.end_of(file) == [{"step": 0}]
    file.write_text('{"step": 0')
    assert live.end_of(file) == []


class Native:
    """The engine's part of a collective of ranks that are not here."""

    def __init__(self):
        self.gathered = 0, b""

    def tell_with_operations(self, count):
        self.numbers = np.zeros(count)

    def tell(self, numbers):
        self.numbers = numbers.copy()
        return True

    def told(self, known):
        return None if known == self.gathered[0] else self.gathered


def told_of(run, steps, period, idle=0):
    """Return the exchange of rank 0, when ranks have averaged once in a period of their steps."""
    ranks = range(run.shape[1] + idle)
    exchanges = [Exchange(Native(), [*ranks] if rank == 0 else []) for rank in ranks]
    natives = [each._native for each in exchanges]
    spent = run.own() + run.averaging
    waiting = spent.max(axis=1, keepdims=True) - spent
    ended = np.cumsum(spent.max(axis=1))
    for step in range(steps):
        for rank in ranks[: run.shape[1]]:
            exchanges[rank].add(run.record(step, rank, float(waiting[step, rank]), ended[step]))
        if (step + 1) % period == 0:
            told = b"".join(native.numbers.tobytes() for native in natives)
            natives[0].gathered = (step + 1) // period, told
        exchanges[0].look()
    return exchanges[0]


def warned(path, exchange, caplog):
    """Return what rank 0 says after a minute in which it was told of something."""
    clock = [0.0]
    watch = live.Watch(path, exchange, lambda: clock[0])
    watch.heard = True
    clock[0] = 61.0
    caplog.clear()
    with caplog.at_level("INFO", "wagma"):
        watch.look()
    return caplog.messages


def configured(directory, ranks=RANKS):
    """Write the configuration of a run whose other files are on other disks."""
    path = Run(0, steps=1, ranks=ranks).write(directory / "run")
    for file in path.glob("rank-*.jsonl"):
        file.unlink()
    return path


@pytest.mark.parametrize(("period", "steps"), [(1, "steps"), (4, "periods of 4 steps")])
def test_a_slow_rank_is_warned_of_by_what_ranks_tell_each_other(tmp_path, caplog, period, steps):
    run = Run(0)
    generated_runs.data_loading(run)
    exchange = told_of(run, STEPS, period)
    assert warned(configured(tmp_path), exchange, caplog) == [
        f"in the last steps, rank 0 took 1.7 × the others' median in 100 % of {steps}, in data "
        "loading"
    ]


@pytest.mark.parametrize("kind", [generated_runs.nothing, generated_runs.noise])
def test_ranks_that_are_alike_and_tell_each_other_are_not_warned_of(tmp_path, caplog, kind):
    run = Run(0)
    kind(run)
    assert warned(configured(tmp_path), told_of(run, STEPS, 2), caplog) == []


def test_what_is_told_is_what_is_recorded(tmp_path):
    """Except what is not told; of a rank that makes no steps there is nothing."""
    run = Run(0, steps=60)
    generated_runs.stolen_processor(run)
    (told, steps) = told_of(run, 60, 1, idle=1).recorded(tmp_path, {})
    read = records.read(run.write(tmp_path / "run"))
    assert (steps, told.ranks) == (1, read.ranks)
    for name in ("compute_s", "data_s", "queued_s", "samples", "work"):
        np.testing.assert_allclose(told.column(name), read.column(name)[1:], atol=1e-9)
    for name in ("gradient", "other", "waiting"):
        np.testing.assert_allclose(told.part(name), read.part(name)[1:], atol=1e-9)


def test_the_last_averages_over_all_ranks_are_kept():
    run = Run(0)
    run.prolong("gradient", 0.1, 3, slice(0, 150))
    told, _ = told_of(run, STEPS, 1).recorded(None, {})
    assert told.compared == exchanged.LAST
    assert told.column("compute_s")[:, 3].max() < 0.15
    few = told_of(run, 1, 1)
    assert few.recorded(None, {}) is None


def test_files_are_read_where_ranks_have_told_nothing_new(tmp_path, caplog):
    """They go on at their own pace, or have told of too few steps yet."""
    path = made(tmp_path, generated_runs.two_ranks)
    run = Run(0)
    generated_runs.data_loading(run)
    for exchange, heard in ((told_of(run, STEPS, 1), False), (told_of(run, 10, 1), True)):
        clock = [0.0]
        watch = live.Watch(path, exchange, lambda: clock[0])  # noqa: B023
        exchange.look = lambda: False
        watch.heard, clock[0] = heard, 61.0
        caplog.clear()
        with caplog.at_level("INFO", "wagma"):
            watch.look()
        (warning,) = caplog.messages
        assert "rank 2 took 1.6 ×" in warning or "rank 6 took 1.6 ×" in warning


# --- production jobs, whose results are published (Lin et al., OSDI 2025)


def test_the_slow_replica_of_a_production_job_is_named_and_priced():
    found = report.of(TRACES / "bytedance-AR.csv")
    (straggler,) = found.stragglers
    assert (straggler.ranks, straggler.pattern, straggler.share) == ((0,), "always", 1.0)
    assert straggler.cost.slowdown == pytest.approx(46.3 / 23.5, rel=0.1)
    assert straggler.part is None


def test_unequal_steps_of_a_production_job_are_no_straggler():
    found = report.of(TRACES / "bytedance-SE.csv")
    assert found.stragglers == () and found.size == 32
    assert found.imbalance.everywhere
    assert found.imbalance.cost.slowdown == pytest.approx(4 / 3, rel=0.05)


def test_nothing_is_found_between_replicas_that_are_alike():
    found = report.of(TRACES / "bytedance-ST.csv")
    assert found.stragglers == () and not found.imbalance.everywhere
    assert "no straggler: no rank is slower than the others" in list(text.lines(found))


# --- the page that explains the words


def explained():
    """Return what the page says that a report says, as patterns by these words."""
    page = pages.ROOT / "docs" / "which-straggler.md"
    words = re.findall(r"^\| `([^`]+)` \|", page.read_text(), re.MULTILINE)
    return {each: re.compile(".*".join(map(re.escape, each.split("…")))) for each in words}


def worded(found):
    """Yield the lines of reports with every part, pattern, limit and kind of evidence there is."""
    (straggler,) = found.stragglers
    more = {"every": 50, "since": 120, "phases": ((10, 40), (90, 200)), "throttled_s": 9.0}
    more["gpu_reasons"] = {"temperature": 0.5}
    kinds = [{"part": part} for part in PARTS] + [{"pattern": pattern} for pattern in PATTERNS]
    kinds += [{"whole_node": True}, {"pattern": "now and then", "every": None}]
    for kind in kinds:
        each = dataclasses.replace(straggler, **{**more, **kind})
        yield from text.lines(dataclasses.replace(found, stragglers=(each, each)))
    unequal = dataclasses.replace(found.imbalance, everywhere=True)
    for imbalance in (found.imbalance, unequal):
        nobody = {"stragglers": (), "cost": None, "imbalance": imbalance}
        yield from text.lines(dataclasses.replace(found, **nobody))


def test_the_page_explains_every_line_of_a_report_and_no_other(tmp_path):
    lines = set(worded(report.of(made(tmp_path / "slow"))))
    unequal = Run(0)
    unequal.elements *= 1 + unequal.rng.integers(4, size=unequal.shape)
    for number, run in enumerate([Run(0, steps=10), Run(0, ranks=1), unequal]):
        lines |= set(text.lines(report.of(run.write(tmp_path / str(number)))))
    rows = explained()
    assert [words for words, row in rows.items() if not any(map(row.search, lines))] == []
    for line in lines:
        needed = 3 if "× the others' median" in line else 1  # who, the part, the pattern
        found = [words for words, row in rows.items() if row.search(line)]
        assert ": allreduce, " in line or len(found) >= needed, (line, found)


# --- the command


def run_command(capsys, *words):
    assert cli.main(["report", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_command_prints_the_report(tmp_path, capsys):
    path = made(tmp_path, generated_runs.data_loading)
    first, straggler, cost, *rest = run_command(capsys, path).splitlines()
    assert first == f"{path}: allreduce, 8 ranks, 400 steps compared"
    assert straggler.startswith("rank 0 took 1.7 × the others' median in 100 % of steps, in data")
    assert cost.startswith("  it costs ")
    table = rest[rest.index("") + 1 :]
    headings = table[0].split("  ")
    assert headings[0] == "rank" and "data ms" in table[0] and "waiting ms" in table[0]
    assert [line.split()[0] for line in table[1 : 1 + RANKS]] == list(map(str, range(RANKS)))
    assert "in simulated time; says nothing about accuracy:" in rest


def test_of_many_ranks_the_slowest_are_in_the_table(tmp_path):
    run = Run(0, steps=20, ranks=40)
    run.prolong("gradient", 0.04, 39)
    run.prolong("gradient", -0.04, 0)
    found = text.columns(report.of(run.write(tmp_path / "run", nodes=40 * ["a"])))
    assert len(found["rank"]) == text.ROWS
    assert "39" in found["rank"] and "0" not in found["rank"]


def test_json_has_every_field(tmp_path, capsys):
    path = made(tmp_path)
    found = json.loads(run_command(capsys, path, "--json"))
    assert found.keys() == {field.name for field in dataclasses.fields(Report)}
    assert found["stragglers"][0]["ranks"] == [3]
    assert found == json.loads(json.dumps(report.of(path).as_dict()))


def test_a_run_that_is_still_written_is_read_to_its_last_whole_line(tmp_path):
    path = made(tmp_path)
    file = path / "rank-0002.jsonl"
    file.write_text(file.read_text()[:-30])
    assert report.of(path).compared == STEPS - 1


def test_a_long_run_takes_little_memory(tmp_path):
    """In bytes of each step and rank: 100,000 steps of 8 ranks take 64 MB, and less than 100 MB."""
    steps = 20 * records.LINES + 5
    path = Run(0, steps=steps, ranks=1).write(tmp_path / "run")
    tracemalloc.start()
    recorded = records.read(path)
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert recorded.counts == (steps,)
    assert kept < 80 * steps
    assert most < 120 * steps + 8192 * records.LINES


def test_records_are_read_as_they_are_however_many_there_are(tmp_path):
    """Also at the ends of what is read at once; null is 0, and so is what is not recorded."""
    file = tmp_path / "rank-0000.jsonl"
    for count in (0, 1, records.LINES, records.LINES + 1):
        written = [{"compute_s": step, "delay_s": 0, "loss": None} for step in range(count)]
        file.write_text("".join(json.dumps(each) + "\n" for each in written) + '{"compute_s')
        columns = records.columns_of(file, ("compute_s", "loss", "new"))
        assert columns["compute_s"].tolist() == list(range(count))
        assert np.isnan([columns["loss"], columns["new"]]).all()


def test_a_line_that_is_no_record_is_named(tmp_path):
    path = Run(0, steps=records.LINES + 10, ranks=2).write(tmp_path / "run")
    file = path / "rank-0000.jsonl"
    lines = file.read_text().splitlines()
    for wrong in ('{"step": 3}', "1, 2", '{"compute_s": null, "delay_s": 0}', "{"):
        lines[records.LINES + 4] = wrong
        file.write_text("\n".join(lines) + "\n")
        message = f"line {records.LINES + 5}: no record with compute_s and delay_s"
        with pytest.raises(ValueError, match=message):
            report.of(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, "cannot read "),
        ("empty", {}, "has no rank-*.jsonl: is it a run of wagma train?"),
        ("broken", {"config.json": "{}", "rank-0000.jsonl": "[]\n"}, "rank-0000.jsonl, line 1: no"),
        ("none", {"config.json": "{}", "rank-0000.jsonl": ""}, "has no steps"),
        ("without", {"rank-0000.jsonl": ""}, "config.json: No such file"),
        ("cut", {"config.json": "", "rank-0000.jsonl": ""}, "config.json is damaged: Expecting"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path, capsys, name, content, message):
    if content is not None:
        (tmp_path / name).mkdir()
        for file, written in content.items():
            (tmp_path / name / file).write_text(written)
    assert cli.main(["report", str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("wagma: error: ") and message in line


# --- real ranks

SLOW_DATA = """
import time

import torch


def model():
    return torch.nn.Linear(8, 1)


def data(rank, size, batch_size, seed):
    def batches():
        while True:
            time.sleep(0.04 if rank == 1 else 0.0)
            yield torch.ones(batch_size, 8)

    return batches(), []


def loss(model, batch):
    return model(batch).square().mean()


def work(batch):
    return len(batch)
"""


@pytest.mark.launch
@pytest.mark.timeout(TIMEOUT + 20)
def test_a_rank_that_loads_data_slowly_is_named_after_its_training(tmp_path):
    script = tmp_path / "slow_data.py"
    script.write_text(SLOW_DATA)
    common = ["--steps", 60, "--step-time", 20, "--algorithm", "allreduce"]
    jobs = {"data": ["--script", script, *common], "delay": [*common, "--slow-rank", "2:4"]}
    ended = train_several(tmp_path, jobs, ranks=3).check()
    lines = [line for line in ended.stdout.splitlines() if line.endswith(")")]
    assert [line.partition(" (")[2] for line in lines] == [
        f"wagma report {tmp_path / name})" for name in jobs
    ]
    assert lines[0].startswith("rank 1 took ") and "in data loading: " in lines[0]
    assert lines[1].startswith("rank 2 took ") and "in injected delay: " in lines[1]
    for name, rank in (("data", 1), ("delay", 2)):
        found = report.of(tmp_path / name)
        assert slow_ranks(found) == {rank}
        assert found.stragglers[0].pattern == "always"
        assert found.ranks[0].node is not None
    assert json.loads((tmp_path / "data/rank-0000.jsonl").open().readline())["work"] == 32
