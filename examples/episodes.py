"""Learn to balance a pole from episodes of uneven length, where ranks make unequally many steps.

    OMP_NUM_THREADS=1 mpiexec -n 4 python episodes.py

Every rank plays for equally many frames, and takes a step after each episode: REINFORCE (Williams,
1992). `join()` lets those whose episodes are longer, and so fewer, end before the others.
"""

import argparse
import math

import torch
from mpi4py import MPI
from torch import nn
from torch.distributions import Categorical

from wagma.optim import WAGMA

LONGEST = 200  # frames of an episode


class CartPole:
    """A pole on a cart that is pushed left or right (Barto, Sutton and Anderson, 1983)."""

    def __init__(self):
        self.x, self.v, self.angle, self.spin = (0.1 * torch.rand(4) - 0.05).tolist()

    def state(self):
        return torch.tensor([self.x, self.v, self.angle, self.spin])

    def push(self, right):
        """Let a frame pass, and return whether the pole still stands."""
        sine, cosine = math.sin(self.angle), math.cos(self.angle)
        force = (10 if right else -10) + 0.05 * self.spin**2 * sine
        turn = (9.8 * sine - cosine * force / 1.1) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        drive = (force - 0.05 * turn * cosine) / 1.1
        self.x, self.v = self.x + 0.02 * self.v, self.v + 0.02 * drive
        self.angle, self.spin = self.angle + 0.02 * self.spin, self.spin + 0.02 * turn
        return abs(self.x) < 2.4 and abs(self.angle) < math.radians(12)


def play(policy):
    """Return the actions' log probabilities in one episode, a frame each."""
    pole, logs, stands = CartPole(), [], True
    while stands and len(logs) < LONGEST:
        choice = Categorical(logits=policy(pole.state()))
        action = choice.sample()
        logs.append(choice.log_prob(action))
        stands = pole.push(action.item())
    return torch.stack(logs)


def loss_of(logs):
    """Return the negative log probabilities, weighted by how long the pole stood after each."""
    returns = torch.arange(len(logs), 0, -1, dtype=torch.float32)
    discounted = (1 - 0.98**returns) / (1 - 0.98)
    return -(logs * (discounted - discounted.mean()) / (discounted.std() + 1e-6)).sum()


@torch.no_grad()
def mean_length(policy):
    return sum(len(play(policy)) for _ in range(10)) / 10


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--frames", type=int, default=10000, help="that each rank plays (default: 10000)"
    )
    frames = parser.parse_args().frames
    comm = MPI.COMM_WORLD

    torch.manual_seed(comm.rank)  # episodes differ between ranks
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    adam = torch.optim.Adam(policy.parameters(), lr=5e-3)
    with WAGMA(policy, adam) as averager:
        before = mean_length(policy)
        played = episodes = 0
        with averager.join():  # a rank that has left takes part in averages until all have
            while played < frames:
                logs = play(policy)
                adam.zero_grad()
                loss_of(logs).backward()
                adam.step()
                played, episodes = played + len(logs), episodes + 1
        after = mean_length(policy)  # all ranks have the same policy now
        counts = comm.gather(episodes)
        policies = comm.gather([parameter.tolist() for parameter in policy.parameters()])
    if comm.rank == 0:
        print("episodes of each rank:", *counts)
        print("all ranks have the same policy:", all(each == policies[0] for each in policies))
        print(f"mean frames of an episode: {before:.0f} before, {after:.0f} after {frames} frames")
        print("expected on 4 ranks with default arguments: above 100")


if __name__ == "__main__":
    main()
