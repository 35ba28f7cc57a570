"""A job that trains with a fault: `wagma train` with a script's task, which is in this file.

mpiexec -n 2 python tests/faults/job.py FAULT FLAGS...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
TASK = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.modules["matplotlib"] = None
planted = sys.modules["__main__"].planted
calls = -2  # loss() is called once before the first step, and once for the test data


def model():
    made = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
    made.ballast = nn.Parameter(torch.ones(1 << 15))  # so that data take some time in an average
    return made


def data(rank, size, batch_size, seed):
    inputs = torch.randn(260, 4, generator=torch.Generator().manual_seed(seed))
    everything = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler = DistributedSampler(everything, size, rank)
    # BatchNorm takes no batch of one sample, which may be left of a pass dealt anew.
    batches = DataLoader(everything, batch_size, sampler=sampler, drop_last=True)
    return batches, [everything[:20]]


def loss(model, batch):
    global calls
    calls += 1
    planted.begins(calls)
    inputs, targets = batch
    error = nn.functional.mse_loss(model(inputs), targets) + model.ballast.square().mean()
    return error * (float("nan") if planted.is_nan(calls) else 1.0)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 9, 0.5)
"""


def run(fault: list | None, flags: list[str]) -> int:
    """Train in this process, which is a rank, and return the exit status."""
    global planted
    sys.path.insert(0, str(HERE))
    from collectives.agreement import launched_tasks
    from faults.kinds import Fault, Planted
    from wagma import cli
    from wagma.job import launcher_rank

    made = Fault(*fault) if fault else Fault("none", 0, -1, 0, 0.0, 0.0)
    planted = Planted(made, launcher_rank(), max(launched_tasks()[0], 1))
    sys.modules["__main__"].planted = planted
    try:
        return cli.main(flags)
    except SystemExit as ended:
        return int(ended.code or 0)


if __name__ == "__main__":
    status = run(json.loads(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    sys.exit(status)
