"""The faults, and how a process of the job brings them about in itself."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

STEPS, EVERY = 24, 5
KILLED = {
    "killed in a step": "a rank is killed some time after it began a step",
    "all killed": "all ranks are killed, each some time after it began a step",
    "killed while writing": "a rank is killed before a call by which it writes to the disk",
    "killed while resuming": "a rank is killed before it reads a file of a checkpoint",
}
HARMLESS = {
    "stopped": "a rank is stopped for half a second",
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
KINDS = KILLED | HARMLESS | DAMAGED | REFUSED | OTHERS


class Fault(NamedTuple):
    """A fault of one job.

    Attributes:
        kind: of `KINDS`.
        rank: whose process it is.
        step: in which it is.
        call: of calls that write or read, the number of the one.
        delay: seconds after the beginning of the step.
    """

    kind: str
    rank: int
    step: int
    call: int
    delay: float

    @classmethod
    def drawn(cls, generator: random.Random, ranks: int, kinds: list[str]) -> Fault:
        """Draw one."""
        return cls(
            generator.choice(kinds),
            generator.randrange(ranks),
            generator.randrange(1, STEPS),
            generator.randrange(1, 40),
            generator.choice((0.0, generator.uniform(0, 0.01))),
        )


class Planted:
    """A fault in this process.

    Args:
        fault: which one.
        rank: this process's.
    """

    def __init__(self, fault: Fault, rank: int) -> None:
        self.fault, self.is_mine = fault, fault.rank == rank
        self.calls = 0
        getattr(self, f"_plant_{fault.kind.replace(' ', '_').replace('-', '_')}", self._nothing)()

    def _nothing(self) -> None:
        pass

    def begins(self, step: int) -> None:
        """Note that a step begins."""
        kind = self.fault.kind
        if step != self.fault.step or not (self.is_mine or kind == "all killed"):
            return
        if kind in ("killed in a step", "all killed"):
            self._later(signal.SIGKILL)
        elif kind == "signalled":
            self._later(signal.SIGTERM)
        elif kind == "stopped":
            wake = f"import os, time; time.sleep(0.5); os.kill({os.getpid()}, {signal.SIGCONT})"
            subprocess.Popen([sys.executable, "-S", "-c", wake])
            self._later(signal.SIGSTOP)

    def is_nan(self, step: int) -> bool:
        """Return whether the loss of this step is to be NaN."""
        return self.fault.kind == "nan" and self.is_mine and step == self.fault.step

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
