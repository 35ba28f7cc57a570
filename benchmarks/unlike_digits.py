"""A task for `--script`: ranks of even number have the digits 0 to 4 only, the others 5 to 9.

Its metrics are the accuracy on all digits, and on those of either half of the ranks.
"""

import functools

import torch
from torch.nn import functional

from wagma.data import batches, load_digits
from wagma.tasks.digits import small_cnn as model

__all__ = ["data", "loss", "metrics", "model"]

SPLIT = 5

images_of = functools.cache(load_digits)


def data(rank, size, batch_size, seed):
    train, test = images_of()
    shard = ((train.labels < SPLIT) == (rank % 2 == 0)).nonzero()[0]
    images, labels = map(torch.from_numpy, train)
    drawn = map(torch.from_numpy, batches(shard, batch_size, rank, seed))
    tested = [tuple(map(torch.from_numpy, test))]
    return ((images[each], labels[each]) for each in drawn), tested


def loss(model, batch):
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def metrics(model, batch):
    images, labels = batch
    right = (model(images).argmax(1) == labels).float()
    even = labels < SPLIT
    return {"accuracy": right.mean(), "even": right[even].mean(), "odd": right[~even].mean()}
