"""Residual networks for small images (He et al., Deep residual learning, 2016, section 4.2)."""

from __future__ import annotations

import torch
from torch import nn

WIDTHS = 16, 32, 64  # channels of the three stages; each halves the image's sides
DEPTHS = {"resnet8": 1, "resnet14": 2, "resnet20": 3}  # blocks of a stage


class Block(nn.Module):
    """Two convolutions with batch normalization, whose input is added to their output.

    Args:
        before, after: Channels of input and output.
        stride: Of the first convolution.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.change = nn.Sequential(
            *convolution(before, after, stride), nn.ReLU(), *convolution(after, after, 1)
        )
        same = before == after and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (self.change(images) + self.shortcut(images)).relu()


def convolution(before: int, after: int, stride: int) -> list[nn.Module]:
    """Return a 3 × 3 convolution and its batch normalization."""
    return [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)]


def resnet(depth: str, channels: int, classes: int) -> nn.Module:
    """Return a network for images of any size from 8 × 8 on.

    Args:
        depth: One of `DEPTHS`.
        channels: Of the images.
        classes: Their number.
    """
    layers = [*convolution(channels, WIDTHS[0], 1), nn.ReLU()]
    before = WIDTHS[0]
    for after in WIDTHS:
        for number in range(DEPTHS[depth]):
            layers.append(Block(before, after, 2 if number == 0 and after > before else 1))
            before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
