"""A training in simulated time has the bits of the real one, where that repeats."""

from pathlib import Path

import pytest
import torch
from trainings import digits_task, equal, job, settings

from wagma.evaluation import evaluate
from wagma.job import meet
from wagma.runs import JsonLines, recorded, write_json
from wagma.simulation.learning import learn
from wagma.simulation.replay import replay
from wagma.trainer import Trainer

STEPS = 50
REPEATING = (
    "allreduce",
    "local-sgd",
    "wagma:wait=group",
    "wagma:wait=group:late=conserving:overlap",
    "d-psgd",
    "sgp",
    "hop",
)

pytestmark = [pytest.mark.mpi, pytest.mark.transports("shared"), pytest.mark.ranks(4, 8)]

LONG = pytest.mark.extra, pytest.mark.long


def train(label, comm):
    """Train over MPI; return every rank's losses, and the state of the averaged model."""
    trainer = Trainer(settings(label, STEPS), digits_task(), comm)
    losses = [record["loss"] for record in trainer.steps()]
    state, _ = evaluate(trainer)
    trainer.averager.close()
    return comm.allgather(losses), state


@pytest.mark.parametrize("label", REPEATING)
def test_the_simulated_training_has_the_bits_of_the_real_one(comm, label):
    torch.set_num_threads(1)
    losses, state = train(label, comm)
    if comm.rank == 0:
        learned = learn(settings(label, STEPS), digits_task(), job(comm.size, STEPS), batched=False)
        assert learned.losses == losses
        assert equal(learned.state, state)
    meet(comm)


def record(label, comm, run):
    """Train over MPI with delays, and write what `wagma train` does; return losses and state."""
    delays = {comm.size - 1: 2.5}
    own = settings(label, STEPS, imbalance="random", imbalance_scale=0.5, slow_rank=delays)
    own.step_time_ms = 2.0
    trainer = Trainer(own, digits_task(), comm)
    losses = []
    with JsonLines(run / f"rank-{comm.rank:04}.jsonl") as metrics:
        for line in trainer.steps():
            metrics.write(line)
            losses.append(line["loss"])
    state, _ = evaluate(trainer)
    if comm.rank == 0:
        write_json(run / "config.json", {**recorded(own), "ranks": comm.size})
    trainer.averager.close()
    return comm.allgather(losses), state


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "label",
    [
        "wagma",
        pytest.param("wagma:late=paper:group_size=2", marks=LONG),
        pytest.param("wagma:overlap", marks=LONG),
        "eager-sgd",
        "partial-reduce",
    ],
)
def test_a_recorded_run_is_replayed_bit_for_bit(comm, label, tmp_path):
    torch.set_num_threads(1)
    run = Path(comm.bcast(str(tmp_path)))
    losses, state = record(label, comm, run)
    if comm.rank == 0:
        learned = replay(run, digits_task())
        assert learned.losses == losses
        assert equal(learned.state, state)
        outcomes = [each for of_rank in learned.outcomes for each in of_rank]
        assert label == "partial-reduce" or not all(each["timely"] for each in outcomes)
    meet(comm)
