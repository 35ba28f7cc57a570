"""Both late rules in real training, beside Allreduce-SGD and local SGD: which is better?

    mpiexec -n 8 python benchmarks/late_rules.py

The small network of `wagma train` learns scikit-learn's digits; a sleep with 5 % of jitter stands
for an accelerator's work. Balanced, and with rank 0 five times as slow; shards that are identically
distributed, and sorted by label. Loss on the training set and accuracy on the test set are those of
the averaged model, mean ± standard deviation over the seeds, after the same number of steps on
every rank; results of Allreduce-SGD and local SGD do not depend on slow ranks. It takes 8 minutes
for each number of ranks, and `make bench` does not run it by default.
"""

import statistics
import time

import numpy as np
import torch
from common import parser, report, spread
from mpi4py import MPI
from torch import nn

from wagma import data
from wagma.optim import WAGMA
from wagma.tasks.digits import small_cnn

SYNC_PERIOD = 10
JITTER = 0.05
SLOWNESS = 5.0


class Task:
    """One rank's shard, batches and model; the same in every variant with the same seed."""

    def __init__(self, comm, shards, seed):
        self.train_set, self.test_set = data.load_digits()
        shard = data.shard(self.train_set.labels, comm.rank, comm.size, shards, seed)
        self.batches = data.Batches(shard, 32, comm.rank, seed)
        self.jitter = np.random.default_rng([seed, comm.rank])
        torch.manual_seed(seed)
        self.model = small_cnn()

    def compute_gradient(self):
        batch = next(self.batches)
        images = torch.from_numpy(self.train_set.images[batch])
        labels = torch.from_numpy(self.train_set.labels[batch])
        self.model.zero_grad()
        nn.functional.cross_entropy(self.model(images), labels).backward()

    @torch.no_grad()
    def measure(self):
        """Return the loss on the whole training set, and the accuracy on the test set."""
        logits = self.model(torch.from_numpy(self.train_set.images))
        labels = torch.from_numpy(self.train_set.labels)
        loss = nn.functional.cross_entropy(logits, labels).item()
        predicted = self.model(torch.from_numpy(self.test_set.images)).argmax(1).numpy()
        return {"loss": loss, "accuracy": float((predicted == self.test_set.labels).mean())}


def allreduce_sgd(comm, task, sgd, arguments):
    parameters = list(task.model.parameters())
    for _ in range(arguments.steps):
        task.compute_gradient()
        gradient = nn.utils.parameters_to_vector([p.grad for p in parameters]).numpy()
        comm.Allreduce(MPI.IN_PLACE, gradient)
        nn.utils.vector_to_parameters(
            torch.from_numpy(gradient / comm.size), [p.grad for p in parameters]
        )
        sgd.step()
    return task.measure()


def wagma_sgd(comm, task, sgd, arguments, slowness, **settings):
    """Train by WAGMA-SGD, or by local SGD if groups have one rank."""
    timely = 0
    with WAGMA(task.model, sgd, comm=comm, sync_period=SYNC_PERIOD, **settings) as averager:
        for _ in range(arguments.steps):
            task.compute_gradient()
            if slowness:
                factor = slowness if comm.rank == 0 else 1.0
                step_time = arguments.step_time_ms / 1000 * factor
                time.sleep(step_time * max(0.0, 1 + JITTER * task.jitter.normal()))
            sgd.step()
            timely += averager.result.timely and not averager.result.synchronized
        with averager.averaged():
            measured = task.measure()
    versions = arguments.steps - arguments.steps // SYNC_PERIOD
    return measured | {"timely": comm.allreduce(timely) / versions / comm.size}


def variants():
    """Return {name: (function, its settings)}."""
    yield "Allreduce-SGD", allreduce_sgd, {}
    yield "local SGD", wagma_sgd, {"group_size": 1, "slowness": 0}
    for late in ("paper", "conserving"):
        yield f"{late}, balanced", wagma_sgd, {"late": late, "slowness": 1.0}
        yield f"{late}, one 5x slow", wagma_sgd, {"late": late, "slowness": SLOWNESS}


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--step-time-ms", type=float, default=12.0)
    arguments.add_argument("--lr", type=float, default=0.02)
    arguments = arguments.parse_args()
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    results = {}
    for seed in range(arguments.seeds):
        for shards in ("iid", "label-sorted"):
            for name, train, settings in variants():
                task = Task(comm, shards, seed)
                sgd = torch.optim.SGD(task.model.parameters(), lr=arguments.lr, momentum=0.9)
                measured = train(comm, task, sgd, arguments, **settings)
                results.setdefault(shards, {}).setdefault(name, []).append(measured)
    if comm.rank:
        return
    print(
        f"# {comm.size} ranks, {arguments.steps} steps, {arguments.seeds} seeds, "
        f"sync period {SYNC_PERIOD}, lr {arguments.lr}"
    )
    for shards, rows in results.items():
        print(f"\n{shards + ' shards':24} {'loss':>16} {'accuracy':>16} {'timely':>8}")
        for name, runs in rows.items():
            loss, accuracy = ([run[key] for run in runs] for key in ("loss", "accuracy"))
            timely = [run["timely"] for run in runs if "timely" in run and name != "local SGD"]
            share = f"{statistics.mean(timely):8.2f}" if timely else ""
            print(f"{name:24} {spread(loss, 4)} {spread(accuracy, 4)} {share}")
    report(arguments, "late-rules", comm.size, results)


if __name__ == "__main__":
    main()
