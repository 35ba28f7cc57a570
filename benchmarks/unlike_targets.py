"""A task for `--script`: ranks of even number are to reach −1, the others 1, and the mean 0.

The model is a vector, and a rank's loss the squared distance from its own target, with noise in
each gradient. The metric is the model's mean element.
"""

import itertools

import torch
from torch import nn

LENGTH, NOISE, RATE = 64, 1.0, 0.05


class Vector(nn.Module):
    """A vector, which is its only parameter."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(LENGTH))

    def forward(self, targets):
        return self.value - targets


def model():
    return Vector()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


def data(rank, size, batch_size, seed):
    drawn = torch.Generator().manual_seed(1000 * seed + rank)
    target = -1.0 if rank % 2 == 0 else 1.0
    batches = (target + NOISE * torch.randn(LENGTH, generator=drawn) for _ in itertools.count())
    return batches, [torch.zeros(LENGTH)]


def loss(model, batch):
    return 0.5 * model(batch).square().mean() * LENGTH


def metrics(model, batch):
    return {"accuracy": 0.0, "mean": model(batch).mean()}
