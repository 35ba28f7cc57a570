"""Train with DistributedDataParallel: every step waits for all ranks.

    torchrun --nproc-per-node 4 ddp_before.py

`ddp_after.py` is the same loop with WAGMA.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def evaluate(model, data):
    inputs, targets = data.tensors
    return nn.functional.mse_loss(model(inputs), targets).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    inputs = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    sampler = DistributedSampler(data, size, rank)
    loader = DataLoader(data, batch_size=32, sampler=sampler)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parallel = DistributedDataParallel(model)
    loss = nn.MSELoss()

    before = evaluate(model, data)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            optimizer.zero_grad()
            loss(parallel(batch), targets).backward()
            optimizer.step()

    del parallel  # which would wait, with Python's lock, for threads that need it
    after = evaluate(model, data)
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")
        print(f"loss: {before:.3f} before, {after:.3f} after {epochs} epochs")
        print("expected on 4 ranks with default arguments: below 0.1")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
