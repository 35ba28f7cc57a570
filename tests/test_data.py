"""The digits, their shards and batches: who trains on what."""

import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wagma import data

SIZES = st.integers(1, 64)
KINDS = st.sampled_from(["iid", "label-sorted"])
LABELS = np.arange(500) % 10


def test_the_digits_are_all_there_and_split_the_same_every_time():
    pytest.importorskip("sklearn")
    train, test = data.load_digits()
    assert train.images.shape == (data.TRAIN_IMAGES, 1, 8, 8)
    assert test.images.shape == (data.TEST_IMAGES, 1, 8, 8)
    assert train.images.dtype == np.float32
    assert (train.images.min(), train.images.max()) == (0, 1)
    assert set(test.labels) == set(range(10))
    counts = np.bincount(np.concatenate([train.labels, test.labels]))
    assert list(counts) == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    again, _ = data.load_digits()
    assert np.array_equal(train.images, again.images)


def test_the_digits_are_scikit_learns_whether_its_file_is_found_or_not(monkeypatch):
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = data.read_digits()
    monkeypatch.setattr(Path, "exists", lambda path: False)
    for expected in (datasets.load_digits(return_X_y=True), data.read_digits()):
        assert np.array_equal(pixels, expected[0])
        assert np.array_equal(labels, expected[1])


def test_reading_the_digits_does_not_load_scikit_learn():
    code = "import sys; from wagma import data; data.load_digits(); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "wagma.data" in ran.stdout.split()
    assert "sklearn" not in ran.stdout.split()


def test_no_image_is_both_trained_on_and_tested_with():
    train, test = data.load_digits()
    trained_on = {image.tobytes() for image in train.images}
    assert not any(image.tobytes() in trained_on for image in test.images)


@given(size=SIZES, kind=KINDS, seed=st.integers(0, 2**40))
def test_shards_share_out_the_training_set_evenly(size, kind, seed):
    shards = [data.shard(LABELS, rank, size, kind, seed) for rank in range(size)]
    assert sorted(np.concatenate(shards)) == list(range(len(LABELS)))
    lengths = {len(shard) for shard in shards}
    assert max(lengths) - min(lengths) <= 1


def test_label_sorted_shards_have_few_digits():
    for rank in range(5):
        shard = data.shard(LABELS, rank, 5, "label-sorted", seed=0)
        assert set(LABELS[shard]) == {2 * rank, 2 * rank + 1}


@pytest.mark.slow
@settings(max_examples=25)
@given(size=SIZES, alpha=st.sampled_from([0.001, 0.1, 1000]), seed=st.integers(0, 2**40))
def test_dirichlet_shards_share_out_the_training_set_and_leave_nobody_without(size, alpha, seed):
    shards = [data.shard(LABELS, rank, size, "dirichlet", seed, alpha) for rank in range(size)]
    assert sorted(np.concatenate(shards)) == list(range(len(LABELS)))
    assert min(map(len, shards)) >= min(10, len(LABELS) // size)
    again = data.shard(LABELS, size - 1, size, "dirichlet", seed, alpha)
    assert np.array_equal(shards[-1], again)


@pytest.mark.parametrize(("alpha", "alike"), [(0.1, False), (1000, True)])
def test_dirichlet_shards_are_the_more_alike_the_larger_alpha_is(alpha, alike):
    """The largest share that a rank has of a label, in the mean of the labels: 1/5 if all do."""
    shards = [data.shard(LABELS, rank, 5, "dirichlet", 7, alpha) for rank in range(5)]
    counts = np.array([np.bincount(LABELS[shard], minlength=10) for shard in shards])
    largest = (counts.max(axis=0) / counts.sum(axis=0)).mean()
    assert largest < 0.25 if alike else largest > 0.6
    other = data.shard(LABELS, 0, 5, "dirichlet", 8, alpha)
    assert not np.array_equal(shards[0], other)


def test_iid_shards_have_all_digits_and_depend_on_the_seed():
    shard = data.shard(LABELS, 0, 5, "iid", seed=0)
    assert set(LABELS[shard]) == set(range(10))
    assert not np.array_equal(shard, data.shard(LABELS, 0, 5, "iid", seed=1))


def test_more_ranks_than_images_are_refused():
    with pytest.raises(ValueError, match="500 training images cannot be divided among 501 ranks"):
        data.shard(LABELS, 0, 501, "iid", seed=0)


@given(length=st.integers(1, 50), batch_size=st.integers(1, 120))
def test_every_pass_over_the_shard_draws_every_image_once(length, batch_size):
    shard = 10 * np.arange(length)
    drawn = list(islice(data.Batches(shard, batch_size, rank=1, seed=2), 20))
    assert {len(batch) for batch in drawn} == {batch_size}
    stream = np.concatenate(drawn)
    for start in range(0, len(stream) - length + 1, length):
        assert sorted(stream[start : start + length]) == list(shard)


def test_batches_depend_on_the_seed_and_the_rank_alone():
    def first(rank, seed):
        return next(data.Batches(np.arange(1000), 32, rank, seed)).tolist()

    assert first(0, 0) == first(0, 0)
    assert len({tuple(first(rank, seed)) for rank in range(4) for seed in range(4)}) == 16
