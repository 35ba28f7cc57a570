"""Checkpoints of trainings on a GPU, as a part of gpu.py."""

from __future__ import annotations

import math
import statistics
import tempfile
import time

from common import take_turns
from gpu_parts import large_model, timing, torch_place
from gpu_processes import keep
from gpu_shards import BOTH, PERIOD

STEPS, AFTER = 9, 5  # of a training, and those before its checkpoint
MINUTE, BOUND = 60.0, 0.02
LONGER = 1.5  # a round of steps ÷ the writing of a checkpoint


def methods(optim):
    """Return classes and settings of trainings that repeat bit for bit."""
    wagma = {"sync_period": PERIOD, "wait": "group"}
    return {
        "Allreduce": (optim.Allreduce, {}),
        "WAGMA": (optim.WAGMA, wagma),
        "WAGMA, overlap": (optim.WAGMA, {**wagma, "overlap": True}),
        "WAGMA, state and correction": (optim.WAGMA, {**wagma, **BOTH}),
        "local SGD": (optim.LocalSGD, {"sync_period": PERIOD}),
        "D-PSGD": (optim.DPSGD, {}),
        "SGP": (optim.SGP, {}),
    }


class Training:
    """A small model with dropout, whose random numbers are those of its device."""

    def __init__(self, torch, comm, place, kind, settings, seed):
        self.torch, self.comm, self.place = torch, comm, place
        torch.manual_seed(seed + comm.rank)
        layers = torch.nn.Linear(32, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 8)
        self.model = torch.nn.Sequential(*layers).to(place)
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        self.averager = kind(self.model, self.adamw, comm=comm, **settings)

    def steps(self, which):
        """Make steps on batches of this rank's own."""
        for step in which:
            generator = self.torch.Generator().manual_seed(100 * self.comm.rank + step)
            batch = self.torch.randn(16, 32, generator=generator).to(self.place)
            self.adamw.zero_grad()
            self.model(batch).square().mean().backward()
            self.adamw.step()

    def numbers(self):
        """Return the parameters, and what the optimizer remembers of them."""
        self.averager.complete()
        state = self.adamw.state_dict()["state"]
        vectors = [value for of in state.values() for value in of.values()]
        vectors += self.model.state_dict().values()
        return self.torch.cat([vector.detach().flatten().double().cpu() for vector in vectors])


def continued(comm, directory, make, place):
    """Return how many numbers differ after going on from a checkpoint, and after reading it.

    Args:
        make: function of a place and a seed that returns a `Training`.
        place: where the training is; what is read on the CPU is compared as well.
    """
    from wagma.checkpoint import load, save

    training = make(place, 0)
    with training.averager:
        training.steps(range(AFTER))
        save(directory, training.averager)
        saved = training.numbers()
        training.steps(range(AFTER, STEPS))
        expected = training.numbers()
    training = make(place, 7)
    with training.averager:
        load(directory, training.averager)
        training.steps(range(AFTER, STEPS))
        found = training.numbers()
    training = make("cpu", 8)
    with training.averager:
        load(directory, training.averager)
        on_host = training.numbers()
    pairs = (found, expected), (on_host, saved)
    return [comm.allreduce(int((one != other).sum())) for one, other in pairs]


def price(torch, comm, directory, place, arguments):
    """Return the seconds of what a checkpoint of a large model costs, and its share of a minute."""
    from mpi4py import MPI

    from wagma import devices
    from wagma.checkpoint import Saver
    from wagma.optim import Allreduce

    model, count = large_model(place, arguments)
    local = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with Allreduce(model, local, comm=comm) as averager:
        saver = Saver(directory, averager, keep=1)

        def step():
            local.step()
            devices.wait_for(place)

        step()
        began = time.perf_counter()
        saver.begin()
        saver.finish()
        written = comm.bcast(time.perf_counter() - began)
        times = take_turns(comm, {"step": timing(comm, step)}, 5, arguments.seconds / 10)
        seconds = comm.bcast(statistics.median(times["step"]) if comm.rank == 0 else None)
        count_of_steps = math.ceil(LONGER * written / seconds)
        rounds = {"with": [], "without": []}
        waits = []
        for _ in range(5):
            for name, of in rounds.items():
                comm.Barrier()
                began = time.perf_counter()
                if name == "with":
                    saver.begin()
                    waits.append(comm.allreduce(time.perf_counter() - began, op=MPI.MAX))
                for _ in range(count_of_steps):
                    step()
                of.append(comm.allreduce(time.perf_counter() - began, op=MPI.MAX))
                if name == "with":
                    saver.finish()
    more = [(one - other) / MINUTE for one, other in zip(*rounds.values())]
    return {
        "parameters": count,
        "writing": written,
        "step": seconds,
        "steps of a round": count_of_steps,
        "rounds": {name: statistics.median(of) for name, of in rounds.items()},
        "waiting for average and copies": statistics.median(waits),
    }, statistics.median(more)


def checkpoints(comm, device, arguments):
    """Continue trainings from checkpoints on the GPU, and measure what a large one costs."""
    place = torch_place(comm, arguments)
    import torch

    from wagma import devices, optim

    if place.type == "cpu":
        return {"not measured": devices.why_none()}, {}
    figures = {}
    with tempfile.TemporaryDirectory() as own:
        root = comm.bcast(own)
        for index, (name, (kind, settings)) in enumerate(methods(optim).items()):

            def make(where, seed, kind=kind, settings=settings):
                return Training(torch, comm, where, kind, settings, seed)

            found = continued(comm, f"{root}/{index}", make, place)
            for how, differ in zip(("continued on the device", "read on the CPU"), found):
                figures[f"{name}, {how}: numbers that differ"] = (float(differ), 0)
            keep(comm, arguments, {"differ": {name: value for name, (value, _) in figures.items()}})
        seconds, share = price(torch, comm, f"{root}/large", place, arguments)
        comm.Barrier()
    figures["one checkpoint a minute: share of the time"] = (share, BOUND)
    return {"seconds": seconds, "figures": figures}, {}
