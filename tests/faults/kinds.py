"""The faults, and how a process of the job brings them about in itself."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

STEPS, EVERY = 24, 5
# The parts of an average's usual duration in which a rank is killed.
PARTS = {
    "killed in activation": (0.0, 0.2),
    "killed in the data phase": (0.3, 1.0),
    "killed in an average of all": (0.0, 1.0),
}
KILLED = {
    "killed in a step": "a rank is killed some time after it began a step",
    "killed before activation": "a rank is killed as it begins a step's average",
    "killed in activation": "a rank is killed soon after it began a step's average",
    "killed in the data phase": "a rank is killed later in a step's average",
    "killed after activation": "a rank is killed when a step's average is complete",
    "killed in an average of all": "a rank is killed in the average of a checkpoint",
    "all killed": "all ranks are killed, each some time after it began a step",
    "killed while writing": "a rank is killed before a call by which it writes to the disk",
    "killed while resuming": "a rank is killed before it reads a file of a checkpoint",
}
SURVIVED = {"killed and survived": "a rank is killed at some time, and the others go on (ULFM)"}
HARMLESS = {
    "stopped": "a rank is stopped for 5 seconds, or half of one where there is no other",
    "nan": "a rank's loss is NaN in a step",
    "slow disk": "each file takes a tenth of a second more",
    "full disk": "some calls say that no space is left",
    "read-only disk": "some checkpoints' directories cannot be made",
    "signalled": "a rank gets SIGTERM, and the training continues afterwards",
}
DAMAGED = {
    "truncated": "the newest checkpoint lacks the end of a file",
    "flipped": "a bit of a file of the newest checkpoint is another",
}
REFUSED = {
    "other settings": "the job continues with another learning rate",
    "other version": "the newest checkpoint has a format of a later version",
}
OTHERS = {"other ranks": "one rank more continues"}
KINDS = KILLED | HARMLESS | DAMAGED | REFUSED | OTHERS | SURVIVED


class Fault(NamedTuple):
    """A fault of one job.

    Attributes:
        kind: of `KINDS`.
        rank: whose process it is.
        step: in which it is.
        call: of calls that write or read, the number of the one.
        delay: seconds after the beginning of the step.
        part: where in an average it is, from 0 to 1.
    """

    kind: str
    rank: int
    step: int
    call: int
    delay: float
    part: float

    @classmethod
    def drawn(cls, generator: random.Random, ranks: int, kind: str) -> Fault:
        """Draw one of a kind."""
        return cls(
            kind,
            generator.randrange(ranks),
            generator.randrange(1, STEPS),
            generator.randrange(1, 40),
            generator.choice((0.0, generator.uniform(0, 0.01))),
            generator.random(),
        )


# Lets a process go on that long after it was stopped.
WAKER = """
import os, signal, sys, time
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.01)
time.sleep(seconds)
os.kill(pid, signal.SIGCONT)
"""


class Planted:
    """A fault in this process.

    Args:
        fault: which one.
        rank, size: this process's, and the number of ranks.
    """

    def __init__(self, fault: Fault, rank: int, size: int) -> None:
        self.stop_s = 5 if size > 1 else 0.5
        self.fault, self.is_mine = fault, fault.rank == rank
        self.calls = self.step = self.depth = 0
        self.durations: list[float] = []
        if self.is_mine and ("activation" in fault.kind or fault.kind in PARTS):
            self._watch_averages()
        getattr(self, f"_plant_{fault.kind.replace(' ', '_').replace('-', '_')}", self._nothing)()

    def _nothing(self) -> None:
        pass

    def begins(self, step: int) -> None:
        """Note that a step begins."""
        kind, self.step = self.fault.kind, step
        if step != self.fault.step or not (self.is_mine or kind == "all killed"):
            return
        if kind in ("killed in a step", "all killed", "killed and survived"):
            self._later(signal.SIGKILL)
        elif kind == "signalled":
            self._later(signal.SIGTERM)
        elif kind == "stopped":
            told = [WAKER, str(os.getpid()), str(self.stop_s)]
            subprocess.Popen([sys.executable, "-S", "-c", *told])
            self._later(signal.SIGSTOP)

    def is_nan(self, step: int) -> bool:
        """Return whether the loss of this step is to be NaN."""
        return self.fault.kind == "nan" and self.is_mine and step == self.fault.step

    def _watch_averages(self) -> None:
        """Have each average of a step, or of a checkpoint, begin and end with this fault."""
        from collectives import PartialAllreduce
        from collectives.collective import Collective

        of_all = self.fault.kind == "killed in an average of all"
        names = ("synchronize", "average") if of_all else ("__call__",)
        kinds: list[type] = [Collective, PartialAllreduce]
        for kind in kinds:
            kinds += kind.__subclasses__()
        for kind, name in itertools.product(kinds, names):
            if name in vars(kind):
                setattr(kind, name, self._watched(vars(kind)[name]))

    def _watched(self, function: Any) -> Any:
        """Return an average with the fault."""

        def called(*arguments: Any, **options: Any) -> Any:
            began, self.depth = time.perf_counter(), self.depth + 1
            if self.depth == 1:
                self._average_begins(began)
            try:
                return function(*arguments, **options)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.durations.append(time.perf_counter() - began)
                    is_due = self.step >= self.fault.step
                    if is_due and self.fault.kind == "killed after activation":
                        os.kill(os.getpid(), signal.SIGKILL)

        return called

    def _average_begins(self, began: float) -> None:
        """Be killed in this average if the fault is in it."""
        kind = self.fault.kind
        if self.step < self.fault.step:
            return
        if kind == "killed before activation":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind in PARTS:
            first, last = PARTS[kind]
            usual = statistics.median(self.durations or [1e-3])
            end = began + usual * (first + (last - first) * self.fault.part)
            # No daemon: where the average is over before, the process waits for it at its end.
            threading.Thread(target=kill_at, args=[end]).start()

    def _later(self, number: int) -> None:
        """Send this process a signal after the fault's delay."""
        if not self.fault.delay:
            os.kill(os.getpid(), number)
            return
        timer = threading.Timer(self.fault.delay, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    def _before(self, owner: Any, name: str, do: Any) -> None:
        """Do something before each call of a function, with the number of calls until then."""
        function = getattr(owner, name)

        def called(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            do(self.calls)
            return function(*arguments, **options)

        setattr(owner, name, called)

    def _kill_at_call(self, call: int) -> None:
        if self.is_mine and call == self.fault.call:
            os.kill(os.getpid(), signal.SIGKILL)

    def _plant_killed_while_writing(self) -> None:
        import torch

        from wagma.checkpoint import files, saving

        for owner, name in (
            *((saving, "save_file"), (torch, "save"), (saving, "durable"), (os, "fsync")),
            *((files, "write_json"), (files, "complete"), (Path, "rename"), (Path, "unlink")),
            *((files, "keep_newest"), (files.shutil, "rmtree")),
        ):
            self._before(owner, name, self._kill_at_call)

    def _plant_killed_while_resuming(self) -> None:
        from wagma.checkpoint import files

        few = self._replace_call(4)
        self._before(files, "read_json", few)
        self._before(files, "look_at", few)

    def _replace_call(self, most: int) -> Any:
        def do(call: int) -> None:
            if self.is_mine and call == 1 + self.fault.call % most:
                os.kill(os.getpid(), signal.SIGKILL)

        return do

    def _plant_slow_disk(self) -> None:
        from wagma.checkpoint import saving

        self._before(saving, "durable", lambda call: time.sleep(0.1))

    def _plant_full_disk(self) -> None:
        from wagma.checkpoint import saving

        def full(call: int) -> None:
            if self.is_mine and call % 3 == self.fault.call % 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self._before(saving, "durable", full)

    def _plant_read_only_disk(self) -> None:
        from wagma.checkpoint import files

        def refused(call: int) -> None:
            if call % 3 == self.fault.call % 3:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        self._before(files, "begin", refused)


def kill_at(end: float) -> None:
    """Kill this process at a time, to some microseconds."""
    while time.perf_counter() < end:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def damage(fault: Fault, newest: Path) -> None:
    """Damage a file of a checkpoint."""
    files = sorted(newest.iterdir())
    path = files[fault.call % len(files)]
    held = bytearray(path.read_bytes())
    if fault.kind == "truncated":
        path.write_bytes(held[: fault.call * len(held) // 41])
        return
    # Of the manifest, blanks may be others.
    place = len(held) // 2 if path.suffix != ".json" else held.index(b"sha256") + 12
    held[place] ^= 1
    path.write_bytes(held)
