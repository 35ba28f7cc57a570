"""Checkpoints on several ranks: what is continued exactly, and what is refused."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import re
import shutil
import threading

import pytest
import torch
from methods import (
    METHODS,
    Method,
    backward,
    bits_of,
    each_method,
    local_bits,
    make_model,
    momentum_sgd,
)
from together import refuse_thread
from torch.optim.lr_scheduler import StepLR

from collectives import RankFailedError
from wagma import checkpoint
from wagma.checkpoint import CheckpointError, files, saving
from wagma.optim import WAGMA, LocalSGD, ParameterServer

pytestmark = [pytest.mark.mpi, pytest.mark.transports("shared")]


@pytest.fixture
def directory(comm, tmp_path):
    """A directory that all ranks see: rank 0's."""
    return comm.bcast(tmp_path / "checkpoints")


def steps(model, averager, comm, first, last, exclusive=False):
    """Make steps; all ranks end together where one could wait for others' next steps."""
    (optimizer,) = averager.optimizers.given
    with averager.join() if exclusive else contextlib.nullcontext():
        for step in range(first, last):
            backward(model, comm.rank, step)
            optimizer.step()


def saved(comm, directory, method=METHODS["local-sgd"], numbers=(3, 6), keep=9, **more):
    """Save checkpoints after these steps, and return what the model was at the last one."""
    model = make_model(comm.rank)
    with method.training(model, comm) as (optimizer, averager):
        for first, last in zip((0, *numbers), numbers):
            steps(model, averager, comm, first, last)
            checkpoint.save(directory, averager, keep=keep, step=last, **more)
        return bits_of(model), local_bits(optimizer)


def loaded(comm, directory, method=METHODS["local-sgd"]):
    """Load the newest checkpoint, and return it and what the model and its optimizer are."""
    model = make_model(comm.rank + 10)
    with method.training(model, comm) as (optimizer, averager):
        found = checkpoint.load(directory, averager)
        return found, (bits_of(model), local_bits(optimizer))


@pytest.mark.ranks(3)
@each_method
def test_training_continues_from_a_checkpoint(comm, directory, method):
    """Bit for bit, where a run repeats; else from the same model and state."""
    model = make_model(comm.rank)
    with method.training(model, comm) as (optimizer, averager):
        steps(model, averager, comm, 0, 7, method.exclusive)
        checkpoint.save(directory, averager, step=7, drawn=torch.rand(3))
        at_save = bits_of(model), local_bits(optimizer)
        following = torch.rand(3)
        steps(model, averager, comm, 7, 13, method.exclusive)
        at_end = bits_of(model), local_bits(optimizer)
    model = make_model(comm.rank + 10)
    with method.training(model, comm) as (optimizer, averager):
        steps(model, averager, comm, 0, 1, method.exclusive)
        found = checkpoint.load(directory, averager)
        assert (found.step, found.ranks) == (7, comm.size)
        assert (bits_of(model), local_bits(optimizer)) == at_save
        assert torch.equal(torch.rand(3), following)
        steps(model, averager, comm, 7, 13, method.exclusive)
        if method.repeatable:
            assert (bits_of(model), local_bits(optimizer)) == at_end
    assert len(set(comm.allgather(at_save[0][: len(at_save[0]) - 8]))) == 1  # without the count


def test_objects_with_a_state_and_values_come_back(comm, directory):
    model = make_model()
    sgd = momentum_sgd(model.parameters())
    with LocalSGD(model, sgd, comm=comm) as averager:
        scheduler = StepLR(sgd, 2)
        for _ in range(3):
            steps(model, averager, comm, 0, 1)
            scheduler.step()
        checkpoint.save(directory, averager, scheduler=scheduler, mine={"rank": comm.rank})
    model = make_model()
    sgd = momentum_sgd(model.parameters())
    with LocalSGD(model, sgd, comm=comm) as averager:
        scheduler = StepLR(sgd, 2)
        found = checkpoint.load(directory, averager, scheduler=scheduler)
        assert found["mine"] == {"rank": comm.rank}
        assert scheduler.last_epoch == 3
        assert sgd.param_groups[0]["lr"] == pytest.approx(0.01)
        missing = pytest.raises(CheckpointError, match="nothing saved as 'scaler'")
        with missing:
            checkpoint.load(directory, averager, scaler=scheduler)


def test_without_a_checkpoint_nothing_is_loaded(comm, directory):
    assert loaded(comm, directory)[0] is None


def test_what_could_not_be_read_back_is_refused_when_it_is_saved(comm, directory):
    model = make_model()
    with METHODS["local-sgd"].make(model, comm) as averager:
        with pytest.raises(TypeError, match="'made' is or holds what a checkpoint cannot"):
            checkpoint.save(directory, averager, made=make_model)
        with pytest.raises(RuntimeError, match=r"inside join\(\)"), averager.join():
            checkpoint.save(directory, averager)
    assert not files.found(directory)


class WithState(torch.nn.Linear):
    """A layer with a state besides its tensors."""

    held = None

    def get_extra_state(self):
        return self.held

    def set_extra_state(self, state):
        self.held = state


@pytest.mark.ranks(3)
def test_what_a_model_or_its_optimizer_could_not_read_back_is_refused(comm, directory):
    model = WithState(3, 1)
    optimizer = momentum_sgd(model.parameters())
    with LocalSGD(model, optimizer, comm=comm) as averager:
        model.held = io.BytesIO()
        with pytest.raises(TypeError, match="_extra_state of the model.*s state. is or holds what"):
            checkpoint.save(directory, averager)
        model.held = {"a": 1}
        optimizer.param_groups[0]["made"] = directory
        with pytest.raises(TypeError, match='"the optimizer\'s state" is or holds what'):
            checkpoint.save(directory, averager)
        del optimizer.param_groups[0]["made"]
        checkpoint.save(directory, averager)
        model.held = None
        checkpoint.load(directory, averager)
    assert model.held == {"a": 1}


def test_the_newest_are_kept(comm, directory):
    saved(comm, directory, numbers=(1, 2, 3, 4), keep=2)
    comm.Barrier()
    assert [path.name for path in files.found(directory)] == ["000004-step-4", "000003-step-3"]
    assert {path.name for path in directory.iterdir()} == {"000004-step-4", "000003-step-3"}


# Failures of one rank


@pytest.fixture
def dropped(comm):
    """A communicator on which ranks may have met without others, so that none can use it again."""
    return comm.Dup()


def begins(saver, averager):
    saver.begin()


def finishes(saver, averager):
    saver.finish()


def loads(saver, averager):
    checkpoint.load(saver.directory, averager)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("use", [begins, finishes, loads])
def test_ranks_do_not_wait_in_a_checkpoint_for_one_that_has_failed(dropped, directory, use):
    def train():
        model = make_model()
        made = METHODS["local-sgd"].make(model, dropped)
        with made as averager, checkpoint.Saver(directory, averager) as saver:
            saver.begin()
            if dropped.rank == 2:
                raise KeyError("no such sample")
            use(saver, averager)

    told = pytest.raises(RankFailedError, match=r"rank 2 failed.*KeyError: 'no such sample'")
    with pytest.raises(KeyError) if dropped.rank == 2 else told:
        train()


class Unwilling:
    """An object without a state on this rank."""

    def __init__(self, error):
        self.error = error

    def state_dict(self):
        if self.error is not None:
            raise self.error
        return {}


@pytest.mark.parametrize("error", [RuntimeError("no memory"), OSError("no disk"), MemoryError()])
def test_what_a_state_raises_on_one_rank_is_raised_on_all(comm, directory, error):
    last = comm.size - 1
    mine = Unwilling(error if comm.rank == last else None)
    with METHODS["local-sgd"].make(make_model(), comm) as averager:
        with pytest.raises(type(error), match=f"rank {last}: {error}"):
            checkpoint.save(directory, averager, mine=mine)
        assert checkpoint.save(directory, averager).name == "000001-step-0"


def test_a_directory_that_rank_0_cannot_read_is_named_on_all(comm, directory, monkeypatch):
    def found(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    if comm.rank == 0:
        monkeypatch.setattr(files, "found", found)
    with METHODS["local-sgd"].make(make_model(), comm) as averager:
        told = pytest.raises(CheckpointError, match=f"cannot read {directory}: Permission denied")
        with told:
            checkpoint.load(directory, averager)


@pytest.mark.ranks(3)
def test_a_part_that_one_rank_cannot_read_is_named_on_all(comm, directory, monkeypatch):
    saved(comm, directory, numbers=(3,))

    def check(*arguments):
        raise MemoryError

    if comm.rank == 1:
        monkeypatch.setattr(files, "check", check)
    with pytest.raises(CheckpointError, match="step-3: model.safetensors cannot be read: Memory"):
        loaded(comm, directory)


# Damage


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 4
    path.write_bytes(held)


DAMAGES = {
    "truncated": (truncate, "rank-0001.pt", r"rank-0001.pt has \d+ bytes instead of \d+"),
    "flipped": (flip, "rank-0002.pt", "rank-0002.pt has been changed"),
    "model": (flip, files.MODEL, f"{files.MODEL} has been changed"),
    "manifest": (truncate, files.MANIFEST, f"{files.MANIFEST} is damaged"),
    "changed": (flip, files.MANIFEST, f"{files.MANIFEST} is damaged"),
    "missing": (lambda path: path.unlink(), "rank-0000.pt", "rank-0000.pt is missing"),
    "unfinished": (lambda path: path.unlink(), files.MANIFEST, f"it has no {files.MANIFEST}"),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_checkpoint_is_named_and_the_one_before_is_loaded(comm, directory, caplog, damage):
    harm, name, told = DAMAGES[damage]
    at_first = saved(comm, directory, numbers=(3,))
    saved(comm, directory, numbers=(6,))
    newest, before = files.found(directory)
    comm.Barrier()
    if comm.rank == 0:
        harm(newest / name)
    comm.Barrier()
    with caplog.at_level(logging.WARNING):
        found, state = loaded(comm, directory)
    assert found.path == before and state == at_first
    if comm.rank == 0:
        (message,) = caplog.messages
        assert message.startswith(f"checkpoint {newest} is passed over: ")
        assert re.search(told, message)
    comm.Barrier()
    if comm.rank == 0:
        flip(before / files.MODEL)
    comm.Barrier()
    with pytest.raises(CheckpointError, match="none of 2 checkpoints in .* is good: 000002-step-6"):
        loaded(comm, directory)
    saved(comm, directory, numbers=(9,), keep=1)  # removes neither before it is complete
    comm.Barrier()
    assert [path.name for path in files.found(directory)] == ["000003-step-9"]


def test_what_a_killed_job_left_is_no_checkpoint_and_is_removed(comm, directory):
    saved(comm, directory, numbers=(3,))
    left = directory / f"{files.UNFINISHED}000002-step-6"
    if comm.rank == 0:
        shutil.copytree(directory / "000001-step-3", left)
    comm.Barrier()
    assert loaded(comm, directory)[0].step == 3
    saved(comm, directory, numbers=(9,))
    assert loaded(comm, directory)[0].path.name == "000002-step-9"
    assert not left.exists()


# Other settings, models, versions, numbers of ranks


def test_other_settings_models_and_formats_are_refused(comm, directory):
    saved(comm, directory)
    with pytest.raises(CheckpointError, match="with sync_period = 4, and now it is 5"):
        loaded(comm, directory, METHODS["local-sgd"]._replace(settings={"sync_period": 5}))
    with pytest.raises(CheckpointError, match="with method = 'LocalSGD', and now it is 'Allreduce"):
        loaded(comm, directory, METHODS["allreduce"])
    model = make_model(width=9)
    with METHODS["local-sgd"].make(model, comm) as averager:
        other = r"has float32 \(8, 4\) as '0.weight', the model float32 \(9, 4\)"
        with pytest.raises(CheckpointError, match=other):
            checkpoint.load(directory, averager)
        with pytest.raises(CheckpointError, match="with lr = None, and now it is 1"):
            checkpoint.load(directory, averager, settings={"lr": 1})
    newest = files.found(directory)[0] / files.MANIFEST
    comm.Barrier()
    if comm.rank == 0:
        files.write_json(newest, files.read_json(newest) | {"format": 1})
    comm.Barrier()
    with pytest.raises(CheckpointError, match=r"has format 1: wagma \S+ reads format 2"):
        loaded(comm, directory)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("saving", "loading"), [(4, 2), (2, 4), (4, 1), (1, 4)])
def test_another_number_of_ranks_continues_from_the_model(comm, directory, saving, loading):
    """Rank r goes on with the optimizer's state of rank r mod the number that saved."""
    some = {ranks: comm.Split(comm.rank // ranks) for ranks in {saving, loading}}
    method = METHODS["local-sgd"]
    if comm.rank < saving:
        state = saved(some[saving], directory, method, mine=comm.rank)
    else:
        state = None
    everyones = comm.allgather(state)
    if comm.rank < loading:
        found, (model, local) = loaded(some[loading], directory, method)
        source = comm.rank % saving
        assert found.ranks == saving and found["mine"] == source
        assert local == everyones[source][1]
        assert model == everyones[0][0]
        parts = some[loading].allgather(set(found.others))
        assert set().union(*parts) == set(range(saving))
        drawn = some[loading].allgather(torch.rand(2).tolist())
        assert len(set(map(tuple, drawn))) == loading  # no two ranks have the same generator
    comm.Barrier()
    for each in some.values():
        each.Free()


RINGMASTER = Method(ParameterServer, {"mode": "ringmaster"}, repeatable=False)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("method", [*METHODS.values(), RINGMASTER], ids=[*METHODS, "ringmaster"])
def test_the_settings_of_each_method_may_be_those_of_another_number_of_ranks(
    comm, directory, method
):
    """By default some depend on that."""
    given = {name: value for name, value in method.settings.items() if name != "group_size"}
    method = method._replace(settings=given)
    few = comm.Split(comm.rank // 3)
    if comm.rank < 3:
        model = make_model(comm.rank)
        with method.make(model, few) as averager:
            checkpoint.save(directory, averager, step=0)
    comm.Barrier()
    found, _ = loaded(comm, directory, method)
    assert found.ranks == 3
    few.Free()


# Writing


@pytest.mark.ranks(1, 4)
def test_it_is_written_while_the_training_goes_on(comm, directory, monkeypatch):
    """Rank 0's thread waits to write until a further step is made; the copies are of before."""
    goes_on, write = threading.Event(), saving.save_file

    def later(*arguments, **options):
        assert goes_on.wait(60)
        write(*arguments, **options)

    monkeypatch.setattr(saving, "save_file", later)
    model = make_model(comm.rank)
    method = METHODS["local-sgd"]
    with method.training(model, comm) as (optimizer, averager):
        with checkpoint.Saver(directory, averager) as saver:
            steps(model, averager, comm, 0, 4)
            saver.begin()
            at_save = bits_of(model), local_bits(optimizer)
            steps(model, averager, comm, 4, 9)
            assert not files.found(directory)
            comm.Barrier()
            goes_on.set()
        assert [path.name for path in files.found(directory)] == ["000001-step-4"]
        assert saver.longest > 0
    assert loaded(comm, directory)[1] == at_save


@pytest.mark.ranks(4)
@pytest.mark.parametrize("where", [0, 2])
def test_a_full_disk_on_one_rank_is_said_on_all_and_the_older_one_stays(
    comm, directory, monkeypatch, where
):
    method = METHODS["local-sgd"]
    saved(comm, directory, method, numbers=(3,))

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    model = make_model(comm.rank)
    with method.make(model, comm) as averager:
        with monkeypatch.context() as patched:
            if comm.rank == where:
                patched.setattr(saving, "durable", full)
            told = f"rank {where}: cannot write .*000002-step-0: No space left on device"
            with pytest.raises(CheckpointError, match=told):
                checkpoint.save(directory, averager)
        steps(model, averager, comm, 0, 2)  # the training goes on
        comm.Barrier()
        assert [path.name for path in directory.iterdir()] == ["000001-step-3"]
        checkpoint.save(directory, averager)
    assert loaded(comm, directory)[0].path.name == "000002-step-2"


def test_where_no_directory_can_be_made_all_ranks_raise(comm, directory):
    if comm.rank == 0:
        directory.parent.mkdir(exist_ok=True)
        directory.write_text("a file")
    comm.Barrier()
    model = make_model()
    told = pytest.raises(CheckpointError, match=f"cannot write to {directory}: File exists")
    with METHODS["local-sgd"].make(model, comm) as averager, told:
        checkpoint.save(directory, averager)


@pytest.mark.ranks(3)
def test_what_no_rank_averages_is_each_ranks_own(comm, directory):
    """Integer buffers, and what modules save that is no tensor; tied parameters stay tied."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(3, 3)
            self.second = torch.nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.note = None

        def get_extra_state(self):
            return {"note": self.note}

        def set_extra_state(self, state):
            self.note = state["note"]

    def made():
        model = Tied()
        return model, WAGMA(model, momentum_sgd(model.parameters()), comm=comm)

    model, averager = made()
    with averager:
        model.count.fill_(comm.rank)
        model.note = f"rank {comm.rank}"
        checkpoint.save(directory, averager)
        weight = model.first.weight.detach().clone()
    model, averager = made()
    with averager:
        checkpoint.load(directory, averager)
        assert (model.count.item(), model.note) == (comm.rank, f"rank {comm.rank}")
        assert model.first.weight is model.second.weight
        assert torch.equal(model.first.weight, weight)


def test_settings_that_one_rank_has_are_an_error_on_all_ranks(comm, directory):
    model = make_model()
    with METHODS["local-sgd"].make(model, comm) as averager:
        checkpoint.save(directory, averager, settings={"device": "cuda:0"})
        mine = {"device": f"cuda:{int(comm.rank == 1)}"}
        with pytest.raises(CheckpointError, match=r"^rank 1: .* 'cuda:0', and now it is 'cuda:1'$"):
            checkpoint.load(directory, averager, settings=mine)
        assert checkpoint.load(directory, averager, settings={"device": "cuda:0"}).step == 0


@pytest.mark.parametrize("last", [0, 1])
def test_a_thread_that_does_not_start_is_an_error_on_all_ranks(comm, directory, monkeypatch, last):
    model = make_model()
    with METHODS["local-sgd"].make(model, comm) as averager:
        with monkeypatch.context() as limited:
            if comm.rank == last:
                refuse_thread(limited, "wagma checkpoint")
            with pytest.raises(CheckpointError, match=f"rank {last}: the thread .* new thread"):
                checkpoint.save(directory, averager)
        assert not files.found(directory)
        assert checkpoint.save(directory, averager) in files.found(directory)
