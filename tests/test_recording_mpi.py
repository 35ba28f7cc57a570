"""One's own loop, recorded in the files of `wagma train`."""

from __future__ import annotations

import contextlib
import json
import math

import numpy as np
import pytest
import torch
from training import metrics

from collectives import RankFailedError
from wagma import optim, report
from wagma.evaluation import copy_of, mean_over_ranks
from wagma.following import Run

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 3), pytest.mark.transports()]

STEPS, BATCH = 20, 10
KINDS = {
    "wagma": lambda *trained, **options: optim.WAGMA(*trained, sync_period=4, **options),
    "wagma-overlap": lambda *trained, **options: optim.WAGMA(*trained, overlap=True, **options),
    "allreduce": optim.Allreduce,
    "ad-psgd": optim.ADPSGD,
    "local-sgd": lambda *trained, **options: optim.LocalSGD(*trained, sync_period=5, **options),
}


@pytest.fixture
def directory(comm, tmp_path):
    """A directory that all ranks share."""
    return comm.bcast(tmp_path)


def make(comm, kind="wagma"):
    torch.manual_seed(comm.rank)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, KINDS[kind](model, optimizer, comm=comm)


def train(model, averager, batches, run=None, steps=None):
    (optimizer,) = averager.optimizers.given
    for step, inputs in enumerate(batches):
        if step == steps:
            break
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if run is not None:
            run.note(loss=loss.item(), work=2.0)
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_are_those_of_a_training(comm, directory, kind):
    model, averager = make(comm, kind)
    batches = [torch.randn(BATCH, 8) for _ in range(STEPS)]
    with averager, averager.record(directory / "runs" / "mine", steps=STEPS) as run:
        train(model, averager, run.batches(batches), run)
    comm.Barrier()
    records = metrics(run.directory, comm.rank)
    assert [each["step"] for each in records] == list(range(STEPS))
    for each in records:
        told = {name: each[name] for name in ("samples", "elements", "work", "delay_s")}
        assert told == {"samples": BATCH, "elements": 8 * BATCH, "work": 2.0, "delay_s": 0.0}
        assert math.isfinite(each["loss"]) and each["compute_s"] >= each["optimizer_s"] > 0
        assert each["group"] and each["data_s"] > 0
    spent = sum(each["compute_s"] + each["average_s"] for each in records)
    assert 0.5 * spent < records[-1]["elapsed_s"] and spent <= 1.001 * records[-1]["elapsed_s"]
    assert not averager.optimizers.given[0]._optimizer_step_post_hooks
    if comm.rank == 0:
        summary = json.loads((run.directory / "summary.json").read_text())
        assert summary["steps_of_rank"] == comm.size * [STEPS]
        assert 0 < summary["bound_over_wall"] <= 1.01
        settings = json.loads((run.directory / "config.json").read_text())
        assert settings["algorithm"] == kind.partition("-overlap")[0]
        assert (settings["ranks"], settings["steps"]) == (comm.size, STEPS)
        followed = Run(run.directory)
        followed.poll()
        assert followed.ended and followed.steps == STEPS
        assert report.of(run.directory).size == comm.size


def test_what_was_recorded_before_an_exception_is_kept(comm, directory):
    model, averager = make(comm)
    with averager:
        with pytest.raises(ZeroDivisionError), averager.record(directory / "a") as run:
            train(model, averager, run.batches([torch.randn(BATCH, 8)] * 3))
            raise ZeroDivisionError
        train(model, averager, [torch.randn(BATCH, 8)] * 2)  # not recorded
    comm.Barrier()
    assert [each["loss"] for each in metrics(directory / "a", comm.rank)] == 3 * [None]
    assert not (directory / "a" / "summary.json").exists()


def test_without_a_rank_that_has_failed_there_is_no_summary_and_no_wait(comm, directory):
    model, averager = make(comm, "ad-psgd")
    fails = comm.rank == comm.size - 1
    ends = pytest.raises(ZeroDivisionError) if fails else contextlib.suppress(RankFailedError)
    with ends, averager:
        with averager.record(directory / "a") as run:
            train(model, averager, run.batches([torch.randn(BATCH, 8)] * 3), run)
        if fails:
            raise ZeroDivisionError
    averager.close()
    comm.Barrier()
    assert not (directory / "a" / "summary.json").exists()


def test_an_average_that_is_completed_between_steps_is_that_of_its_step(comm, directory):
    model, averager = make(comm, "wagma-overlap")
    with averager, averager.record(directory / "a") as run:
        for step, inputs in enumerate(run.batches([torch.randn(BATCH, 8)] * STEPS)):
            train(model, averager, [inputs], run)
            if step % 5 == 2:
                averager.state_dict()
    records = metrics(directory / "a", comm.rank)
    assert [(each["step"], each["version"]) for each in records] == [(t, t) for t in range(STEPS)]


def test_an_average_that_is_shown_between_steps_is_recorded_once(comm, directory):
    model, averager = make(comm, "wagma-overlap")
    with averager, averager.record(directory / "a") as run:
        for step, inputs in enumerate(run.batches([torch.randn(BATCH, 8)] * STEPS)):
            train(model, averager, [inputs], run)
            for _ in range(step % 3):
                with averager.averaged():
                    pass
    records = metrics(directory / "a", comm.rank)
    assert [(each["step"], each["version"]) for each in records] == [(t, t) for t in range(STEPS)]


def test_notes_are_numbers(comm, directory):
    model, averager = make(comm)
    with averager, averager.record(directory / "a") as run:
        run.note(
            loss=model(torch.ones(4, 8)).square().mean(), step=7, samples=3, shift=np.float32(2)
        )
        train(model, averager, [torch.ones(4, 8)])
        with pytest.raises((TypeError, ValueError)):
            run.note(loss="small")
    (record,) = metrics(directory / "a", comm.rank)
    assert isinstance(record["loss"], float) and record["step"] == 0
    assert (record["samples"], record["shift"]) == (3, 2.0)


def test_steps_are_recorded_in_several_blocks_one_after_another(comm, directory):
    model, averager = make(comm)
    with averager:
        for name in ("a", "b"):
            with averager.record(directory / name) as run:
                train(model, averager, run.batches([torch.randn(BATCH, 8)] * STEPS), steps=4)
                with pytest.raises(RuntimeError, match=f"recorded in .*{name} already$"):
                    averager.record(directory / "c")
            assert len(metrics(run.directory, comm.rank)) == 4
            averager.synchronize()
    if comm.rank == 0:
        for name in ("a", "b"):
            summary = json.loads((directory / name / "summary.json").read_text())
            assert sum(map(sum, summary["staleness_of_rank"])) <= 4 * comm.size
            assert min(of["waiting"] for of in summary["seconds_of_rank"]) >= 0


def test_a_directory_that_exists_is_an_error_on_all_ranks(comm, directory):
    _, averager = make(comm)
    with averager:
        with pytest.raises(FileExistsError, match="cannot make .*: File exists$"):
            averager.record(directory).__enter__()
        averager.step()
    assert not list(directory.glob("*.json*"))


def test_a_closure_s_loss_is_recorded(comm, directory):
    model, averager = make(comm)
    (optimizer,) = averager.optimizers.given

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        return loss

    with averager, averager.record(directory / "a"):
        losses = [optimizer.step(closure).item() for _ in range(3)]
    assert [each["loss"] for each in metrics(directory / "a", comm.rank)] == losses


class WithState(torch.nn.Linear):
    """A layer with a state besides its tensors."""

    def get_extra_state(self):
        return {"calls": [1, 2]}

    def set_extra_state(self, state):
        pass


def test_a_state_that_is_no_tensor_is_left_as_it_is(comm, directory):
    """In records, and in the averages of copies that are evaluated."""
    model = WithState(8, 1)
    averager = optim.WAGMA(model, comm=comm)
    with averager, averager.record(directory / "mine"):
        averager.step()
    settings = json.loads((directory / "mine" / "config.json").read_text())
    assert settings["model_bytes"] == 4 * 9
    mean = mean_over_ranks(copy_of(model), comm)
    assert mean["_extra_state"] == {"calls": [1, 2]}
    assert torch.equal(mean["bias"], model.bias)


@pytest.mark.ranks(3)
def test_whatever_one_rank_cannot_record_is_raised_on_all(comm, directory, monkeypatch):
    _, averager = make(comm)
    if comm.rank == 0:
        monkeypatch.setattr("wagma.recording.versions", lambda: {}["a version"])
    with averager, pytest.raises(KeyError, match="a version"), averager.record(directory / "a"):
        pass


@pytest.mark.ranks(3)
def test_nobody_waits_in_record_for_a_rank_that_has_failed(comm, directory):
    _, averager = make(comm)
    if comm.rank == 1:
        averager.collective.fail(OSError("the data are gone"))
    else:
        with (
            pytest.raises(RankFailedError, match="data are gone"),
            averager.record(directory / "a"),
        ):
            pytest.fail("it has begun")
    averager.close()
    assert not (directory / "a").exists()
