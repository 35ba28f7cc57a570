"""Train with WAGMA: only every tenth step waits for all ranks.

    OMP_NUM_THREADS=1 mpiexec -n 4 python ddp_after.py

`ddp_before.py` is the same loop with DistributedDataParallel.
"""

import argparse

import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from wagma.optim import WAGMA


@torch.no_grad()
def evaluate(model, data):
    inputs, targets = data.tensors
    return nn.functional.mse_loss(model(inputs), targets).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

    inputs = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    sampler = DistributedSampler(data, size, rank)
    loader = DataLoader(data, batch_size=32, sampler=sampler)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    averager = WAGMA(model, optimizer)
    loss = nn.MSELoss()

    before = evaluate(model, data)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            optimizer.zero_grad()
            loss(model(batch), targets).backward()
            optimizer.step()

    averager.synchronize()  # all ranks have their mean model now
    after = evaluate(model, data)
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")
        print(f"loss: {before:.3f} before, {after:.3f} after {epochs} epochs")
        print("expected on 4 ranks with default arguments: below 0.1")
    averager.close()


if __name__ == "__main__":
    main()
