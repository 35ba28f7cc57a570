"""A task for `--script`: a wide network tells classes apart that are mixtures of Gaussians.

The toy that Liu et al. published with *Asynchronous Local-SGD Training for Language Modeling*
(2024): 512 features, 4 classes of 8 clusters each, around centers of unit norm, with noise of 0.5;
128,000 samples, of which each rank has a part; AdamW. Their network has 65,000 hidden units and a
learning rate of 2e-4; ours has 256, which two cores can train, and 4e-3, with which it is about as
fast. As theirs it is evaluated on samples that it trains with.
"""

import functools

import torch
from torch import nn
from torch.nn import functional

FEATURES, CLASSES, CLUSTERS, NOISE, SAMPLES, TESTED = 512, 4, 8, 0.5, 128_000, 10_000
HIDDEN = 256


def model():
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=4e-3, weight_decay=0.01)


@functools.lru_cache(maxsize=1)
def samples(seed):
    """Return all samples and their classes, in an order drawn by the seed."""
    drawn = torch.Generator().manual_seed(seed)
    clusters = CLASSES * CLUSTERS
    centers = functional.normalize(torch.randn(clusters, FEATURES, generator=drawn))
    cluster = torch.randperm(SAMPLES, generator=drawn) % clusters
    inputs = NOISE * torch.randn(SAMPLES, FEATURES, generator=drawn)
    return inputs.add_(centers[cluster]), cluster // CLUSTERS


def data(rank, size, batch_size, seed):
    inputs, classes = samples(seed)
    part = torch.arange(rank, SAMPLES, size)
    tested = torch.arange(TESTED)
    return batches(inputs, classes, part, batch_size, seed), [(inputs[tested], classes[tested])]


def batches(inputs, classes, part, batch_size, seed):
    """Yield batches of a part of the samples, in a new order each time."""
    drawn = torch.Generator().manual_seed(1000 * seed + int(part[0]))
    while True:
        for batch in part[torch.randperm(len(part), generator=drawn)].split(batch_size):
            yield inputs[batch], classes[batch]


def loss(model, batch):
    inputs, classes = batch
    return functional.cross_entropy(model(inputs), classes)


def metrics(model, batch):
    inputs, classes = batch
    right = model(inputs).argmax(1) == classes
    return {"accuracy": right.float().mean(), "loss": loss(model, batch)}
