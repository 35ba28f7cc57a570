"""The files of checkpoints while their writer is killed, in one process without MPI."""

from __future__ import annotations

import errno
import io
import os
import random
import signal
import time
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import lr_scheduler

from wagma.checkpoint import files, saving, state
from wagma.checkpoint.files import BrokenError
from wagma.checkpoint.saving import _Writing


def begin(directory, step, ranks=1):
    """Begin to write rank 0's part of a checkpoint, in which all numbers are the step's."""
    return begin_part(files.begin(directory, step), 0, step, ranks)


def begin_part(begun, rank, step, ranks):
    """Begin to write a rank's part."""
    manifest = {"step": step, "ranks": ranks, "settings": {}, "tied": {}}
    tensors = {"weight": torch.full((4000,), float(step))}
    part = {"more": torch.full((3000,), step)}
    return _Writing(begun, rank, part, tensors, manifest, 2, comm=None)  # which it does not use


def write(directory, step):
    """Write a checkpoint of one rank."""
    assert begin(directory, step).error() is None


def write_on(directory):
    """Write one checkpoint after the other until this process is killed."""
    step = 1 + max(map(files.number_of, files.found(directory)), default=0)
    while True:
        write(directory, step)
        step += 1


def check_good(path):
    """Check a checkpoint and what it holds."""
    manifest = files.read_json(path / files.MANIFEST)
    files.check(path, manifest, manifest["files"])
    step = manifest["step"]
    assert path.name.endswith(f"-step-{step}")
    assert torch.all(load_file(path / files.MODEL)["weight"] == step)
    part = torch.load(path / files.part_name(0), weights_only=True)
    assert torch.all(part["more"] == step)


def kill_writers(directory, count, seed):
    """Kill a process that writes at random moments; no checkpoint may be lost or unreadable."""
    generator, newest, left = random.Random(seed), 1, 1
    write(directory, 1)
    for _ in range(count):
        child = os.fork()
        if not child:
            try:
                write_on(directory)
            finally:
                os._exit(1)
        while files.number_of(files.found(directory)[0]) == newest:
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        found = files.found(directory)
        for path in found:
            check_good(path)
        numbers = list(map(files.number_of, found))
        # One may be complete before older ones are removed: the two that stay, or what was left.
        assert 1 <= len(found) <= max(2, left) + 1 and numbers[0] >= newest
        newest, left = numbers[0], len(found)
    return newest


def test_a_writer_that_is_killed_at_any_moment_leaves_good_checkpoints(tmp_path):
    assert kill_writers(tmp_path / "checkpoints", 60, seed=0) > 60


@pytest.mark.extra
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_thousand_kills_leave_good_checkpoints(tmp_path):
    assert kill_writers(tmp_path / "checkpoints", 1000, seed=1) > 1000


def test_a_checkpoint_has_no_name_before_its_manifest_is_complete(tmp_path, monkeypatch):
    """In the order of what happens: the files, the manifest, the name."""
    seen = []
    for owner, name in ((files, "look_at"), (files, "write_json"), (files, "complete")):
        function = getattr(owner, name)

        def noted(*arguments, name=name, function=function):
            seen.append((name, len(files.found(tmp_path))))
            return function(*arguments)

        monkeypatch.setattr(owner, name, noted)
    write(tmp_path, 5)
    names = ["look_at", "look_at", "write_json", "complete", "write_json"]
    assert seen == [(name, 0) for name in names]
    assert [path.name for path in files.found(tmp_path)] == ["000001-step-5"]


def full(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("fails", [files.part_name(0), files.MANIFEST])
def test_what_does_not_fit_on_a_disk_is_removed_at_once(tmp_path, monkeypatch, fails):
    """Rank 0's part, or what it writes once all parts are there."""
    write_json = files.write_json

    def durable(path):
        return full() if path.name == fails else [0, ""]

    def write(path, value):
        return full() if path.name == fails else write_json(path, value)

    monkeypatch.setattr(saving, "durable", durable)
    monkeypatch.setattr(files, "write_json", write)
    assert "No space left on device" in str(begin(tmp_path, 5).error())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails", [0, 1])
def test_a_part_that_does_not_fit_has_the_others_removed(tmp_path, monkeypatch, fails):
    """By rank 0, once all have written."""
    begun = files.begin(tmp_path, 5)

    def durable(path):
        return full() if path.name == files.part_name(fails) else [0, ""]

    monkeypatch.setattr(saving, "durable", durable)
    parts = [begin_part(begun, rank, 5, ranks=2) for rank in range(2)]
    for part in parts:
        part._thread.join(20)
        assert not part._thread.is_alive()
    assert list(tmp_path.iterdir()) == []
    assert [part.error() is not None for part in parts] == [fails == 0, fails == 1]


def test_parts_are_not_waited_for_in_a_directory_that_was_removed(tmp_path):
    """As where two savers have one directory: the second takes the first one's for a dead job's."""
    writing = begin(tmp_path, 5, ranks=2)
    try:
        assert writing.part_error() is None
        while (writing._unfinished / saving.written_by(0)).exists():
            time.sleep(0.001)  # until it waits for rank 1
        second = begin(tmp_path, 5, ranks=2)
        writing._thread.join(30)
        assert not writing._thread.is_alive()
        assert "its directory has been removed meanwhile" in str(writing.error())
        second.give_up()
    finally:
        writing.give_up()


def test_a_manifest_is_checked_by_its_own_checksum(tmp_path):
    path = tmp_path / "small.json"
    files.write_json(path, {"step": 12, "files": {}})
    assert files.read_json(path) == {"step": 12, "files": {}}
    path.write_text(path.read_text().replace("12", "13"))
    with pytest.raises(BrokenError, match="small.json is damaged"):
        files.read_json(path)


class Own(torch.Tensor):
    """A tensor whose class torch does not read without executing code."""


def test_a_tensor_of_a_class_that_cannot_be_read_back_is_refused():
    state.check_readable({"more": [torch.zeros(2), torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(TypeError, match="'more' is or holds what a checkpoint cannot"):
        state.check_readable({"more": [torch.zeros(2).as_subclass(Own)]})


def test_an_error_without_a_text_is_named_by_its_type():
    class Large:
        def __reduce__(self):
            raise MemoryError

    with pytest.raises(TypeError, match=r"'more' is or holds .* \(MemoryError\)"):
        state.check_readable({"more": Large()})


def test_copies_are_not_changed_with_what_they_are_of():
    tensor = torch.zeros(3)
    held = state.Unchanging([torch.ones(2)])
    pair = namedtuple("Pair", ["first", "second"])(tensor, 2)
    copied = state.copied({"a": [tensor, (tensor, 1)], "b": held, "c": "text", "d": pair})
    tensor.fill_(7)
    assert torch.equal(copied["d"][0], torch.zeros(3)) and copied["d"][1] == 2
    assert torch.equal(copied["a"][0], torch.zeros(3))
    assert isinstance(copied["a"][1], tuple) and torch.equal(copied["a"][1][0], torch.zeros(3))
    assert copied["b"] is held.value and copied["c"] == "text"


def test_a_schedule_after_a_warm_up_comes_back():
    """Its milestones are of a class of their own, which the end of the warm-up needs."""

    def made():
        sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        parts = [lr_scheduler.LinearLR(sgd, 0.5, 1.0, 4), lr_scheduler.MultiStepLR(sgd, [3, 5])]
        return sgd, lr_scheduler.SequentialLR(sgd, parts, [4])

    def rates(sgd, scheduler, steps):
        for _ in range(steps):
            sgd.step()
            scheduler.step()
            yield sgd.param_groups[0]["lr"]

    expected = [*rates(*made(), 12)]
    sgd, scheduler = made()
    before = [*rates(sgd, scheduler, 2)]
    saved = {"scheduler": state.copied(scheduler.state_dict())}
    state.check_readable(saved)
    file = io.BytesIO()
    torch.save([saved, sgd.state_dict()], file)
    file.seek(0)
    found, rate = torch.load(file, weights_only=True)
    sgd, scheduler = made()
    scheduler.load_state_dict(found["scheduler"])
    sgd.load_state_dict(rate)
    assert [*before, *rates(sgd, scheduler, 10)] == expected
