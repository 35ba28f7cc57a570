"""Train a generative adversarial network: two models, each with an averager of its own.

    OMP_NUM_THREADS=1 mpiexec -n 4 python gan.py

The generator learns to draw points of a circle of radius 1.
"""

import argparse
import math

import torch
from mpi4py import MPI
from torch import nn

from wagma.optim import WAGMA

NOISE, BATCH = 4, 128


def network(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
        nn.Linear(64, outputs),
    )  # fmt: skip


def real_points():
    angles = 2 * math.pi * torch.rand(BATCH)
    return torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(BATCH, 2)


def distance(points):
    """Return the points' mean distance from the circle."""
    return (points.norm(dim=1) - 1).abs().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000, help="of each rank (default: 1000)")
    steps = parser.parse_args().steps
    comm = MPI.COMM_WORLD

    torch.manual_seed(comm.rank)  # points and noise differ between ranks
    generator, critic = network(NOISE, 2), network(2, 1)
    generator_adam = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    critic_adam = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    loss = nn.BCEWithLogitsLoss()
    real, fake = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)

    with (
        WAGMA(generator, generator_adam) as generator_averager,
        WAGMA(critic, critic_adam),
    ):
        noise = torch.randn(1000, NOISE)
        before = distance(generator(noise))
        for _ in range(steps):
            drawn = generator(torch.randn(BATCH, NOISE))
            critic_adam.zero_grad()
            (loss(critic(real_points()), real) + loss(critic(drawn.detach()), fake)).backward()
            critic_adam.step()  # also averages the critic

            generator_adam.zero_grad()
            loss(critic(drawn), real).backward()
            generator_adam.step()  # also averages the generator
        with generator_averager.averaged():
            points = generator(noise)
            after = distance(points)
            quarters = len({(x > 0, y > 0) for x, y in points.tolist()})
    if comm.rank == 0:
        print(f"drawn points are in {quarters} of the circle's 4 quarters")
        print(f"distance from the circle: {before:.3f} before, {after:.3f} after {steps} steps")
        print("expected on 4 ranks with default arguments: 4 quarters, below 0.1")


if __name__ == "__main__":
    main()
