"""The parts of a training step's time."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from collectives.timeline import told
from wagma.throttling import Cgroup, Gpu, Limited, Throttling

SCHEDULED = "/proc/thread-self/schedstat"


class Used(NamedTuple):
    """What a thread has used, as the kernel counts it.

    Attributes:
        cpu: seconds that it has run.
        queued: seconds that it was ready to run and did not: others ran on its core, or it was
            throttled; 0 if the kernel does not count them.
    """

    cpu: float
    queued: float


class Thread:
    """The thread that constructs it, as the kernel sees it; the same thread makes all calls.

    Args:
        device: where it trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._throttling = Throttling(Cgroup(), Gpu(device))
        self._scheduled = None
        # Not the process's: its other threads wait for messages, which takes time, too.
        with contextlib.suppress(OSError):  # of a kernel without these counts
            self._scheduled = open(SCHEDULED, "rb", buffering=0)  # noqa: SIM115

    def used(self) -> Used:
        """Return what it has used so far; takes 2 µs."""
        queued = 0
        if self._scheduled is not None:
            queued = int(os.pread(self._scheduled.fileno(), 64, 0).split()[1])
        return Used(time.thread_time(), queued * 1e-9)

    def faults(self) -> int:
        """Return how many of its page faults have waited for a disk."""
        return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt

    def limited(self) -> Limited:
        """Return how its process was limited since the last call."""
        return self._throttling.limited()


class Stopwatch:
    """The parts of a training step's time, in seconds; a sleep counts with its actual duration.

    A local optimizer's own step counts as compute: hooks on it mark where averaging, which may also
    precede the first one, ends and begins. A timeline that is recorded has these parts as spans.

    Args:
        optimizers: the rank's own.
        device: where it trains.
        clock: function that returns the time, in seconds.
        thread: the thread that makes the steps; None: the calling one.

    Attributes:
        compute: of this rank's own work.
        data, optimizer: of that, of loading data, and of the local optimizers' steps.
        delay: of injected delays.
        average: of averaging, with waiting for other ranks.
        cpu, queued: of the rank's own work, as of `Used`.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        thread: Thread | None = None,
    ) -> None:
        self.clock, self.thread = clock, thread or Thread(device)
        self.start()
        self._hooks = []
        for each in optimizers:
            if hasattr(each, "_optimizer_step_pre_hooks"):  # it has called torch's __init__
                self._hooks += [
                    each.register_step_pre_hook(lambda *_: self._steps()),
                    each.register_step_post_hook(lambda *_: self.stepped()),
                ]

    def close(self) -> None:
        """Look no longer at the local optimizers' steps."""
        for hook in self._hooks:
            hook.remove()

    def start(self) -> None:
        """Begin a step."""
        self.compute = self.data = self.optimizer = self.delay = self.average = 0.0
        self.cpu = self.queued = 0.0
        self._has_stepped = False
        self._faults = self.thread.faults()
        self._used, self._last = self.thread.used(), self.clock()

    @property
    def faults(self) -> int:
        """How many page faults of the step have waited for a disk so far."""
        return self.thread.faults() - self._faults

    def times(self) -> dict[str, float]:
        """Return the metrics' fields of the rank's own work in the step, once for each."""
        limited = self.thread.limited()
        return {
            "compute_s": self.compute,
            "data_s": self.data,
            "optimizer_s": self.optimizer,
            "cpu_s": self.cpu,
            "queued_s": self.queued,
            "faults": self.faults,
            "throttled_s": limited.throttled,
            "gpu_reasons": limited.gpu,
            "delay_s": self.delay,
        }

    def loaded(self) -> None:
        """Count the time since the last call as loading data."""
        self.data += self._own("loading")

    def computed(self, waited: float = 0.0) -> None:
        """Count the time since the last call as this rank's own work, except `waited` seconds."""
        self._own("compute", waited)

    def _steps(self) -> None:
        if self._has_stepped:  # another optimizer, so that this is not the average before the step
            self.computed()
        else:
            self.averaged()

    def stepped(self) -> None:
        """Count the time since the last call as a local optimizer's."""
        self._has_stepped = True
        self.optimizer += self._own("local optimizer")

    def delayed(self) -> None:
        """Count the time since the last call as an injected delay."""
        self.delay += self._lap("injected delay")

    def averaged(self) -> None:
        """Count the time since the last call as averaging."""
        self.average += self._lap("averaging")

    def skip(self) -> None:
        """Do not count the time since the last call in the step."""
        self._lap("keeping a model")

    def _own(self, name: str, waited: float = 0.0) -> float:
        before, own = self._used, self._lap(name) - waited
        self.compute += own
        self.average += waited
        self.cpu += self._used.cpu - before.cpu
        self.queued += self._used.queued - before.queued
        return own

    def _lap(self, name: str) -> float:
        last, self._last = self._last, self.clock()
        told(name, last, self._last)
        self._used = self.thread.used()
        return self._last - last
