"""``wagma train``: a small convolutional network learns scikit-learn's digits on all ranks.

Importing it loads torch and MPI; `train` is what the command line runs on every rank.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from importlib import metadata
from pathlib import Path

import torch
from mpi4py import MPI
from torch import nn

import collectives
import wagma
from wagma import data, imbalance, progress
from wagma.job import OK, Interrupted, Signals, complain, from_rank_0
from wagma.optim import WAGMA
from wagma.runs import JsonLines, Tally, summarise, write_json

REPORTED_VERSIONS = ("torch", "numpy", "scikit-learn", "mpi4py")


def small_cnn() -> nn.Module:
    """Return a network for 8 × 8 images and ten classes, with 6,090 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class Stopwatch:
    """What a step spends its time on, in seconds; a sleep counts for as long as it really took.

    The local optimiser's own step counts as compute: a hook on it tells where averaging begins.
    """

    def __init__(self, local_optimizer: torch.optim.Optimizer) -> None:
        self.start()
        local_optimizer.register_step_post_hook(lambda *_: self.computed())

    def start(self) -> None:
        """Begin a step."""
        self.compute = self.delay = self.average = 0.0
        self._last = time.perf_counter()

    def computed(self) -> None:
        """Count the time since the last call as this rank's own work."""
        self.compute += self._lap()

    def delayed(self) -> None:
        """Count the time since the last call as an injected delay."""
        self.delay += self._lap()

    def averaged(self) -> None:
        """Count the time since the last call as averaging."""
        self.average += self._lap()

    def _lap(self) -> float:
        last, self._last = self._last, time.perf_counter()
        return self._last - last


class Trainer:
    """One rank's model, optimiser and data, as the settings say; making it is collective."""

    def __init__(self, settings: argparse.Namespace, comm: MPI.Comm) -> None:
        self.settings, self.rank, self.size = settings, comm.rank, comm.size
        train_set, self.test_set = from_rank_0(data.load_digits, comm)
        self.images = torch.from_numpy(train_set.images)
        self.labels = torch.from_numpy(train_set.labels)
        shard = data.shard(train_set.labels, self.rank, self.size, settings.shards, settings.seed)
        self.batches = data.batches(shard, settings.batch_size, self.rank, settings.seed)
        torch.manual_seed(settings.seed)
        self.model = small_cnn()
        sgd = torch.optim.SGD(self.model.parameters(), lr=settings.lr, momentum=settings.momentum)
        self.stopwatch = Stopwatch(sgd)
        self.optimizer = WAGMA(
            sgd,
            self.model,
            comm=comm,
            group_size=settings.group_size,
            sync_period=settings.sync_period,
            wait=settings.wait,
            late=settings.late,
        )

    def steps(self) -> Iterator[dict]:
        """Make all steps, and yield each one's record for the metrics."""
        started = time.perf_counter()
        for step in range(self.settings.steps):
            self.stopwatch.start()
            loss = self.compute_gradient()
            self.hold_up(step)
            self.optimizer.step()
            self.stopwatch.averaged()
            result = self.optimizer.result
            yield {
                "step": step,
                "version": result.version,
                "loss": loss,
                "timely": result.timely,
                "source": result.source,
                "synchronized": result.synchronized,
                "group": list(result.group),
                "compute_s": self.stopwatch.compute,
                "delay_s": self.stopwatch.delay,
                "average_s": self.stopwatch.average,
                "elapsed_s": time.perf_counter() - started,
            }

    def compute_gradient(self) -> float:
        """Compute the gradient on this rank's next batch, and return the loss."""
        batch = torch.from_numpy(next(self.batches))
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.images[batch]), self.labels[batch])
        loss.backward()
        time.sleep(self.settings.step_time_ms / 1000)
        self.stopwatch.computed()
        return loss.item()

    def hold_up(self, step: int) -> None:
        """Sleep for as long as the injected imbalance makes this rank's step longer."""
        settings = self.settings
        drawn = imbalance.delay(settings.imbalance, settings.seed, step, self.rank, self.size)
        factor = settings.slow_rank.get(self.rank, 1.0)
        slow = imbalance.slow_rank_delay(factor, self.stopwatch.compute)
        time.sleep(drawn * settings.imbalance_scale + slow)
        self.stopwatch.delayed()

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the share of the test images that the model recognises."""
        predicted = self.model(torch.from_numpy(self.test_set.images)).argmax(1)
        return (predicted == torch.from_numpy(self.test_set.labels)).double().mean().item()


def train(settings: argparse.Namespace, run: Path, comm: MPI.Comm, signals: Signals) -> int:
    """Train on this rank, write the run's files, and return the exit status; collective.

    Args:
        settings: The command line's.
        run: The run's directory, which is empty.
        comm: The ranks that train together.
        signals: What may end the training early.
    """
    torch.set_num_threads(fair_threads(comm))
    trainer = Trainer(settings, comm)
    optimizer = trainer.optimizer
    tally = Tally(settings.steps, optimizer.collective.sync_period)
    if comm.rank == 0:
        write_json(run / "config.json", configuration(settings, run, comm.size, optimizer))

    trained = closed = None
    comm.Barrier()
    try:
        with signals.raising():
            run_steps(trainer, tally, run)
            trained = evaluate(trainer)
    except Interrupted:
        pass
    except collectives.ClosedError as error:
        closed = error
    optimizer.close()

    if all(comm.allgather(trained is not None)):
        tallies = comm.gather(tally)
        if comm.rank == 0:
            report(*trained, tallies, settings.batch_size, run)
    received = comm.allgather(signals.received)
    if any(received):
        if comm.rank == 0:
            complain(farewell(received, tally, run))
        return 128 + next(filter(None, received))
    if closed:
        raise closed
    return OK


def fair_threads(comm: MPI.Comm) -> int:
    """Return how many of the cores that this rank may run on are its share; collective.

    Ranks that are bound to cores of their own share them with nobody.
    """
    cores = os.sched_getaffinity(0)
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    sharers = sum(bool(cores & others) for others in node.allgather(cores))
    node.Free()
    return max(1, len(cores) // sharers)


def run_steps(trainer: Trainer, tally: Tally, run: Path) -> None:
    """Make all steps, and record, count and show them."""
    settings, rank = trainer.settings, trainer.rank
    with (
        JsonLines(run / f"rank-{rank:04}.jsonl") as metrics,
        closing(progress.start(rank, settings.steps)) as shown,
    ):
        for record in trainer.steps():
            metrics.write(record)
            tally.add(record)
            samples_per_s = trainer.size * settings.batch_size * tally.steps / tally.elapsed_s
            shown.update(tally.steps, record["loss"], samples_per_s, tally.timely_share)


def evaluate(trainer: Trainer) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the averaged model's test accuracy, and a copy of its state; collective."""
    with trainer.optimizer.averaged():
        state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        return trainer.accuracy(), state


def configuration(settings: argparse.Namespace, run: Path, size: int, optimizer: WAGMA) -> dict:
    """Return everything that a run depends on, with the defaults resolved."""
    return {
        **vars(settings),
        "name": run.name,
        "ranks": size,
        "group_size": optimizer.collective.group_size,
        "sync_period": optimizer.collective.sync_period,
        "wait": optimizer.collective.wait,
        "late": optimizer.collective.late,
        "threads": torch.get_num_threads(),
        "versions": {
            "wagma": wagma.__version__,
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in REPORTED_VERSIONS},
            "mpi": MPI.Get_library_version().splitlines()[0].strip("\0 "),
        },
    }


def report(
    accuracy: float,
    state: dict[str, torch.Tensor],
    tallies: list[Tally],
    batch_size: int,
    run: Path,
) -> None:
    """Write the finished run's model and summary, and print the summary."""
    torch.save(state, run / "model.pt")
    summary = {"accuracy": accuracy, **summarise(tallies, batch_size)}
    write_json(run / "summary.json", summary)
    print(
        f"test accuracy {accuracy:.2%}, wall time {summary['wall_s']:.2f} s, "
        f"{summary['samples_per_s']:,.0f} samples/s, timely {summary['timely_share']:.0%}, "
        f"bound/wall {summary['bound_over_wall']:.2f}\n"
        f"metrics, model and configuration are in {run}",
        flush=True,
    )


def farewell(received: list[int], tally: Tally, run: Path) -> str:
    """Return the line about a job that was ended by the signals that ranks received (0: none)."""
    names = sorted({signal.Signals(signum).name for signum in received if signum})
    ranks = [rank for rank, signum in enumerate(received) if signum]
    where = f" on rank {ranks[0]}" if len(ranks) == 1 < len(received) else ""
    return f"stopped by {' and '.join(names)}{where} after {tally.steps} steps: see {run}"
