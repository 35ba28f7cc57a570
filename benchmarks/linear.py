"""A task for `--script`: a linear model with log loss tells the digits 0 to 4 from 5 to 9.

As in Hop (section 7.2), except for the data: images of unit norm in place of webspam.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

TEST = 360  # of the 1,797 images


def model():
    return nn.Linear(64, 1)


def data(rank, size, batch_size, seed):
    images, digits = load_digits(return_X_y=True)
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    inputs = torch.tensor(images, dtype=torch.float32)
    signs = torch.tensor(np.where(digits < 5, 1.0, -1.0), dtype=torch.float32)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    test, train = order[:TEST][rank::size], order[TEST:][rank::size]
    drawn = torch.Generator().manual_seed(1000 * seed + rank)
    batches = [train[torch.randint(len(train), (batch_size,), generator=drawn)] for _ in range(500)]
    return [(inputs[each], signs[each]) for each in batches], [(inputs[test], signs[test])]


def loss(model, batch):
    inputs, signs = batch
    return functional.softplus(-signs * model(inputs).squeeze(1)).mean()


def metrics(model, batch):
    inputs, signs = batch
    right = signs * model(inputs).squeeze(1) > 0
    return {"accuracy": right.float().mean(), "loss": loss(model, batch)}
