"""What `wagma train` can learn: the contract, scripts, and folders of images."""

import gzip
import itertools
import random
import sys
import types

import numpy as np
import pages
import pytest
import torch
from squares import squares
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from trainings import digits_task

from wagma.job import UsageError
from wagma.tasks import arrays, contract, folders, images, script
from wagma.tasks.contract import Task
from wagma.tasks.endless import Endless
from wagma.tasks.resnet import DEPTHS, resnet

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
    for _ in range(2):  # evaluations
        assert [batch[0] is each for batch, each in zip(test, (first, second))] == [True, True]
        assert len(list(test)) == 2
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
    drawn = [batch[0].tolist() for batch in itertools.islice(Endless(loader, "t"), 6)]
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


def test_test_batches_without_samples_do_not_count():
    task = digits_task()
    model, of = task.model(), task.data(400, 401, 4, 0)[1]
    assert [contract.samples(batch) for batch in of] == [0]
    assert contract.evaluate(task, model, of).samples == 0
    some = torch.zeros(3, 1, 8, 8), torch.zeros(3, dtype=torch.int64)
    assert 0 <= contract.evaluate(task, model, [*of, some]).means()["accuracy"] <= 1


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


# --- the files of MNIST and CIFAR


def idx(array):
    """Return an array's bytes in idx format."""
    shape = np.array(array.shape, ">i4").tobytes()
    return bytes([0, 0, 8, array.ndim]) + shape + array.astype(np.uint8).tobytes()


def mnist(directory, counts=(30, 12), dash="-", packed=False):
    """Write images whose brightness is their label, and return the labels by part."""
    directory.mkdir(exist_ok=True)
    labels = []
    for part, count in zip(("train", "t10k"), counts):
        labels.append(np.arange(count) % 3)
        pixels = np.broadcast_to(labels[-1][:, None, None] * 100, (count, 10, 8))
        for kind, array in (("images", pixels), ("labels", labels[-1])):
            name = directory / f"{part}-{kind}{dash}idx{array.ndim}-ubyte"
            content = idx(array)
            if packed:
                name, content = name.with_name(f"{name.name}.gz"), gzip.compress(content)
            name.write_bytes(content)
    return labels


def cifar(directory, classes):
    """Write CIFAR's binary files, with ten images each whose pixels are their label."""
    directory.mkdir(exist_ok=True)
    train, test, before = arrays.CIFAR[classes]
    for number, name in enumerate([*train, test]):
        rows = np.zeros((10, before + 3 * 32 * 32), np.uint8)
        rows[:, before - 1 :] = (np.arange(10) + number)[:, None] % 10
        (directory / name).write_bytes(rows.tobytes())


@pytest.mark.parametrize(("dash", "packed"), [("-", False), (".", False), ("-", True)])
def test_mnist_s_files_are_read(tmp_path, dash, packed):
    labels = mnist(tmp_path, dash=dash, packed=packed)
    assert arrays.are_in(tmp_path)
    found = arrays.read(tmp_path)
    assert found.classes == 3
    for part, expected in zip(found[1:], labels):
        assert part.pixels.shape == (len(expected), 1, 10, 8)
        assert part.labels.dtype == np.int64
        assert np.array_equal(part.labels, expected)
        assert (part.pixels == 100 * expected[:, None, None, None]).all()


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_s_binary_files_are_read(tmp_path, classes):
    cifar(tmp_path, classes)
    assert arrays.are_in(tmp_path)
    found = arrays.read(tmp_path)
    assert (found.classes, len(found.test.labels)) == (classes, 10)
    assert len(found.train.labels) == (50 if classes == 10 else 10)
    assert found.train.pixels.shape[1:] == (3, 32, 32)
    for part in found[1:]:
        assert (part.pixels == part.labels[:, None, None, None]).all()


def test_pickles_are_refused(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"cos\nsystem\n.")
    (tmp_path / "batches.meta").touch()
    with pytest.raises(UsageError, match="has CIFAR's Python version, whose files may run any cod"):
        arrays.are_in(tmp_path)


def test_folders_hold_no_such_files(directory):
    assert not arrays.are_in(squares(directory))


def change(path, *, at=None, to=b"", keep=None):
    content = bytearray(path.read_bytes())[:keep]
    if at is not None:
        content[at : at + len(to)] = to
    path.write_bytes(content)


DAMAGES = {
    "no idx file of 3-D bytes": ("train-images-idx3-ubyte", {"keep": 100}),
    "no idx file of 1-D bytes": ("t10k-labels-idx1-ubyte", {"at": 2, "to": b"\x0d"}),
    "has 30 images with 29 labels": (
        "train-labels-idx1-ubyte",
        {"at": 7, "to": b"\x1d", "keep": -1},
    ),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damaged_files_of_mnist_are_named(tmp_path, message):
    mnist(tmp_path)
    name, damage = DAMAGES[message]
    change(tmp_path / name, **damage)
    with pytest.raises(UsageError, match=f"^argument --images: {tmp_path}.* {message}"):
        arrays.read(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path):
    mnist(tmp_path, packed=True)
    change(tmp_path / "t10k-images-idx3-ubyte.gz", keep=40)
    with pytest.raises(UsageError, match="^argument --images: Compressed file ended before"):
        arrays.read(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(UsageError, match="has no t10k-images in idx format"):
        arrays.read(tmp_path)


def test_damaged_files_of_cifar_are_named(tmp_path):
    cifar(tmp_path, 10)
    change(tmp_path / "data_batch_2.bin", at=0, to=b"\x0a")
    with pytest.raises(UsageError, match="data_batch_2.bin has the label 10 of 10 classes"):
        arrays.read(tmp_path)
    change(tmp_path / "data_batch_2.bin", keep=3074)
    with pytest.raises(UsageError, match="data_batch_2.bin has 3074 bytes, not rows of 3073"):
        arrays.read(tmp_path)
    (tmp_path / "data_batch_2.bin").unlink()
    with pytest.raises(UsageError, match="No such file or directory: .*data_batch_2.bin"):
        arrays.read(tmp_path)


@pytest.mark.parametrize(("image_size", "shape"), [(None, (1, 10, 8)), (16, (1, 16, 16))])
def test_images_of_arrays_keep_their_size_or_are_resized(tmp_path, image_size, shape):
    mnist(tmp_path)
    task = images.task(arrays.read(tmp_path), image_size, "iid")
    batches, test = task.data(1, 2, 4, 0)
    (pictures, labels), *_ = test
    assert pictures.shape[1:] == next(iter(batches))[0].shape[1:] == shape
    expected = labels[:, None, None, None] * 100 / 127.5 - 1
    assert torch.allclose(pictures, expected.float().expand_as(pictures), atol=1e-5)
    assert task.model()(pictures).shape == (4, 3)


def test_the_digits_are_images_too():
    pytest.importorskip("sklearn")
    found = arrays.digits()
    assert found.train.pixels.shape == (1437, 1, 8, 8)
    assert (found.train.pixels.min(), found.train.pixels.max()) == (0, 255)
    assert len(found.test.labels) == 360


# --- augmentation, and residual networks


def test_images_are_moved_and_black_comes_in():
    torch.manual_seed(0)
    image = torch.arange(256.0).reshape(1, 1, 16, 16).repeat(200, 2, 1, 1)
    moved = images.cropped(image)
    seen = set()
    for one in moved:
        assert torch.equal(one[0], one[1])
        (up, left), value = divmod(int(one[0, 8, 8]), 16), one[0, 8, 8]
        seen.add((up - 8, left - 8))
        inside = image[0, 0, max(0, up - 8) : 16 + up - 8, max(0, left - 8) : 16 + left - 8]
        assert (one[0] == images.BLACK).sum() == 256 - inside.numel()
        assert value == image[0, 0, up, left]
    assert seen == set(itertools.product(range(-2, 3), repeat=2))


@pytest.mark.parametrize("flip", [False, True])
def test_half_of_the_images_are_mirrored(flip):
    torch.manual_seed(0)
    image = torch.zeros(1, 16, 16)
    image[:, :, :4] = 1  # at the left, however it is moved
    change = images.augmentation("crop-flip" if flip else "crop", "own")
    batch, labels = change([(image, n) for n in range(200)])
    mirrored = (batch[:, 0, :, 8:] > 0.5).any(dim=(1, 2))
    assert labels.tolist() == list(range(200))
    assert 70 < mirrored.sum() < 130 if flip else not mirrored.any()


class RandomCrop:
    """Stands in for torchvision's, which is not everywhere."""

    def __init__(self, size, padding, fill):
        self.size, self.fill = size, fill
        self.padding = padding[0], padding[0], padding[1], padding[1]

    def __call__(self, image):
        height, width = self.size
        wide = nn.functional.pad(image, self.padding, value=self.fill)
        top, left = (
            int(torch.randint(whole - part + 1, ()))
            for whole, part in zip(wide.shape[1:], self.size)
        )
        return wide[:, top : top + height, left : left + width]


class RandomHorizontalFlip:
    def __call__(self, image):
        return image.flip(2) if torch.rand(()) < 0.5 else image


class Compose:
    def __init__(self, changes):
        self.changes = changes

    def __call__(self, image):
        for change in self.changes:
            image = change(image)
        return image


@pytest.fixture
def torchvision(monkeypatch):
    """Let there be torchvision's transforms, or what stands in for them."""
    try:
        import torchvision.transforms  # noqa: F401
    except (ImportError, RuntimeError):
        package, made = types.ModuleType("torchvision"), types.ModuleType("transforms")
        for each in (RandomCrop, RandomHorizontalFlip, Compose):
            setattr(made, each.__name__, each)
        package.transforms = made
        monkeypatch.setitem(sys.modules, "torchvision", package)


@pytest.mark.parametrize(("augment", "count"), [("crop", 15), ("crop-flip", 30)])
def test_torchvision_draws_the_same_changes_with_other_numbers(torchvision, augment, count):
    picture = torch.arange(2 * 16 * 8.0).reshape(1, 2, 16, 8).repeat(400, 1, 1, 1)
    drawn = []
    for by in ("own", "torchvision"):
        torch.manual_seed(0)
        drawn.append(images.augmentation(augment, by).change(picture))
    seen = [{tuple(each.flatten().tolist()) for each in of} for of in drawn]
    assert seen[0] == seen[1] and len(seen[0]) == count
    assert not torch.equal(*drawn)


def test_without_torchvision_its_changes_are_refused_and_ours_are_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(UsageError, match="^argument --augment-with: cannot import torchvision: "):
        images.augmentation("crop", "torchvision")
    assert images.augmentation("none", "torchvision") is None
    assert images.augmentation("crop", "own").change(torch.ones(2, 1, 8, 8)).shape == (2, 1, 8, 8)


@pytest.mark.parametrize("augment", ["none", "crop-flip"])
def test_only_training_images_are_changed(tmp_path, augment):
    mnist(tmp_path)
    batches, test = images.task(arrays.read(tmp_path), 16, "iid", None, "cnn", augment).data(
        0, 1, 30, 0
    )
    changed = [
        (pictures.std(dim=(1, 2, 3)) > 0.01).any() for pictures, _ in (next(iter(batches)), *test)
    ]
    assert changed == [augment != "none", False]


@pytest.mark.parametrize(("depth", "parameters"), [("resnet8", 78042), ("resnet20", 272474)])
def test_residual_networks_have_the_layers_of_their_names(depth, parameters):
    """Those of the paper, with 1 × 1 convolutions where the shape changes."""
    model = resnet(depth, 3, 10)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    layers = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear)
        or (isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3))
    ]
    assert len(layers) == int(depth.removeprefix("resnet"))
    assert sum(each.numel() for each in model.parameters()) == parameters
    assert DEPTHS.keys() == {"resnet8", "resnet14", "resnet20"}
