"""``wagma compare``: its figures, its table, its files, and how it fails."""

import argparse
import json
import math
from contextlib import contextmanager

import pytest
import torch
from mpi4py import MPI
from torch import nn
from training import said

from wagma import cli, comparison, imbalance, show
from wagma.evaluation import copy_of, evaluate_kept, mean_over_ranks
from wagma.job import UsageError
from wagma.methods import METHODS
from wagma.runs import Tally, recorded, summarize
from wagma.tasks import local
from wagma.tasks.contract import Task
from wagma.trainer import Trainer

ALONE = MPI.COMM_SELF


def summary(rate=100.0, share=0.9, values=(0.5, 0.9), metric="accuracy", **more):
    """A run's summary, with an evaluation at every second."""
    evaluations = [
        {"step": 10 * n, "elapsed_s": float(n), metric: value} for n, value in enumerate(values, 1)
    ]
    return {
        "samples_per_s": rate,
        "bound_over_wall": share,
        "waiting_share": 0.25,
        "mean_staleness": None,
        "bytes_sent": 2_000_000,
        "metrics": [metric, "other"],
        metric: values[-1],
        "evaluations": evaluations,
        **more,
    }


# --- figures


def test_an_algorithms_figures_are_medians_and_its_ratios_are_seed_by_seed():
    first = [summary(100, 0.9), summary(10, 0.6), summary(1, 0.9)]
    of = [summary(rate, 0.9, (value,)) for rate, value in ((150, 0.8), (14, 0.9), (3, 0.7))]
    figures = comparison.figures(of, first, None)
    assert figures["samples_per_s"] == 14
    assert figures["ratio"] == 1.5
    assert figures["bound_ratio"] == pytest.approx(1.5)
    assert figures["mean"] == pytest.approx(0.8) and figures["deviation"] == pytest.approx(0.1)
    assert figures["target_s"] is None and figures["mean_staleness"] is None
    assert comparison.figures(of[:1], first[:1], None)["deviation"] is None


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_the_deviation_over_seeds_of_which_one_is_lost_is_not_a_number(lost):
    of = [summary(values=(1.0, value), metric="loss") for value in (lost, 0.3)]
    figures = comparison.figures(of, of, None)
    assert math.isnan(figures["deviation"])
    assert comparison.rows({"one": figures}, None)["loss"] == [f"{lost} ± nan"]


def run_by_time(steps, possible):
    """Return the summary of two ranks that make steps of 16 samples in 10 s, as by `summarize`."""
    tallies = [Tally(None, 10.0) for _ in steps]
    for tally, count in zip(tallies, steps):
        for number in range(1, count + 1):
            tally.add(
                {
                    **{"compute_s": 10 / count, "delay_s": 0.0, "elapsed_s": 10 * number / count},
                    **{"loss": 0.5, "samples": 16, "synchronized": True},
                }
            )
    return summary() | summarize(tallies, lambda times, limit: possible)


def test_by_time_the_ratio_of_bounds_is_that_of_the_steps_that_the_methods_could_make():
    waits, never_waits = run_by_time((8, 8), possible=20), run_by_time((45, 9), possible=60)
    figures = comparison.figures([never_waits], [waits], None)
    assert figures["ratio"] == pytest.approx(54 / 16)
    assert figures["bound_over_wall"] == pytest.approx(54 / 60)
    assert figures["bound_ratio"] == pytest.approx(60 / 20)


@pytest.mark.parametrize(
    ("metric", "values", "target", "seconds"),
    [
        ("accuracy", (0.5, 0.9, 0.8), 0.9, 2.0),
        ("accuracy", (0.5, 0.9, 0.8), 0.95, None),
        ("loss", (0.5, 0.2, 0.3), 0.3, 2.0),
        ("loss", (0.5, 0.2, 0.3), 0.1, None),
        ("loss", (math.nan, 0.2), 0.3, 2.0),
        ("bleu", (20.0, 65.0), 60.0, 2.0),
        ("return", (20.0, 450.0, 500.0), 475.0, 3.0),
        ("return", (20.0, 450.0), 475.0, None),
    ],
)
def test_the_target_is_reached_with_the_first_evaluation_that_is_as_good(
    metric, values, target, seconds
):
    of = [summary(values=values, metric=metric)]
    for each in of:
        each["metrics"].insert(0, "loss")
        each["loss"] = each.get("loss", 1.0)
    figures = comparison.figures(of, of, target)
    assert figures["metric"] == metric
    assert figures["target_s"] == seconds
    assert figures["reached"] == (seconds is not None)


@pytest.mark.parametrize(
    ("names", "metric"),
    [
        (["f1"], "f1"),
        (["Accuracy", "top5"], "Accuracy"),
        (["f1", "loss"], None),
        (["acc", "accuracy"], None),
        (["perplexity"], None),
        ([], None),
    ],
)
def test_a_target_is_refused_for_a_metric_that_may_rise_or_fall(names, metric):
    comparison.check_target(None, names)
    if metric is None:
        comparison.check_target(0.9, names)
        return
    with pytest.raises(UsageError) as raised:
        comparison.check_target(0.9, names)
    assert str(raised.value).startswith(f"argument --target: whether {metric!r} rises is not known")
    assert comparison.time_to(summary(values=(0.1, 0.95), metric=metric), metric, 0.9) == math.inf


F1 = """
import torch

model = lambda: torch.nn.Linear(3, 1)

def data(rank, size, batch_size, seed):
    return [torch.ones(batch_size, 3)], [torch.ones(2, 3)] if rank == size - 1 else []

loss = lambda model, batch: model(batch).square().mean()
metrics = lambda model, batch: {"f1": 0.1}
"""


def test_a_target_for_a_script_s_own_metric_is_refused_before_it_is_trained(tmp_path):
    script = tmp_path / "f1.py"
    script.write_text(F1)
    words = ["compare", "--script", str(script), "--steps", "4", "--algorithms", "allreduce"]
    given = cli.make_parser().parse_args([*words, "--target", "0.9", "--runs-dir", str(tmp_path)])
    given.check(given)
    given.log_level = "warning"
    with pytest.raises(UsageError, match="^argument --target: whether 'f1' rises is not known"):
        given.command(given, ALONE, argparse.Namespace(received=0))
    assert not list(tmp_path.glob("*/seed-*"))


def test_a_target_that_most_seeds_miss_is_not_reached():
    hits, misses = summary(values=(0.5, 0.9)), summary(values=(0.5, 0.6))
    assert comparison.figures([hits, hits, misses], 3 * [hits], 0.9)["target_s"] == 2.0
    assert comparison.figures([hits, misses, misses], 3 * [hits], 0.9)["target_s"] is None


def test_the_table_has_a_dash_for_what_is_not_known():
    known, unknown = summary(mean_staleness=1.5), summary(bytes_sent=None)
    results = {
        label: comparison.figures([each], [known], 0.95)
        for label, each in {"one": known, "other": unknown}.items()
    }
    rows = comparison.rows(results, 0.95)
    assert rows["accuracy"] == ["90 %", "90 %"]
    assert rows["s to 95 %"] == ["–", "–"]
    assert rows["staleness"] == ["1.50", "–"]
    assert rows["MB sent"] == ["2.0", "–"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, "–"),
        (0, "–"),
        (4, "0.0000040"),
        (1_234, "0.0012"),
        (96_000, "0.096"),
        (560_000, "0.56"),
        (9_960_000, "10.0"),
        (1_234_567_890, "1,234.6"),
    ],
)
def test_what_was_sent_is_a_dash_for_nothing_and_has_two_digits_however_little(nbytes, text):
    of = [summary(bytes_sent=nbytes)]
    assert comparison.rows({"one": comparison.figures(of, of, None)}, None)["MB sent"] == [text]


def test_a_target_that_is_no_accuracy_is_in_the_table_as_it_was_given():
    of = [summary(values=(0.5, 0.2), metric="loss")]
    rows = comparison.rows({"one": comparison.figures(of, of, 0.3)}, 0.3)
    assert rows["s to 0.3"] == ["2.00"] and rows["loss"] == ["0.2"]


def test_without_test_batches_there_is_still_a_table(capsys):
    bare = {**summary(), "metrics": [], "evaluations": [{"step": 10, "elapsed_s": 1.0}]}
    results = {"one": comparison.figures([bare], [bare], 0.5)}
    show.table({"algorithm": list(results), **comparison.rows(results, 0.5)})
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["algorithm", "samples/s"]
    assert line.split()[:2] == ["one", "100"]


# --- what an algorithm's own options become


def check(*words):
    settings = cli.make_parser().parse_args(["compare", *words])
    settings.check(settings)
    return recorded(settings)["compared"]


def test_common_options_are_of_those_that_take_them_and_own_options_come_first():
    text = "allreduce,wagma,wagma:sync-period=5:late=paper:overlap"
    compared = check("--algorithms", text, "--sync-period", "20")
    assert list(compared) == text.split(",")
    allreduce, common, own = compared.values()
    assert allreduce == {"compute_limit": None, "transport": None}
    assert common["sync_period"] == 20 and common["overlap"] is False
    assert (own["sync_period"], own["late"], own["overlap"]) == (5, "paper", True)


def test_without_a_choice_all_are_compared_with_allreduce():
    compared = check()
    assert next(iter(compared)) == "allreduce"
    assert compared == {name: METHODS[name].resolved({}) for name in METHODS}


# --- evaluations on the way


TASK = Task(
    "squares",
    model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
    data=lambda rank, size, batch_size, seed: (
        [torch.randn(8, 3) for _ in range(5)],
        [torch.ones(2, 3), torch.zeros(2, 3)],
    ),
    loss=lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).square().mean(),
)


def trainer_of(task=TASK, **settings):
    words = ["train", "--steps", "12", "--batch-size", "8", "--lr", "0.01"]
    given = cli.make_parser().parse_args(words)
    given.check(given)
    local.resolve(given, task)
    return Trainer(argparse.Namespace(**(vars(given) | settings)), task, ALONE)


@pytest.mark.parametrize("count", [1, 3])
def test_a_method_that_waits_in_the_backward_pass_does_so_once_a_step(count):
    trainer, inside, passes = trainer_of(), [], []

    @contextmanager
    def no_sync():
        inside.append(True)
        yield
        inside.pop()

    def backward(loss):
        passes.append(bool(inside))
        loss.backward()

    trainer.averager.no_sync, trainer.averager.backward = no_sync, backward
    batches = [torch.randn(8, 3) for _ in range(count)]
    trainer.gradient_of(batches)
    assert passes == [True] * (count - 1) + [False]
    found = [each.grad.clone() for each in trainer.model.parameters()]
    trainer.local.zero_grad()
    (sum(TASK.loss(trainer.model, batch) for batch in batches) / count).backward()
    for one, parameter in zip(found, trainer.model.parameters()):
        torch.testing.assert_close(one, parameter.grad)
    trainer.averager.close()


def test_models_are_kept_on_the_way_and_training_goes_on_as_if_they_were_not():
    plain, keeping = trainer_of(), trainer_of(evaluate_every=5)
    losses, states = [], []
    for record in plain.steps():
        losses.append(record["loss"])
        states.append(copy_of(plain.model))
    assert [record["loss"] for record in keeping.steps()] == losses
    assert [kept.steps for kept in keeping.kept] == [5, 10] and not plain.kept
    for kept in keeping.kept:
        expected = states[kept.steps - 1]
        assert all(torch.equal(kept.state[name], expected[name]) for name in expected)
    for trainer in (plain, keeping):
        trainer.averager.close()
    results, whole = evaluate_kept(keeping, ALONE, lambda: False)
    assert whole
    assert [each["step"] for each in results] == [5, 10]
    assert all(each["loss"] >= 0 and each["elapsed_s"] > 0 for each in results)
    assert results[0]["elapsed_s"] < results[1]["elapsed_s"]
    assert evaluate_kept(keeping, ALONE, lambda: 15) == ([], False)


def test_the_mean_of_one_rank_is_its_state():
    model = TASK.model()
    mean = mean_over_ranks(model.state_dict(), ALONE)
    assert all(torch.equal(value, mean[name]) for name, value in model.state_dict().items())
    assert all(value.dtype == mean[name].dtype for name, value in model.state_dict().items())


# --- the whole command

RANKS = 2
LABELS = ("allreduce", "ddp", "wagma:wait=group:sync_period=4")


@pytest.mark.launch
def test_a_comparison_has_its_table_its_files_and_the_same_seeds_for_all(mpirun, tmp_path):
    command = ["-m", "wagma", "compare", "--algorithms", ",".join(LABELS), "--name", "mine"]
    command += ["--steps", 20, "--seeds", 2, "--seed", 5, "--target", 0.001, "--step-time", 1]
    command += ["--imbalance", "cloud", "--imbalance-scale", 0.01, "--evaluate-every", 8]
    ended = mpirun(RANKS, *command, timeout=100, cwd=tmp_path, plots=True).check()
    assert "warning" not in ended.stderr
    starting, *runs, heading, first, second, third, where = said(ended)
    assert starting == "wagma compare: starting on 2 ranks, loading MPI and torch"
    assert [line.split(":")[0] for line in runs] == 3 * ["seed 5"] + 3 * ["seed 6"]
    assert heading.split()[0] == "algorithm" and where == "results are in runs/mine"
    assert [line.split()[0] for line in (first, second, third)] == list(LABELS)
    directory = tmp_path / "runs" / "mine"
    record = json.loads((directory / "comparison.json").read_text())
    assert list(record["results"]) == list(LABELS) and record["ranks"] == RANKS
    assert record["results"]["allreduce"]["ratio"] == 1
    assert record["results"]["ddp"]["mean"] == pytest.approx(
        record["results"]["allreduce"]["mean"], abs=0.01
    )
    for label in LABELS:
        figures = record["results"][label]
        assert figures["target_s"] > 0 and figures["reached"] == 2
        assert 0 < figures["bound_over_wall"] <= 1.01 and 0 < figures["waiting_share"] < 1
        assert figures["deviation"] >= 0
        for run in record["runs"][label]:
            assert [each["step"] for each in run["evaluations"]] == [8, 16, 20]
            own = json.loads((directory / run["directory"] / "summary.json").read_text())
            assert own["accuracy"] == run["accuracy"]
            assert json.loads((directory / run["directory"] / "config.json").read_text())["seed"]
    for seed in (5, 6):
        names = [comparison.directory_name(label) for label in LABELS]
        by_label = [records(directory / f"seed-{seed}" / name) for name in names]
        assert len({tuple(rank[0]["loss"] for rank in ranks) for ranks in by_label}) == 1
        for ranks in by_label:
            for rank, steps in enumerate(ranks):
                for one in steps:
                    assert one["delay_s"] >= 0.01 * imbalance.delay(
                        "cloud", seed, one["step"], rank, RANKS, one["compute_s"]
                    )


def records(run):
    return [
        [json.loads(line) for line in (run / f"rank-{rank:04}.jsonl").read_text().splitlines()]
        for rank in range(RANKS)
    ]


@pytest.mark.launch
def test_an_algorithm_that_fails_fails_the_command_and_is_named(mpirun, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import sys
from wagma import cli, train

def out_of_memory(trainer, step, *_):
    if (trainer.rank, trainer.settings.algorithm.label, step) == (1, "local-sgd", 7):
        raise MemoryError("no batch fits")

train.Trainer.hold_up = out_of_memory
sys.exit(cli.main(sys.argv[1:]))
""")
    options = ["--algorithms", "allreduce,local-sgd", "--steps", "10", "--runs-dir", tmp_path]
    ended = mpirun(RANKS, script, "compare", *options, timeout=100, forked=True)
    assert ended.returncode == 1
    assert "MemoryError: no batch fits" in ended.stderr
    assert "training with local-sgd and seed 0 failed" in ended.stderr
    assert ended.stderr.count("Traceback") == 2  # the error's and its cause's
    assert ended.stderr.count("wagma: rank 1 of 2 failed:") == 1
