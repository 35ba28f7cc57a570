"""A run's metrics for TensorBoard: `wagma train --tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


def place(run: Path, rank: int) -> Path:
    """Return the directory of a rank's files, which TensorBoard shows as a run of this name."""
    return run / FOLDER / f"rank-{rank:04}"


class Scalars:
    """The scalars of a rank's steps: step times of every rank, the rest of rank 0.

    Args:
        run: The run's directory.
        rank: This rank.
    """

    def __init__(self, run: Path, rank: int) -> None:
        self.rank = rank
        self._writer = SummaryWriter(str(place(run, rank)))

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a step's record."""
        step = record["step"]
        own, waited = record["compute_s"] + record["delay_s"], record["waiting_s"]
        values = {"time/step_ms": 1000 * own, "time/waiting_ms": 1000 * waited}
        if self.rank == 0:
            whole = own + record["average_s"]
            values |= {
                "train/loss": record["loss"],
                "train/samples_per_s": record["samples"] / whole if whole else 0.0,
                "train/elapsed_s": record["elapsed_s"],
                "averaging/timely": float(record["timely"]),
            }
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is still in memory."""
        self._writer.close()


def add_evaluations(
    run: Path, evaluations: Sequence[Mapping[str, Any]], metrics: list[str]
) -> None:
    """Add the averaged models' test results to rank 0's.

    Args:
        run: The run's directory.
        evaluations, metrics: Those of its summary.
    """
    with SummaryWriter(str(place(run, 0))) as writer:
        for each in evaluations:
            for name in metrics:
                writer.add_scalar(f"test/{name}", each[name], each["step"])
