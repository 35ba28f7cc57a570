"""DataLoader workers beside an engine: they know nothing of MPI, and end when they should."""

import pytest

pytestmark = pytest.mark.launch
# Python's tracker of semaphores now and then warns of one that a thread has just removed, when the
# interpreter ends before that thread has told it.
UNTRACKED = {"PYTHONWARNINGS": "ignore:resource_tracker:UserWarning"}

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset
from wagma.optim import WAGMA

class Numbers(Dataset):
    def __init__(self, start):
        self.start = start

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if self.start == "spawn":
            assert "mpi4py.MPI" not in sys.modules, "a worker has initialized MPI"
        return torch.full((4,), float(index))

def main(*loaders):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with WAGMA(model, optimizer, sync_period=3) as averager:
        for kind in loaders:
            start, workers = kind.split("-")
            loader = DataLoader(
                Numbers(start),
                batch_size=4,
                shuffle=True,
                num_workers=2 if start == "fork" else 1,  # a spawned one imports torch anew
                multiprocessing_context=start,
                persistent_workers=workers == "persistent",
            )
            for epoch in range(2):
                for batch in loader:
                    optimizer.zero_grad()
                    model(batch).square().mean().backward()
                    optimizer.step()
            next(iter(loader))  # workers in the middle of an epoch, when the loader goes or stays
        averager.synchronize()
        numbers = averager.flat.vectors[0].tolist()
    print(averager.collective.version, numbers, flush=True)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def test_workers_load_while_ranks_average(mpirun, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    loaders = ["fork-new", "fork-persistent", "spawn-persistent"]
    result = mpirun(2, script, *loaders, timeout=100, env=UNTRACKED).check()
    first, second = result.stdout.splitlines()
    assert first == second and first.startswith(f"{8 * len(loaders)} [")
    assert result.stderr == ""
