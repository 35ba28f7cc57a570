"""Small trainings, over MPI and in simulated time."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib

import numpy as np
import torch
from bits import memory_of

from wagma.commands.methods import chosen
from wagma.methods import METHODS
from wagma.simulated_training import Alone
from wagma.simulation import MACHINES
from wagma.simulation.ranks import Communicator, Job, Ranks
from wagma.tasks import digits
from wagma.tasks.contract import Task


def settings(label, steps, **given):
    """Return the settings of a training of the digits, as `wagma train` has them."""
    choice = chosen(METHODS)(label).resolved({})
    values = {
        "algorithm": choice,
        "steps": steps,
        "seconds": None,
        "batch_size": 8,
        "accumulate": 1,
        "optimizer": "sgd",
        "lr": 0.05,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "clip_norm": None,
        "seed": 3,
        "evaluate_every": None,
        "evaluate_every_seconds": None,
        "step_time_ms": 0.0,
        "step_time_per_work_ms": 0.0,
        "imbalance": "none",
        "imbalance_scale": 1.0,
        "slow_rank": {},
    }
    return argparse.Namespace(**values | given)


def digits_task() -> Task:
    return digits.task("iid", Alone())


def job(ranks, steps, seconds=None, seed=0, one_node=True, spread=0.3):
    """Return a job whose steps take unequal times, of 1 s on average."""
    machine = dataclasses.replace(MACHINES["hdr"], ranks_per_node=ranks if one_node else 1)
    times = np.random.default_rng(seed).uniform(1 - spread, 1 + spread, (steps, ranks))
    return Job(machine, times, seconds)


def equal(one, other) -> bool:
    """Return whether two states have the same bits."""
    return one.keys() == other.keys() and all(
        torch.equal(value.view(-1).view(torch.uint8), other[name].view(-1).view(torch.uint8))
        for name, value in one.items()
    )


# The same calls, or trainings, of real ranks and of simulated ones


def compute(comm):
    """Compute a step, which takes time on simulated ranks only."""
    if isinstance(comm, Communicator):
        comm.ranks.compute(comm.rank)


def digested(things):
    state = hashlib.blake2b(digest_size=8)
    for thing in things:
        state.update(memory_of(thing))
    return state.hexdigest()


def real_and_simulated(comm, play, *arguments, steps, one_node=True, **options):
    """Return the digests of all ranks, of real ones and of simulated ones; on rank 0."""
    real = comm.gather(digested(play(comm, *arguments, **options)))
    if comm.rank > 0:
        return None, None
    ranks = Ranks(job(comm.size, steps, one_node=one_node, spread=0.5))
    return real, ranks.run(lambda comm: digested(play(comm, *arguments, **options)))
