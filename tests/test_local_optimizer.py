"""What makes a rank's own steps: the command line's optimizer, or a script's."""

import argparse
import json

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.optim import lr_scheduler as rates
from training import train

from wagma import cli
from wagma.job import UsageError
from wagma.tasks import local, script
from wagma.tasks.contract import Task
from wagma.trainer import Trainer

ALONE = MPI.COMM_SELF
SCRIPT = """
import torch

def model():
    torch.manual_seed(1)
    return torch.nn.Linear(3, 1)

def data(rank, size, batch_size, seed):
    batches = [(torch.randn(batch_size, 3), torch.randn(batch_size, 1)) for _ in range(4)]
    return batches, batches

def loss(model, batch):
    x, y = batch
    return torch.nn.functional.mse_loss(model(x), y)

def optimizer(parameters):
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    return torch.optim.AdamW(groups, lr=0.5, weight_decay=0)

def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
"""


def batches_of(rank, size, batch_size, seed):
    """Return four samples in batches of this size, in the same order."""
    x = torch.arange(12.0).reshape(4, 3) / 12
    pairs = list(zip(x.split(batch_size), x.sum(1, keepdim=True).split(batch_size)))
    return pairs, pairs


def make_linear():
    torch.manual_seed(1)
    return nn.Linear(3, 1)


def squared_error(model, batch):
    return 100 * nn.functional.mse_loss(model(batch[0]), batch[1])


TASK = Task("a task", make_linear, batches_of, squared_error)


def trained(*words, task=TASK, steps=4, **more):
    """Return the model after some steps on one rank, and the trainer."""
    words = ["train", "--steps", str(steps), "--algorithm", "allreduce", *words]
    settings = cli.make_parser().parse_args(words)
    settings.check(settings)
    local.resolve(settings, task)
    trainer = Trainer(argparse.Namespace(**(vars(settings) | more)), task, ALONE)
    records = list(trainer.steps())
    assert len(records) == steps
    trainer.averager.close()
    return trainer.model.weight.detach().clone(), trainer, records


def test_the_command_line_s_optimizers_have_their_defaults():
    for words, expected in (
        ([], {"class": "SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.0}),
        (["--optimizer", "adamw"], {"class": "AdamW", "lr": 0.001, "weight_decay": 0.01}),
        (["--optimizer", "adamw", "--lr", "1"], {"class": "AdamW", "lr": 1.0}),
        (["--weight-decay", "0.5", "--momentum", "0"], {"weight_decay": 0.5, "momentum": 0.0}),
    ):
        _, trainer, _ = trained(*words)
        described = local.described(trainer.local)
        (group,) = described.pop("groups")
        assert (described | group).items() >= expected.items()
        assert group["parameters"] == 4
        json.dumps(group)


@pytest.mark.parametrize("named", [[], ["--optimizer", "adamw"]])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--task", "language"], ("adamw", 0.003)),
        (["--task", "language", "--lr", "1"], ("adamw", 1.0)),
        (["--task", "language", "--optimizer", "sgd"], ("sgd", 0.05)),
        (["--task", "digits", "--optimizer", "adamw"], ("adamw", 0.001)),
    ],
)
def test_a_task_s_learning_rate_is_that_of_its_optimizer_named_or_not(named, words, expected):
    settings = cli.make_parser().parse_args(["train", *named, *words])
    settings.check(settings)
    local.resolve(settings, TASK)
    assert (settings.optimizer, settings.lr) == expected


def test_batches_that_are_accumulated_are_as_one_batch():
    together, _, records = trained("--batch-size", "4", "--momentum", "0")
    apart, _, halves = trained("--batch-size", "2", "--accumulate", "2", "--momentum", "0")
    torch.testing.assert_close(apart, together)
    assert [each["samples"] for each in (*records, *halves)] == 8 * [4]
    losses = [[each["loss"] for each in of] for of in (records, halves)]
    assert losses[0] == pytest.approx(losses[1])


def test_a_gradient_is_clipped_to_its_norm():
    words = ("--lr", "1", "--momentum", "0", "--batch-size", "4")
    before = make_linear().weight.detach()
    free, _, _ = trained(*words, steps=1)
    clipped, _, _ = trained(*words, "--clip-norm", "0.01", steps=1)
    assert (free - before).norm() > 1
    assert 0 < (clipped - before).norm() <= 0.01 * (1 + 1e-6)


def test_a_script_may_define_groups_of_parameters_and_a_scheduler(tmp_path):
    (tmp_path / "my_own.py").write_text(SCRIPT)
    task = script.load(tmp_path / "my_own.py")
    _, trainer, _ = trained(task=task)
    matrices, vectors = trainer.local.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0)
    assert matrices["lr"] == vectors["lr"] == pytest.approx(0.5 * 0.1**2)
    assert isinstance(trainer.local, torch.optim.AdamW)


@pytest.mark.parametrize("words", [("--lr", "1"), ("--optimizer", "sgd"), ("--weight-decay", "0")])
def test_a_script_s_optimizer_takes_nothing_from_the_command_line(words):
    task = TASK._replace(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1))
    with pytest.raises(
        UsageError, match=f"argument {words[0]}: not allowed, as a task defines opt"
    ):
        trained(*words, task=task)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"optimizer": lambda parameters: 3}, r"optimizer\(\) returned int, not a torch.optim.Op"),
        ({"scheduler": lambda optimizer: None}, r"scheduler\(\) returned NoneType, not one of to"),
        (
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
            r"scheduler\(\) returned ReduceLROnPlateau, not one of torch.optim.lr_scheduler with",
        ),
    ],
)
def test_what_is_no_optimizer_and_no_scheduler_is_refused(wrong, message):
    with pytest.raises(UsageError, match=message):
        trained(task=TASK._replace(**wrong))


@pytest.mark.launch
def test_a_job_says_what_its_steps_were_made_by(tmp_path):
    (tmp_path / "my_own.py").write_text(SCRIPT)
    options = ["--script", tmp_path / "my_own.py", "--steps", 4, "--clip-norm", 5]
    train(tmp_path, "mine", *options, ranks=1).check()
    configuration = json.loads((tmp_path / "mine" / "config.json").read_text())
    own = configuration["local_optimizer"]
    assert own["class"] == "AdamW" and [each["lr"] for each in own["groups"]] == [0.5, 0.5]
    assert configuration["clip_norm"] == 5 and configuration["optimizer"] is None


SCHEDULERS = {
    "none": None,
    "step": lambda sgd: rates.StepLR(sgd, 4),
    "lambda": lambda sgd: rates.LambdaLR(sgd, lambda step: 1 / (1 + step)),
    "warm-up": lambda sgd: rates.SequentialLR(
        sgd, [rates.LinearLR(sgd, 0.1, total_iters=6), rates.CosineAnnealingLR(sgd, 14)], [6]
    ),
    "warm-up-lambda": lambda sgd: rates.SequentialLR(
        sgd,
        [rates.LinearLR(sgd, 0.1, total_iters=6), rates.LambdaLR(sgd, lambda step: 1 / (1 + step))],
        [6],
    ),
    "chained": lambda sgd: rates.ChainedScheduler(
        [rates.ConstantLR(sgd, 0.5, 5), rates.ExponentialLR(sgd, 0.9)]
    ),
    "one-cycle": lambda sgd: rates.OneCycleLR(sgd, 1.0, total_steps=25),
    "cyclic": lambda sgd: rates.CyclicLR(sgd, 0.1, 1.0, step_size_up=4),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_that_are_scaled_stay_so_whatever_the_scheduler_does(name):
    """Half of what they would be, also after what composed schedulers take over from each other."""
    make, given = SCHEDULERS[name], []
    for factor in (1, 0.5):
        sgd = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.5, momentum=0.9)
        scheduler = make and make(sgd)
        seen = []
        for step in range(20):
            if step == 3:
                local.scale_rates(sgd, scheduler, factor)
            sgd.step()
            if scheduler is not None:
                scheduler.step()
            seen.append(sgd.param_groups[0]["lr"])
        given.append(seen[3:])
    whole, half = given
    assert half == pytest.approx([rate / 2 for rate in whole])
