"""Where models are trained: which rank has which device, and how tasks get there."""

import json
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from wagma import devices, references
from wagma.job import UsageError
from wagma.tasks.contract import Task

CPU, META = torch.device("cpu"), torch.device("meta")
NONE = "torch sees no GPU"
HERE = str(Path(__file__).parent)
WHY = devices.why_none()


class Job:
    """What `devices` asks of a communicator, on the rank that is second on its node."""

    def __init__(self, others):
        self.others, self.rank = others, 1

    def allgather(self, mine):
        return [*self.others, mine]

    def Split_type(self, kind):
        return self

    def Free(self):
        pass


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(n)` lets torch see so many; return which are made the current one."""
    current = []

    def see(count):
        module = SimpleNamespace(
            device_count=lambda: count,
            set_device=current.append,
            get_device_name=lambda index: "H100",
        )
        # Another test may have loaded torch's test device.
        monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "none")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        return current

    return see


@pytest.mark.parametrize("count, index", [(1, 0), (2, 1), (4, 1)])
@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_ranks_of_a_node_have_its_gpus_in_turn(gpus, asked, count, index):
    current = gpus(count)
    assert devices.choose(asked, Job([None])) == torch.device("cuda", index)
    assert current == [torch.device("cuda", index)]


def test_without_a_gpu_on_any_rank_auto_is_the_cpu(gpus):
    assert gpus(0) == []
    assert devices.choose("auto", Job([NONE])) == CPU
    assert devices.choose("cpu", None) == CPU


def test_the_cpu_is_chosen_without_a_look_at_gpus(gpus):
    assert gpus(2) == []
    assert devices.choose("cpu", None) == CPU


@pytest.mark.parametrize("here, others", [(0, [NONE, None]), (0, [NONE, NONE]), (1, [NONE, None])])
def test_cuda_that_is_not_on_all_ranks_is_refused(gpus, here, others):
    gpus(here)
    lacking = [rank for rank, why in enumerate([*others, None if here else NONE]) if why]
    with pytest.raises(UsageError) as raised:
        devices.choose("cuda", Job(others))
    assert (
        str(raised.value)
        == f"argument --device: no CUDA: {NONE} on "
        + {
            (0, 2): "ranks 0, 2",
            (0, 1, 2): "ranks 0-2",
            (0,): "rank 0",
        }[tuple(lacking)]
    )


@pytest.mark.parametrize("here, others", [(0, [None]), (1, [NONE])])
def test_some_ranks_on_gpus_and_some_not_are_refused(gpus, here, others):
    gpus(here)
    with pytest.raises(UsageError, match=f"--device: {NONE} on rank [01], and others see one"):
        devices.choose("auto", Job(others))


def test_torch_without_cuda_is_named(gpus, monkeypatch):
    gpus(0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UsageError, match="no CUDA: torch is built without CUDA on rank 0"):
        devices.choose("cuda", Job([]))


# --- Tasks

Pair = namedtuple("Pair", "x y")


class Own:
    """What knows itself how to get to a device."""

    def __init__(self, place="here"):
        self.place = place

    def to(self, device):
        return Own(device)


def test_batches_are_moved_with_all_that_is_in_them():
    one = torch.ones(3)
    batch = {"a": [one, (one, 3)], "b": Pair(one, "text"), "c": None, "d": Own(), "e": {1: one}}
    moved = devices.moved(batch, META)
    assert moved["a"][0].device == moved["a"][1][0].device == moved["b"].x.device == META
    assert moved["e"][1].device == META and moved["d"].place == META
    assert moved["a"][1][1] == 3 and moved["c"] is None
    assert type(moved["b"]) is Pair and moved["b"].y == "text"
    assert batch["a"][0] is one and batch["e"][1] is one and batch["d"].place == "here"


def test_a_task_is_on_its_device_with_every_batch():
    seen = []
    task = Task(
        "task",
        lambda: nn.Linear(2, 1),
        None,
        lambda model, batch: seen.append((model.weight.device, batch.device)),
        lambda model, batch: seen.append(batch.device),
    )
    there = devices.on(task, META)
    model = there.model()
    there.loss(model, torch.ones(2))
    there.metrics(model, torch.ones(2))
    assert seen == [(META, META), META] and devices.device_of(model) == META
    assert devices.on(task, CPU) is task
    assert devices.on(task._replace(metrics=None), META).metrics is None
    assert devices.on(task._replace(model=lambda: "none"), META).model() == "none"


def test_a_model_without_parameters_counts_as_on_the_cpu():
    assert devices.device_of(nn.ReLU()) == CPU and devices.device_of(nn.Linear(1, 1)) == CPU


# --- Time and torch's own methods


class Event:
    """An event at which a device has computed for so many ms: 3 more at each."""

    time = 0
    seen = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.time += 3
        self.at = Event.time

    def synchronize(self):
        Event.seen = self.at

    def elapsed_time(self, end):
        assert Event.seen >= end.at > self.at
        return end.at - self.at


def test_a_moment_is_the_device_s(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    moment = devices.Moment(torch.device("cuda", 0))
    assert moment.elapsed() == 0.003
    moment.note()
    assert (moment.elapsed(), moment.elapsed()) == (0.003, 0.006)


def test_a_moment_of_the_cpu_is_the_host_s():
    moment = devices.Moment(CPU)
    first = moment.elapsed()
    assert 0 <= first <= moment.elapsed()
    moment.note()
    assert moment.elapsed() >= 0


@pytest.mark.parametrize(
    "uuid, others, backend",
    [
        ("a", [("elsewhere", "a")], "nccl"),
        ("a", [("here", "b")], "nccl"),
        ("a", [("here", "a")], "gloo"),
        (None, [None], "gloo"),
        ("a", [None], "gloo"),
    ],
)
def test_torch_s_methods_communicate_by_nccl_where_each_rank_has_a_gpu(
    monkeypatch, uuid, others, backend
):
    monkeypatch.setattr(references.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(references.MPI, "Get_processor_name", lambda: "here")
    properties = SimpleNamespace(uuid=uuid)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = torch.device("cuda", 0) if uuid else CPU
    assert references.backend_for(device, Job(others)) == backend


# --- The command

ON_STAND_IN = """
import sys
sys.path.insert(0, {tests!r})
import torch_device
torch_device.load()
from wagma.cli import main
sys.exit(main())
"""
LENGTH = ("--steps", 5, "--batch-size", 4, "--runs-dir", "runs")


@pytest.mark.launch
@pytest.mark.timeout(400)  # the test device may have to be compiled
def test_training_on_a_device_gives_the_bits_of_the_cpu(mpirun, tmp_path):
    torch_device = pytest.importorskip("torch_device")
    torch_device.build()
    script = tmp_path / "job.py"
    script.write_text(ON_STAND_IN.format(tests=HERE))
    method = "wagma:wait=group:overlap"
    compared = "--algorithms", f"{method},allreduce", "--name", "there", "--evaluate-every", 2
    trained = "train", "--algorithm", method, *LENGTH, "--name"
    for command, env in (
        ((script, "compare", *compared, *LENGTH), {}),
        ((script, *trained, "direct"), {"STAND_IN_IPC": "1"}),
        (("-m", "wagma", *trained, "here"), {}),
    ):
        ended = mpirun(2, *command, timeout=90, cwd=tmp_path, env=env).check()
        assert ended.stderr == ""
    runs = {name: tmp_path / "runs" / name for name in ("here", "direct")}
    runs["staged"] = tmp_path / "runs" / "there" / "seed-0" / method.replace(":", ",")
    here, *there = (torch.load(run / "model.pt") for run in runs.values())
    for model in there:
        assert all(
            value.device == CPU and torch.equal(value, here[name]) for name, value in model.items()
        )
    here, *there = (json.loads((run / "config.json").read_text()) for run in runs.values())
    assert (here["device"], here["path"]) == ("cpu", "host")
    assert [config["path"] for config in there] == ["direct", "staged"]
    direct, staged = (config["path_reason"] for config in there)
    assert direct.endswith("the ranks of the node use each other's device memory")
    assert staged.endswith(("was built without CUDA", "averages on the host"))
    for config in there:
        assert config["device"] == "standin"
        assert config["device_of_rank"] == 2 * ["standin:0"]
    (summary,) = json.loads((tmp_path / "runs/there/comparison.json").read_text())["runs"][method]
    assert [each["step"] for each in summary["evaluations"]] == [2, 4, 5]


@pytest.mark.launch
def test_cuda_that_is_not_there_is_refused_in_one_line(mpirun, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    arguments = "-m", "wagma", "train", "--device", "cuda", *LENGTH
    ended = mpirun(2, *arguments, timeout=60, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.complaints == f"wagma: error: argument --device: no CUDA: {WHY} on ranks 0-1\n"
    assert not (tmp_path / "runs").exists()
