"""Unusual models: each trains as it does alone, or is refused before the first step."""

from __future__ import annotations

import copy

import pytest
import torch
from methods import opened
from mpi4py import MPI
from torch import nn
from torch.nn.utils import parametrizations, prune

from wagma.optim import WAGMA

VECTORS = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(2))
TOKENS = torch.tensor([[1, 2, 2], [0, 4, 2]])


def mlp(*middle):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *middle, nn.Linear(8, 2))


class Slotted(nn.Module):
    __slots__ = ("inner",)

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, batch):
        return self.inner(batch)


class Odd(nn.Module):
    """Scalars, empty tensors, views of one tensor, absent parameters, and all kinds of buffers."""

    def __init__(self):
        super().__init__()
        columns = torch.randn(4, 6)
        self.left, self.right = nn.Parameter(columns[:, :2]), nn.Parameter(columns[:, 2:])
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scales = nn.ParameterDict({"one": torch.ones(6), "two": torch.ones(())})
        self.unused = nn.Parameter(torch.ones(3))
        self.register_parameter("absent", None)
        self.register_buffer("nothing", None)
        self.register_buffer("sum", torch.zeros(6), persistent=False)
        self.register_buffer("empties", torch.zeros(0, dtype=torch.long))
        self.register_buffer("phase", torch.zeros(()))

    def forward(self, batch):
        out = batch @ torch.cat([self.left, self.right], 1) * self.scale * self.scales["one"]
        with torch.no_grad():
            self.sum += out.sum(0)
            self.phase += 1
        return out + self.empty.sum() + self.scales["two"]


def shared_module():
    model = mlp(nn.Linear(8, 8))
    return nn.Sequential(model[0], model[2], model[2], model[3])


def tied():
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7, bias=False))
    model[1].weight = model[0].weight
    return model


def materialised():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))
    model(IMAGES)
    return model


def channels_last():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 3))
    return model.to(memory_format=torch.channels_last)


def pruned():
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return model


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.cells = nn.LSTM(4, 5, num_layers=2)

    def forward(self, tokens):
        return self.cells(self.embedding(tokens))[0]


MODELS = {
    "frozen": (lambda: mlp(nn.Linear(8, 8).requires_grad_(False)), VECTORS),
    "eval": (lambda: mlp(nn.BatchNorm1d(8), nn.Dropout()).eval(), VECTORS),
    "untracked-batchnorm": (lambda: mlp(nn.BatchNorm1d(8, track_running_stats=False)), VECTORS),
    "cumulative-batchnorm": (lambda: mlp(nn.BatchNorm1d(8, momentum=None)), VECTORS),
    "slots": (Slotted, VECTORS),
    "odd": (Odd, VECTORS),
    "shared-module": (shared_module, VECTORS),
    "tied": (tied, TOKENS),
    "lazy": (materialised, IMAGES),
    "channels-last": (channels_last, IMAGES.to(memory_format=torch.channels_last)),
    "channels-last-input": (channels_last, IMAGES),
    "weight-norm": (lambda: mlp(parametrizations.weight_norm(nn.Linear(8, 8))), VECTORS),
    "spectral-norm": (lambda: mlp(parametrizations.spectral_norm(nn.Linear(8, 8))), VECTORS),
    "orthogonal": (lambda: mlp(parametrizations.orthogonal(nn.Linear(8, 8))), VECTORS),
    "old-spectral-norm": (lambda: mlp(nn.utils.spectral_norm(nn.Linear(8, 8))), VECTORS),
    "pruned": (pruned, VECTORS),
    "recurrent": (Recurrent, TOKENS),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), VECTORS),
    "sparse-gradients": (lambda: nn.Sequential(nn.Embedding(7, 5, sparse=True)), TOKENS),
    "double": (lambda: mlp(nn.BatchNorm1d(8)).double(), VECTORS.double()),
}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def beside(model, optimizer=None):
    return WAGMA(model, optimizer or sgd(model), comm=MPI.COMM_SELF, late="paper")


def training(model, optimizer=None):
    return opened(beside(model, optimizer))


def steps(model, optimizer, batch, scaler=None, number=3):
    for _ in range(number):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


def tensors(model):
    """Return all parameters and buffers by name, those that state_dict leaves out too."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def assert_same_model(actual, expected):
    expected = tensors(expected)
    assert tensors(actual).keys() == expected.keys()
    for name, value in tensors(actual).items():
        assert value.stride() == torch.empty_like(expected[name]).stride()
        torch.testing.assert_close(value, expected[name], msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize(("make", "batch"), MODELS.values(), ids=MODELS)
def test_it_trains_as_it_does_alone(make, batch, scaled):
    torch.manual_seed(3)
    plain = make()
    torch.manual_seed(3)
    model = make()
    start = copy.deepcopy(tensors(plain))
    steps(plain, sgd(plain), batch)
    with training(model) as (optimizer, averager):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if scaled else None
        steps(model, optimizer, batch, scaler)
        averager.synchronize()
        with averager.averaged():
            model(batch)
    assert_same_model(model, plain)
    assert any(not torch.equal(value, start[name]) for name, value in tensors(model).items())


def test_old_weight_norm_trains_as_it_does_alone():
    def make():
        torch.manual_seed(3)
        return mlp(nn.utils.weight_norm(nn.Linear(8, 8)))

    with pytest.warns(FutureWarning):
        plain, model = make(), make()
    steps(plain, sgd(plain), VECTORS)
    with training(model) as (optimizer, _):
        steps(model, optimizer, VECTORS)
    assert_same_model(model, plain)


def test_a_lazy_model_is_refused_until_a_batch_has_given_it_shapes():
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    inner = sgd(model)
    with pytest.raises(ValueError, match=r"parameter '0\.weight' has no shape yet: run a batch"):
        beside(model, inner)
    model(VECTORS)
    with training(model, inner) as (optimizer, _):
        before = model[0].weight.detach().clone()
        steps(model, optimizer, VECTORS)
        assert not torch.equal(model[0].weight, before)


def test_a_strange_lazy_parameter_is_refused_by_its_place():
    with pytest.raises(ValueError, match="parameter 0 of group 0, without a shape, is in the opt"):
        beside(mlp(), sgd(nn.LazyLinear(3)))


def parametrized(model):
    parametrizations.weight_norm(model[0])


def not_even_a_tensor(model):
    del model[0].weight
    model[0].weight = 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (parametrized, "parameter '0.weight'"),
        (not_even_a_tensor, "parameter '0.weight'"),
        (lambda model: model.to(torch.bfloat16), "parameter '0.weight'"),
        (lambda model: model.to("meta"), "parameter '0.weight'"),
        (lambda model: model.to_empty(device="cpu"), "parameter '0.weight'"),
        (nn.Module.share_memory, "parameter '0.weight'"),
    ],
)
def test_a_change_after_the_averager_was_made_is_refused_at_the_next_step(change, named):
    model = mlp()
    with training(model) as (optimizer, _):
        steps(model, optimizer, VECTORS)
        change(model)
        with pytest.raises(RuntimeError, match=f"{named} was replaced after the averager was made"):
            optimizer.step()


def test_a_copy_of_a_model_is_independent_and_can_be_averaged():
    model = mlp(nn.BatchNorm1d(8))
    with training(model) as (optimizer, _):
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        other = copy.deepcopy(model)
        before = copy.deepcopy(tensors(other))
        steps(model, optimizer, VECTORS)
        average.update_parameters(model)
        assert all(torch.equal(value, before[name]) for name, value in tensors(other).items())
        with training(other) as (second, _):
            steps(other, second, VECTORS)
        assert_same_model(other, model)
        assert_same_model(average.module, model)


def test_a_saved_model_loads(tmp_path):
    model, other = mlp(nn.BatchNorm1d(8)), mlp(nn.BatchNorm1d(8))
    with training(model) as (optimizer, _), training(other) as (second, _):
        steps(model, optimizer, VECTORS)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        other.load_state_dict(torch.load(tmp_path / "model.pt"))
        assert_same_model(other, model)
        second.step()


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_modules_that_average_themselves_are_refused(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    parallel = nn.parallel.DistributedDataParallel(mlp())
    with pytest.raises(TypeError, match="the model is a DistributedDataParallel, which averages"):
        beside(parallel)
    with pytest.raises(TypeError, match="module '0' is a DistributedDataParallel"):
        beside(nn.Sequential(parallel))
    with training(parallel.module) as (optimizer, _):
        steps(parallel.module, optimizer, VECTORS)

    sharded = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="the model is a FullyShardedDataParallel"):
        beside(sharded)
    sharded = fully_shard(mlp(), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match=r"parameter '0\.weight' is a DTensor: only plain tensors"):
        beside(sharded)
