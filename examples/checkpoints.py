"""Save checkpoints and continue from them, keep the best model, and stop early.

    OMP_NUM_THREADS=1 mpiexec -n 4 python checkpoints.py
    OMP_NUM_THREADS=1 mpiexec -n 4 python checkpoints.py --resume --epochs 100

A checkpoint after each epoch has what all ranks continue from. Rank 0 saves the best average of all
models, one file for any use. All ranks must make the calls that are marked as collective, in the
same order; saving a file is not collective.
"""

import argparse
import math
import os

import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from wagma import checkpoint
from wagma.optim import WAGMA

PATIENCE = 3  # epochs without a better model after which the training stops


def samples(count, seed):
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


@torch.no_grad()
def evaluate(model, data):
    inputs, targets = data.tensors
    return nn.functional.mse_loss(model(inputs), targets).item()


def save(state, path):
    """Write a file that is never partial, even if the job is killed."""
    torch.save(state, f"{path}.part")
    os.replace(f"{path}.part", path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="continue from checkpoints/")
    arguments = parser.parse_args()
    comm = MPI.COMM_WORLD

    training, test = samples(4096, seed=0), samples(1024, seed=1)
    sampler = DistributedSampler(training, comm.size, comm.rank)
    loader = DataLoader(training, batch_size=32, sampler=sampler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    before = evaluate(model, test)
    progress = {"epochs": 0, "lowest": math.inf, "since": 0}

    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with WAGMA(model, sgd) as averager:  # collective, and so is the end of the block
        if arguments.resume and (found := checkpoint.load("checkpoints", averager)):  # collective
            progress = found["progress"]
        while progress["epochs"] < arguments.epochs and progress["since"] < PATIENCE:
            sampler.set_epoch(progress["epochs"])
            for inputs, targets in loader:
                sgd.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                sgd.step()
            loss = None
            with averager.averaged():  # collective
                if comm.rank == 0:
                    loss = evaluate(model, test)
                    if loss < progress["lowest"]:
                        save(model.state_dict(), "best.pt")
            loss = comm.bcast(loss)  # collective: all ranks stop after the same epoch
            progress["epochs"] += 1
            progress["since"] = 0 if loss < progress["lowest"] else progress["since"] + 1
            progress["lowest"] = min(loss, progress["lowest"])
            checkpoint.save("checkpoints", averager, progress=progress)  # collective

    if comm.rank == 0:
        model.load_state_dict(torch.load("best.pt"))
        after, epochs = evaluate(model, test), progress["epochs"]
        print("loaded, the best model has the same loss:", after == progress["lowest"])
        print(f"its test loss: {before:.3f} before, {after:.3f} after {epochs} epochs")
        print("expected on 4 ranks with default arguments: below 0.1")


if __name__ == "__main__":
    main()
