"""What `wagma train` can learn: the contract, scripts, and folders of images."""

import itertools
import random
import sys

import numpy as np
import pages
import pytest
import torch
from squares import squares
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from wagma.job import UsageError
from wagma.tasks import contract, folders, images, script
from wagma.tasks.contract import Task

PAIR = torch.ones(4, 3), torch.zeros(4, 1)


def mean_square(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def make_task(**functions):
    defaults = {
        "model": lambda: nn.Linear(3, 1),
        "data": lambda rank, size, batch_size, seed: ([PAIR], [PAIR]),
        "loss": mean_square,
    }
    return Task("my_task.py", **{**defaults, **functions})


def prepare(task, rank=0, size=2, seed=0):
    return contract.prepare(task, rank, size, batch_size=4, seed=seed)


# --- the contract

MISTAKES = {
    "model() returned None, not a torch.nn.Module": {"model": lambda: None},
    "model() returned an int, not a torch.nn.Module": {"model": lambda: 3},
    "data() returned a list, not a pair": {"data": lambda *_: [PAIR]},
    "data() returned an int as training batches, not an iterable": {"data": lambda *_: (3, [])},
    "data() returned None as test batches, not an iterable": {"data": lambda *_: ([PAIR], None)},
    "data() returned no training batches": {"data": lambda *_: ([], [PAIR])},
    "loss() returned a float, not a scalar tensor": {"loss": lambda *_: 0.5},
    "loss() returned a tensor of shape (4, 1), not a scalar": {
        "loss": lambda model, batch: model(batch[0])
    },
    "what loss() returned has no gradient": {"loss": lambda *_: torch.tensor(0.5)},
    "metrics() returned a float, not a dict": {"metrics": lambda *_: 0.5},
    "metrics() returned a str as 'error', not a number": {"metrics": lambda *_: {"error": "low"}},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_the_contract_does_not_allow_is_named(message):
    with pytest.raises(UsageError) as raised:
        prepare(make_task(**MISTAKES[message]))
    assert str(raised.value).startswith(f"my_task.py: {message}")


def test_data_gets_the_rank_the_size_the_batch_size_and_the_seed():
    got = []

    def data(rank, size, batch_size, seed):
        got.append((rank, size, batch_size, seed))
        return [PAIR], []

    prepare(make_task(data=data), rank=1, size=3, seed=7)
    assert got == [(1, 3, 4, 7)]


def test_models_begin_alike_on_all_ranks_and_what_they_draw_later_differs():
    def data(*_):
        return [torch.rand(1), torch.tensor(np.random.rand()), torch.tensor(random.random())], []

    def loss(model, batch):
        return model.weight.sum() * batch.sum()

    weights, drawn = [], []
    for rank, seed in ((0, 0), (1, 0), (1, 1), (0, 0)):
        model, batches, _ = prepare(make_task(data=data, loss=loss), rank, seed=seed)
        weights.append(model.weight.tolist())
        drawn.append([batch.item() for batch in itertools.islice(batches, 3)])
    assert weights[0] == weights[1] == weights[3] != weights[2]
    assert drawn[0] == drawn[3]
    for first, second in itertools.combinations(drawn[:3], 2):
        assert all(one != other for one, other in zip(first, second))


def test_looking_for_mistakes_changes_nothing():
    def model():
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))

    seen = []

    def loss(model, batch):
        seen.append((model.training, torch.rand(1).item()))
        np.random.rand()
        random.random()
        return mean_square(model, batch)

    prepared = prepare(make_task(model=model, loss=loss))
    state = torch.get_rng_state(), np.random.rand(), random.random()
    assert [training for training, _ in seen] == [True, False]
    assert all(module.training for module in prepared.model.modules())
    assert prepared.model[1].num_batches_tracked == 0
    assert not prepared.model[1].running_mean.any()
    assert all(parameter.grad is None for parameter in prepared.model.parameters())

    prepare(make_task(model=model, loss=lambda model, batch: model(batch[0]).mean()))
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1:] == (np.random.rand(), random.random())


def test_no_batch_is_lost_to_looking_for_mistakes():
    first, second = (torch.full((1, 3), value) for value in (1.0, 2.0))

    def data(*_):
        return iter([(first, first), (second, second)]), iter([(first, first), (second, second)])

    _, batches, test = prepare(make_task(data=data, model=lambda: nn.Linear(3, 3)))
    assert [next(batches)[0] is each for each in (first, second)] == [True, True]
    assert [batch[0] is each for batch, each in zip(test, (first, second))] == [True, True]
    with pytest.raises(RuntimeError, match="cannot be iterated over again: return a DataLoader"):
        next(batches)


def test_a_data_loader_starts_again_and_its_sampler_is_told_the_epoch():
    told = []

    class Sampler(DistributedSampler):
        def set_epoch(self, epoch):
            told.append(epoch)
            super().set_epoch(epoch)

    pairs = TensorDataset(torch.arange(12))
    loader = DataLoader(pairs, 3, sampler=Sampler(pairs, num_replicas=2, rank=1))
    drawn = [batch[0].tolist() for batch in itertools.islice(contract.endless(loader, "t"), 6)]
    assert told == [0, 1, 2]
    assert drawn[:2] != drawn[2:4]
    assert all(len(batch) == 3 for batch in drawn)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(5, 2), 5),
        ((torch.zeros(5, 2), torch.zeros(5)), 5),
        ([np.zeros((4, 1))], 4),
        ({"name": "x", "input": torch.zeros(3, 2)}, 3),
        ((["a", "b"], {"y": torch.zeros(2)}), 2),
        (torch.tensor(1.0), None),
        ("text", None),
        ([], None),
    ],
)
def test_a_batch_has_as_many_samples_as_its_first_array_is_long(batch, expected):
    assert contract.samples(batch) == expected


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.ones(4, 3), 12),
        ((torch.ones(4, 3), np.ones(4)), 16),
        ({"tokens": torch.ones(2, 50), "more": [torch.tensor(1.0), "text"]}, 101),
        ("text", 0),
    ],
)
def test_a_batch_has_the_elements_of_all_its_arrays(batch, expected):
    assert contract.elements(batch) == expected


def test_test_results_are_means_over_all_samples_of_all_ranks():
    values = torch.arange(10.0)

    def metrics(model, batch):
        assert not model.training
        assert not torch.is_grad_enabled()
        return {"mean": batch.mean(), "largest": float(batch.max())}

    model = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1).eval())
    task = make_task(metrics=metrics)
    each = [contract.evaluate(task, model, part) for part in (values[:7].split(3), [values[7:]])]
    nothing = contract.evaluate(task, model, [])
    merged = contract.all_ranks([*each, nothing])
    assert merged["mean"] == pytest.approx(4.5)
    assert merged["largest"] == pytest.approx((3 * 2 + 3 * 5 + 6 + 3 * 9) / 10)
    assert contract.all_ranks([nothing]) == {}
    assert [module.training for module in model.modules()] == [True, True, False]


def test_without_metrics_the_test_loss_is_reported():
    model = nn.Linear(3, 1)
    means = contract.evaluate(make_task(), model, [PAIR]).means()
    assert means == {"loss": pytest.approx(mean_square(model, PAIR).item())}


# --- scripts

GOOD = """
from neighbor import loss
def model(): ...
def data(rank, size, batch_size, seed): ...
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return a function that loads a script of a name and a text."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    before = set(sys.modules)

    def write_and_load(text, name="my_task.py"):
        (tmp_path / name).write_text(text)
        return script.load(tmp_path / name)

    yield write_and_load
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_script_s_functions_are_a_task_and_it_finds_its_neighbors(load, tmp_path):
    (tmp_path / "neighbor.py").write_text("def loss(model, batch): ...")
    task = load(GOOD)
    assert task.name == "my_task.py"
    assert (task.model.__name__, task.data.__name__) == ("model", "data")
    assert task.loss.__module__ == "neighbor"
    assert task.metrics is None
    assert sys.modules["my_task"].model is task.model
    text = GOOD.replace("neighbor import loss", "math import sin as loss, cos as metrics")
    assert callable(load(text, "another-task.py").metrics)


def test_the_documentation_s_script_keeps_the_contract(load):
    (text,) = pages.task_scripts()
    task = load(text)
    parts = []
    for rank in range(3):
        _, batches, test = prepare(task, rank, size=3)
        pass_over_the_part = list(itertools.islice(batches, -(-4000 // 3) // 4 + 1))
        parts.append(contract.samples(pass_over_the_part[-1]))
        assert sum(map(contract.samples, test)) in (333, 334)
    assert parts == [2, 1, 1]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("data = loss = print", "my_task.py", "my_task.py has no function model(): "),
        ("model = print\nloss = 3", "my_task.py", "has no function data() and no loss(): "),
        ("model = data = loss = print\nmetrics = 3", "my_task.py", "metrics is not a function"),
        ("", "my_task.txt", "is not a Python file: its name does not end in .py"),
        ("", "json.py", "has the name of a Python module, json: give it another one"),
    ],
)
def test_a_script_that_is_none_is_refused(load, text, name, message):
    with pytest.raises(UsageError) as raised:
        load(text, name)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [("1 / 0", ZeroDivisionError), ("def model(:", SyntaxError), ("import no_such", ImportError)],
)
def test_what_a_script_raises_itself_is_not_changed(load, text, error):
    with pytest.raises(error):
        load(text)


# --- folders of images


@pytest.fixture
def directory(tmp_path):
    pytest.importorskip("PIL")
    return tmp_path / "squares"


def names(files):
    return sorted(str(path.relative_to(path.parents[1])) for path in files.paths)


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_folders_are_classes_and_images_are_found_below_them(directory, held_out):
    squares(directory / "train", counts=(3, 2, 1))
    squares(directory / held_out, counts=(1, 1, 1))
    (directory / "train" / "red" / "0.png").rename(directory / "train" / "red" / "X.PNG")
    (directory / "train" / "red" / "notes.txt").touch()
    (directory / "train" / ".cache").mkdir()
    (directory / "train" / "blue" / "more").mkdir()
    (directory / "train" / "blue" / "0.png").rename(directory / "train" / "blue" / "more" / "0.png")
    found = folders.scan(directory)
    assert found.classes == ["blue", "green", "red"]
    assert names(found.train) == [
        *("blue/1.png", "blue/2.png", "green/0.png", "green/1.png", "more/0.png", "red/X.PNG"),
    ]
    assert sorted(found.train.labels) == [0, 0, 0, 1, 1, 2]
    assert list(found.test.labels) == [0, 1, 2]
    assert all(path.is_relative_to(directory / held_out) for path in found.test.paths)


@pytest.mark.parametrize("below", ["train", "."])
def test_without_a_test_folder_a_fifth_of_each_class_is_held_out(directory, below):
    squares(directory / below, counts=(10, 4, 1))
    first, again = folders.scan(directory), folders.scan(directory)
    assert names(first.test) == names(again.test)
    assert np.bincount(first.test.labels, minlength=3).tolist() == [2, 1, 0]
    assert np.bincount(first.train.labels).tolist() == [8, 3, 1]
    assert not set(first.train.paths) & set(first.test.paths)
    for files in (first.train, first.test):
        for path, label in zip(files.paths, files.labels):
            assert path.parent.name == first.classes[label]


def test_folders_that_are_no_data_set_are_refused(directory):
    def message():
        with pytest.raises(UsageError) as raised:
            folders.scan(directory)
        return str(raised.value)

    assert message() == f"cannot read the folder {directory}: No such file or directory"
    train = directory / "train"
    (train / "red").mkdir(parents=True)
    assert message().startswith(f"{train / 'red'} has no images (.bmp, ")
    (train / "red" / "0.png").touch()
    assert message().endswith("one for each class: it has 1")
    (train / "blue").mkdir()
    (train / "blue" / "0.png").touch()
    (directory / "val" / "red").mkdir(parents=True)
    (directory / "val" / "red" / "0.png").touch()
    both = f"{train} and {directory / 'val'}"
    assert message() == f"{both} have different classes: blue in one only"
    train.rename(directory / "training")
    assert message() == f"{directory} has a folder val, but none named train"


def test_an_image_is_its_middle_square_in_color(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((10, 30, 3), np.uint8)
    pixels[:, 10:20] = (255, 0, 51)
    for mode in ("RGB", "RGBA", "P"):
        path = tmp_path / f"{mode}.png"
        image.fromarray(pixels).convert(mode).save(path)
        decoded = images.decode(path, 8)
        assert decoded.shape == (3, 8, 8)
        assert decoded.dtype == torch.float32
        if mode != "P":  # whose palette lacks the color
            middle = decoded[:, 4, 4].tolist()
            assert middle == pytest.approx([1, -1, -0.6])


@pytest.mark.parametrize("content", [b"", b"no image", None])
def test_an_image_that_cannot_be_read_is_named(tmp_path, content):
    pytest.importorskip("PIL")
    path = tmp_path / "broken.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(images.ImageError, match=f"cannot read the image {path}: "):
        images.decode(path, 8)


@pytest.mark.parametrize(("size", "classes"), [(8, 2), (33, 5), (64, 10)])
def test_the_network_fits_every_size_and_number_of_classes(size, classes):
    assert images.network(classes)(torch.zeros(2, 3, size, size)).shape == (2, classes)


@pytest.mark.parametrize("shards", ["iid", "label-sorted", "dirichlet"])
def test_the_ranks_share_out_the_images(directory, shards):
    found = folders.scan(squares(directory, counts=(10, 10, 10)))
    task = images.task(found, 8, shards, alpha=0.1)
    labels, tested = [], 0
    for rank in range(4):
        batches, test = task.data(rank, 4, 6, 0)
        ((pictures, first),) = itertools.islice(batches, 1)
        assert pictures.shape == (6, 3, 8, 8)
        labels.append(set(first.tolist()))
        tested += sum(len(batch) for _, batch in test)
    assert tested == len(found.test.paths) == 6
    if shards != "dirichlet":
        assert (min(map(len, labels)) == 1) == (shards == "label-sorted")
