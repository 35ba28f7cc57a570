"""Train a classifier of scikit-learn's handwritten digits by the method that you name.

    OMP_NUM_THREADS=1 mpiexec -n 4 python digits.py --method PartialReduce

Each rank trains on its share of the images, and one step in ten is slow.
"""

import argparse
import random
import time

import torch
from mpi4py import MPI
from sklearn.datasets import load_digits
from torch import nn

import wagma.optim

BATCH = 32


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--method", choices=wagma.optim.__all__, default="WAGMA", help="(default: WAGMA)"
    )
    parser.add_argument("--steps", type=int, default=200, help="of each rank (default: 200)")
    parser.add_argument(
        "--delay", type=float, default=0.05, help="of one step in ten, in seconds (default: 0.05)"
    )
    arguments = parser.parse_args()
    comm = MPI.COMM_WORLD

    pixels, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(pixels / 16, dtype=torch.float32)
    labels = torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    share = train[comm.rank :: comm.size]

    torch.manual_seed(comm.rank)
    delays = random.Random(comm.rank)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = nn.CrossEntropyLoss()

    def accuracy():
        with torch.no_grad():
            return (model(inputs[test]).argmax(1) == labels[test]).float().mean().item()

    with getattr(wagma.optim, arguments.method)(model, sgd) as averager:
        before = accuracy()
        began = time.perf_counter()
        for _ in range(arguments.steps):
            batch = share[torch.randint(len(share), (BATCH,))]
            sgd.zero_grad()
            loss(model(inputs[batch]), labels[batch]).backward()
            if delays.random() < 0.1:  # a straggler's step
                time.sleep(arguments.delay)
            sgd.step()
        seconds = time.perf_counter() - began
        # Before any other communication: some methods wait for ranks that still make steps.
        averager.synchronize()  # all ranks have the average of their models now
        after = accuracy()
        seconds = comm.gather(seconds)
        models = comm.gather([parameter.tolist() for parameter in model.parameters()])
    if comm.rank == 0:
        print(f"{arguments.method}: seconds of each rank:", *(f"{each:.2f}" for each in seconds))
        print("all ranks have the same model:", all(each == models[0] for each in models))
        print(f"accuracy: {before:.3f} before, {after:.3f} after {arguments.steps} steps")
        print("expected on 4 ranks after 200 steps by any method: about 0.96")


if __name__ == "__main__":
    main()
