"""Trainings in simulated time, in one process: what they compute, and how they end."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import subprocess
import sys
import tempfile
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from trainings import compute, digits_task, equal, job, settings

from collectives import GroupAllreduce
from wagma import progress
from wagma.cli import main
from wagma.job import UsageError
from wagma.simulation import FREE, memory, train
from wagma.simulation.core import Simulation
from wagma.simulation.gradients import Batched
from wagma.simulation.learning import learn
from wagma.simulation.ranks import Ranks
from wagma.tasks.contract import Task

RANKS, STEPS = 4, 12
F1 = """
import torch

model = lambda: torch.nn.Linear(3, 1)
data = lambda rank, size, batch_size, seed: ([torch.ones(batch_size, 3)], [torch.ones(2, 3)])
loss = lambda model, batch: model(batch).square().mean()
metrics = lambda model, batch: {"f1": 0.1}
"""


def learned(label="wagma", steps=STEPS, *, batched=False, task=None, of=None, **given):
    of = of or job(RANKS, steps)
    return learn(settings(label, steps, **given), task or digits_task(), of, batched=batched)


@pytest.mark.parametrize(
    "label", ["wagma", "wagma:late=paper:overlap", "allreduce", "eager-sgd:trigger=majority"]
)
def test_it_repeats_bit_for_bit(label):
    first, second = learned(label), learned(label)
    assert first.losses == second.losses
    assert equal(first.state, second.state)
    assert first.summary["wall_s"] == second.summary["wall_s"]


def test_a_late_ranks_older_model_counts_and_changes_what_is_learned():
    """Rank 0 takes three times as long: others do not wait, and learn something else."""
    slow = job(RANKS, STEPS)
    slow.step_times[:, 0] *= 3
    waiting, not_waiting = (learned(f"wagma:wait={wait}", of=slow) for wait in ("group", "nobody"))
    assert not_waiting.summary["timely_share_of_rank"][0] < 0.5
    assert waiting.summary["timely_share"] == 1
    assert not equal(waiting.state, not_waiting.state)
    assert not_waiting.losses[0][:1] == waiting.losses[0][:1]


def test_the_end_of_time_ends_an_average_that_overlaps_a_step():
    """Averages take most of a step, so that some are outstanding then."""
    of = dataclasses.replace(job(RANKS, 40, 9.5), nbytes=3 * 10**9)
    given = {"steps": None, "seconds": 9.5, "of": of}
    first, second = (learned("wagma:overlap", **given) for _ in range(2))
    assert first.losses == second.losses
    assert equal(first.state, second.state)
    assert min(map(len, first.losses)) >= 3


def test_simulated_ranks_at_their_own_pace_count_and_keep_what_real_ones_do():
    """Each change is half of its call's work, so that the models are half the counts."""
    initial = sum(range(RANKS))

    def play(comm):
        mine, kept, totals = np.full(50, float(comm.rank)), np.zeros(50), {}
        settings = {"group_size": 2, "sync_period": 3, "keep_average": comm.rank == 0}
        with GroupAllreduce(comm, mine, pace="own", **settings) as average:
            for call in range(STEPS):
                compute(comm)
                mine += 1
                result = average(mine, work=2)
                if result.timely and (result.source + 1) % 3 == 0:
                    totals[result.source] = average.total_calls
                if comm.rank == 0 and call > STEPS // 2:
                    version, total = average.last_average(kept)
                    assert (version + 1) % 3 == 0
                    totals.setdefault(version, total)
                    np.testing.assert_allclose(kept, (initial + total / 2) / RANKS)
            average.average(mine)
            assert average.total_calls == 2 * RANKS * STEPS
        return totals

    everyones = Ranks(job(RANKS, STEPS, spread=0.9)).run(play)
    assert everyones[0]
    assert sum(map(len, everyones)) > 4
    for version, total in ((v, t) for totals in everyones for v, t in totals.items()):
        assert all(totals.get(version, total) == total for totals in everyones)


def test_a_schedule_follows_the_mean_of_the_steps_of_ranks_at_their_own_pace():
    """One is three times as slow: all are where the job is, and not where they are themselves."""
    rates = [[] for _ in range(RANKS)]

    def scheduler(optimizer):
        mine = next(filter(lambda each: not each, rates))
        mine.append(0)  # the constructor steps, too

        def note(step):
            mine.append(step)
            return 1.0

        return torch.optim.lr_scheduler.LambdaLR(optimizer, note)

    slow = job(RANKS, 60, seconds=14.0)
    slow.step_times[:, 0] *= 3
    task = digits_task()._replace(scheduler=scheduler)
    given = {"steps": None, "seconds": 14.0, "of": slow, "task": task}
    result = learned("wagma:pace=own:sync_period=3", **given)
    steps = result.summary["steps_of_rank"]
    assert steps[0] < min(steps[1:]) / 2
    for last in (each[-1] for each in rates):
        assert sum(steps) / RANKS - 5 <= last <= sum(steps) / RANKS
    assert rates[0][-1] > steps[0]


def test_gradients_computed_at_once_are_those_computed_one_by_one():
    one, at_once = learned(), learned(batched=True)
    assert one.losses != at_once.losses, "they were not computed at once"
    for name, value in one.state.items():
        torch.testing.assert_close(at_once.state[name], value, rtol=1e-4, atol=1e-5)


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def with_dropout():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))


def with_buffers():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, images):
        return self.used(images.flatten(1))


class Reading(nn.Module):
    """Uses a number that it reads from a tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, images):
        logits = self.linear(images.flatten(1))
        return logits * 2 if float(logits.sum()) > 0 else logits


class Counting(nn.Module):
    """Keeps a number in Python, and uses it."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(64, 10), 1000

    def forward(self, images):
        self.calls += 1
        return self.linear(images.flatten(1)) * (1.0 + self.calls % 2)


class Flipping(nn.Module):
    """Draws from Python's generator."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, images):
        logits = self.linear(images.flatten(1))
        return logits if random.random() < 0.5 else 2 * logits


class Remembering(nn.Module):
    """Keeps a tensor of the last batch."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(64, 10), None

    def forward(self, images):
        logits = self.linear(images.flatten(1))
        mean = logits if self.last is None else logits + self.last.mean()
        self.last = logits.detach()
        return mean


UNFIT = [with_dropout, with_buffers, Unused, Reading, Counting, Flipping, Remembering]


@pytest.mark.slow
@pytest.mark.parametrize("model", UNFIT)
def test_models_that_do_not_allow_that_are_computed_one_by_one(model, monkeypatch):
    used = []
    monkeypatch.setattr(Batched, "_try", watched(Batched._try, used))
    task = digits_task()._replace(model=model)
    one, other = learned(task=task), learned(task=task, batched=True)
    assert used == [False]
    assert one.losses == other.losses
    assert equal(one.state, other.state)


class LateDropout(nn.Module):
    """Draws only after some calls."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, images):
        logits = self.linear(images.flatten(1))
        if LateDropout.calls > 20:
            logits = nn.functional.dropout(logits, 0.5)
        LateDropout.calls += 1
        return logits


def test_a_model_that_ceases_to_allow_it_goes_on_one_by_one():
    LateDropout.calls = 0
    result = learned(task=digits_task()._replace(model=LateDropout), batched=True)
    assert LateDropout.calls > 20
    assert all(len(losses) == STEPS for losses in result.losses)


def watched(function, results):
    def call(*arguments):
        results.append(function(*arguments))
        return results[-1]

    return call


def test_a_model_that_allows_it_uses_it(monkeypatch):
    used = []
    monkeypatch.setattr(Batched, "_try", watched(Batched._try, used))
    learned(task=digits_task()._replace(model=linear), batched=True, accumulate=2)
    assert used == [True]


def test_each_rank_draws_from_generators_of_its_own():
    """Dropout and noise of a rank do not depend on when the others draw."""

    def loss(model, batch):
        images, labels = batch
        noise = torch.randn_like(images) / 10
        return nn.functional.cross_entropy(model(images + noise), labels)

    task = digits_task()._replace(model=with_dropout, loss=loss)
    orders = [job(RANKS, STEPS, seed=seed) for seed in (1, 2)]
    first, second = (learned("allreduce", task=task, of=each) for each in orders)
    assert first.losses == second.losses
    before = torch.get_rng_state()
    learned("allreduce", task=task)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_it_ends_at_its_time_with_the_mean_of_the_models_of_that_time():
    result = learned(steps=None, seconds=9.5, of=job(RANKS, 40, 9.5), evaluate_every_seconds=2.0)
    assert result.summary["wall_s"] == 9.5
    assert [each["elapsed_s"] for each in result.summary["evaluations"]] == [2, 4, 6, 8, 9.5]
    assert all(6 <= made <= 13 for made in map(len, result.losses))


def test_evaluations_are_of_all_ranks_mean_model():
    result = learned("allreduce", evaluate_every=STEPS // 2)
    half = learned("allreduce", STEPS // 2)
    assert result.summary["evaluations"][0]["accuracy"] == half.summary["accuracy"]


class Told(progress.Silent):
    """Keeps the numbers of steps that are shown."""

    def __init__(self):
        self.steps = []

    def update(self, step, *figures):
        self.steps.append(step)


def at_zero():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


@pytest.mark.parametrize("seconds", [None, 9.5])
def test_a_rank_that_only_runs_the_controller_has_no_part_in_evaluations(seconds):
    """Its weight remains 0; the others' are less by 1 after each step, and the metric is these."""
    task = Task(
        "one weight",
        model=at_zero,
        data=lambda rank, size, batch_size, seed: ([torch.ones(1, 1)], [torch.ones(1, 1)]),
        loss=lambda model, batch: model(batch).mean(),
    )
    label, steps, every = "partial-reduce:controller_only", STEPS, {"evaluate_every": 3}
    if seconds:
        steps, every = None, {"evaluate_every_seconds": 2.5}
    given = settings(label, steps, seconds=seconds, lr=1.0, momentum=0.0, **every)
    of, shown = job(RANKS, 40 if seconds else STEPS, seconds, spread=0.0), Told()
    result = learn(given, task, of, shown=shown)
    made = [-each["step"] for each in result.summary["evaluations"]]
    assert len(made) == 4
    assert [each["loss"] for each in result.summary["evaluations"]] == pytest.approx(made)
    assert result.state["weight"].item() == pytest.approx(made[-1])
    assert [len(losses) > 0 for losses in result.losses] == [False, True, True, True]
    assert shown.steps == list(range(1, len(result.losses[1]) + 1))


def test_an_error_of_one_rank_is_raised_and_ends_all():
    def loss(model, batch):
        loss.calls += 1
        if loss.calls == 30:
            raise ValueError("a mistake in the script")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    loss.calls = 0
    with pytest.raises(ValueError, match="a mistake in the script"):
        learned(task=digits_task()._replace(loss=loss))


def test_ranks_that_wait_for_each_other_are_reported_instead_of_hanging():
    def wait(comm):
        if comm.rank != 1:
            comm.Barrier()

    with pytest.raises(RuntimeError, match="3 of 4 ranks wait for others"):
        Ranks(job(4, 1)).run(wait)


def test_a_signal_ends_it():
    """Ctrl-C arrives while a rank's thread computes: the error is raised when that waits."""

    def loss(model, batch):
        loss.calls += 1
        if loss.calls == 20:
            signal.raise_signal(signal.SIGINT)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    loss.calls = 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            learned(task=digits_task()._replace(loss=loss))
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_script_of_one_function_each_is_a_task():
    batches = [(torch.randn(4, 3), torch.randn(4)) for _ in range(3)]

    def loss(model, batch):
        return ((model(batch[0])[:, 0] - batch[1]) ** 2).mean()

    task = Task("mine", lambda: nn.Linear(3, 1), lambda *_: (batches, batches[:1]), loss)
    result = learned("local-sgd", task=task)
    assert result.summary["metrics"] == ["loss"]


@pytest.mark.slow
def test_a_rank_without_a_step_in_time_counts_as_slow():
    slow = job(RANKS, 60, 6.0)
    slow.step_times[:, 1] *= 50
    for label in ("wagma", "ad-psgd", "eager-sgd"):
        result = learned(label, steps=None, seconds=6.0, of=slow, evaluate_every_seconds=1.0)
        assert [each["elapsed_s"] for each in result.summary["evaluations"]] == [1, 2, 3, 4, 5, 6]
        assert result.summary["waiting_share"] <= 1
    slow.step_times[:] = 100
    with pytest.raises(UsageError, match="no step was completed within 6 s"):
        learned(steps=None, seconds=6.0, of=slow)


@pytest.mark.parametrize(
    ("times", "seconds", "message"),
    [
        (np.ones(4), None, "shape"),
        (np.zeros((3, 4)), None, "not all of them 0"),
        (np.full((3, 4), np.nan), None, "finite"),
        (np.ones((3, 4)), 9.0, "the steps of rank 0 take less than 9 s"),
    ],
)
def test_times_of_steps_that_cannot_be_are_refused(times, seconds, message):
    with pytest.raises(ValueError, match=message):
        train(digits_task(), "wagma", times, job(RANKS, 3).machine, seconds=seconds)


def unequal(work=len):
    """Return a task whose ranks have batches of other lengths in each step."""

    def data(rank, size, batch_size, seed):
        return [torch.ones(lengths(rank, step), 3) for step in range(STEPS)], [torch.ones(2, 3)]

    def loss(model, batch):
        return (model(batch) - 1).square().mean()

    return Task("unequal", lambda: nn.Linear(3, 1), data, loss, work=work, unit="lines")


def lengths(rank, step):
    return 1 + (3 * rank + 5 * step) % 7


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_take_longer_by_the_work_of_their_batches(accumulate):
    of = job(RANKS, STEPS // accumulate)
    given = {"seconds_per_work": 0.5, "accumulate": accumulate, "lr": 0.01}
    before = of.step_times.copy()
    result = train(unequal(), "allreduce", of.step_times, FREE, **given)
    parts = [[lengths(rank, step) for rank in range(RANKS)] for step in range(STEPS)]
    work = np.array(parts).reshape(-1, accumulate, RANKS).sum(axis=1)
    assert result.summary["wall_s"] == pytest.approx((before + 0.5 * work).max(axis=1).sum())
    assert np.array_equal(of.step_times, before)
    even = train(unequal(), "allreduce", of.step_times, FREE, accumulate=accumulate, lr=0.01)
    assert even.losses == result.losses


def test_a_rank_whose_batches_are_longer_makes_fewer_steps_in_the_same_time():
    def data(rank, size, batch_size, seed):
        return [torch.ones(1 + 4 * rank, 3)], [torch.ones(2, 3)]

    given = {"seconds": 12.0, "seconds_per_work": 1.0}
    result = train(unequal()._replace(data=data), "ad-psgd", np.ones((12, 2)), FREE, **given)
    assert result.summary["steps_of_rank"] == [6, 2]


@pytest.mark.parametrize(
    ("task", "label", "error", "message"),
    [
        (unequal(None), "wagma", UsageError, r"unequal has no work\(batch\)"),
        (unequal(lambda batch: -1.0), "wagma", UsageError, r"work\(\) returned -1.0, not 0"),
        (unequal(lambda batch: np.inf), "wagma", UsageError, r"work\(\) returned inf, not 0"),
        (unequal(), "allreduce:compute_limit=1", NotImplementedError, "which work adds to"),
    ],
)
def test_work_that_steps_cannot_take_time_by_is_refused(task, label, error, message):
    with pytest.raises(error, match=message):
        train(task, label, np.ones((3, 2)), FREE, seconds_per_work=1.0, accumulate=2)


@pytest.mark.parametrize("seconds", [-1.0, np.inf, np.nan])
def test_times_by_work_that_cannot_be_are_refused(seconds):
    with pytest.raises(ValueError, match="seconds_per_work must be finite, and 0 or more"):
        train(unequal(), "wagma", np.ones((3, 2)), FREE, seconds_per_work=seconds)


def test_the_command_says_by_what_steps_take_longer(tmp_path, capsys):
    script = tmp_path / "of_lengths.py"
    script.write_text(
        "import torch\n"
        "def model(): return torch.nn.Linear(3, 1)\n"
        "def data(rank, size, batch_size, seed):\n"
        "    return [torch.ones(1 + rank, 3)], [torch.ones(2, 3)]\n"
        "def loss(model, batch): return (model(batch) - 1).square().mean()\n"
        "def work(batch): return len(batch)\n"
    )
    arguments = ["simulate", "--train", "--script", str(script), "--ranks", "3", "--steps", "5"]
    arguments += ["--algorithms", "allreduce", "--runs-dir", str(tmp_path), "--name", "mine"]
    arguments += ["--step-times", "constant", "--step-time", "10", "--step-time-per-work", "20"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "# 5 constant steps, each longer by 20 ms × its batches' work, training" in printed
    record = json.loads((tmp_path / "mine" / "comparison.json").read_text())
    assert record["runs"]["allreduce"][0]["wall_s"] == pytest.approx(5 * 0.07, rel=0.01)


def test_nothing_of_a_training_is_kept():
    kept = []

    class Watched(nn.Linear):
        def __init__(self):
            super().__init__(64, 10)
            kept.append(weakref.ref(self))

        def forward(self, images):
            return super().forward(images.flatten(1))

    learned("wagma", 3, task=digits_task()._replace(model=Watched))
    assert kept and not any(each() for each in kept)


def test_an_error_in_a_compiled_function_is_raised(monkeypatch):
    """Python only prints one in a function that cannot raise; here it ends the training."""

    class Failing(Simulation):
        def returns(self, *arguments):
            raise MemoryError("no place for a group")

    monkeypatch.setattr("wagma.simulation.ranks.Simulation", Failing)
    with pytest.raises(MemoryError, match="no place for a group"):
        learned(steps=3)


def test_a_diverged_training_fails_the_command(tmp_path, capsys):
    arguments = ["simulate", "--train", "--ranks", "2", "--steps", "8", "--lr", "1e30"]
    arguments += ["--algorithms", "allreduce", "--runs-dir", str(tmp_path)]
    assert main(arguments) == 1
    assert "allreduce, seed 0: since step" in capsys.readouterr().err
    assert main([*arguments, "--allow-nan", "--name", "allowed"]) == 0


def test_an_algorithm_that_is_invalid_is_refused_before_any_trains(tmp_path, capsys):
    arguments = ["simulate", "--train", "--ranks", "4", "--runs-dir", str(tmp_path)]
    assert main([*arguments, "--algorithms", "allreduce,wagma:group_size=8"]) == 2
    assert "group_size" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "4,2000"], "1437 training images are too few for 2000 ranks"),
        (["--script", "f1.py", "--target", "0.9"], "argument --target: whether 'f1' rises is not"),
    ],
)
def test_what_cannot_be_trained_is_told_before_a_directory_is_made(
    words, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f1.py").write_text(F1)
    assert main(["simulate", "--train", "--algorithms", "allreduce", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_it_needs_no_mpi():
    code = (
        "import sys; sys.modules['mpi4py.MPI'] = None\n"
        "from wagma.cli import main\n"
        "sys.exit(main(['simulate', '--train', '--steps', '3', '--algorithms', 'wagma',"
        " '--ranks', '2', '--runs-dir', sys.argv[1]]))"
    )
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [sys.executable, "-c", code, place], capture_output=True, text=True, timeout=100
        )
    assert done.returncode == 0, done.stderr
    assert "results are in" in done.stdout


def test_the_function_for_users_takes_a_script_and_settings(tmp_path):
    script = tmp_path / "tiny_task.py"
    script.write_text(
        "import torch\n"
        "def model(): return torch.nn.Linear(3, 1)\n"
        "def data(rank, size, batch_size, seed):\n"
        "    return [torch.ones(batch_size, 3) * rank], [torch.ones(2, 3)]\n"
        "def loss(model, batch): return (model(batch) - 1).square().mean()\n"
    )
    of = job(RANKS, STEPS)
    result = train(script, "wagma:group_size=2", of.step_times, of.machine, lr=0.01, momentum=0.0)
    assert result.summary["evaluations"][-1]["loss"] < result.losses[1][0]
    with pytest.raises(TypeError, match="no setting rate"):
        train(digits_task(), "wagma", of.step_times, of.machine, rate=0.1)
    with pytest.raises(ValueError, match="group_size"):
        train(digits_task(), "wagma:group_size=9", of.step_times, of.machine)
    with pytest.raises(ValueError, match="no algorithm|wagmo"):
        train(digits_task(), "wagmo", of.step_times, of.machine)


@pytest.mark.slow
def test_the_command_compares_and_writes_what_compare_does(tmp_path, capsys):
    arguments = ["simulate", "--train", "--ranks", "2,4", "--steps", "6", "--seeds", "2"]
    arguments += ["--algorithms", "allreduce,wagma:group_size=2", "--target", "0.1"]
    assert main([*arguments, "--runs-dir", str(tmp_path), "--name", "mine"]) == 0
    output = capsys.readouterr().out
    assert "memory: 0.3" in output
    for ranks in (2, 4):
        place = tmp_path / "mine" / f"{ranks}-ranks"
        record = json.loads((place / "comparison.json").read_text())
        assert set(record["results"]) == {"allreduce", "wagma:group_size=2"}
        assert [run["seed"] for run in record["runs"]["allreduce"]] == [0, 1]
        assert (place / "comparison.png").exists()
        assert record["ranks"] == ranks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "2"], "argument --seeds: not allowed without --train"),
        (["--shards", "iid"], "argument --shards: not allowed without --train"),
        (["--step-time-per-work", "1"], "argument --step-time-per-work: not allowed without"),
        (["--train", "--itemsize", "2"], "argument --itemsize: with --train"),
        (["--train", "--seconds", "9", "--evaluate-every", "2"], "argument --evaluate-every"),
        (["--train", "--dedicated-server"], "argument --dedicated-server"),
    ],
)
def test_options_that_conflict_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kernel", ["kernel 3000\nslab 7\n", "kernel_stack 1000\nslab 2000\n"])
def test_the_memory_of_a_container_is_within_its_limit(tmp_path, monkeypatch, kernel):
    """Linux has the line "kernel" since 5.18."""
    for name, text in (
        ("MEMINFO", "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n"),
        ("LIMIT", "4000000\n"),
        ("USED", f"anon 20000\nfile 5\n{kernel}"),
    ):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(memory, name, tmp_path / name)
    assert memory.available() == 4_000_000 - 20_000 - 3_000
    (tmp_path / "LIMIT").write_text("max\n")
    assert memory.available() == 8_000_000 * 1024


def test_a_training_that_does_not_fit_into_memory_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("wagma.simulated_training.available", lambda: 1e8)
    arguments = ["simulate", "--train", "--ranks", "256", "--runs-dir", str(tmp_path)]
    assert main(arguments) == 2
    assert "but 0.10 GB are free: use fewer --ranks" in capsys.readouterr().err
