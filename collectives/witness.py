"""Watching the processes of this node's ranks, where no launcher ends the job when one ends.

`srun` does not, unless it is told to, and the others would wait forever. Other nodes' ranks are
ended with the job by a rank that sees it. Nothing runs until a process ends.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["Identity", "Witness", "identity"]

GRACE = 2.0  # seconds in which a launcher, or the rank's own error, ends the job first


class Identity(NamedTuple):
    """A process: its number, where that counts, and when it started, in clock ticks."""

    process: int
    namespace: str
    started: str


def identity() -> Identity | None:
    """Return this process's identity; None: the system does not tell it."""
    try:
        return Identity(os.getpid(), os.readlink("/proc/self/ns/pid"), started(os.getpid()))
    except OSError:
        return None


def started(process: int) -> str:
    """Return when a process started."""
    # Its name, in parentheses, may contain any bytes.
    fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    return fields[19].decode()


class Witness:
    """Watches processes, and reports each that has ended.

    Args:
        report: is called with the identity of a process some time after its end, in a thread.
    """

    def __init__(self, report: Callable[[Identity], object]):
        self._report = report
        self._watched: dict[int, Identity] = {}
        self._poll: select.epoll | None = None

    def watch(self, others: list[Identity]) -> None:
        """Watch these processes too, if they are this system's."""
        mine = identity()
        new = [each for each in others if each not in self._watched.values() and each != mine]
        if mine is None or not new or not hasattr(os, "pidfd_open"):
            return
        if self._poll is None and not self._begin():
            return
        assert self._poll is not None
        for each in new:
            if each.namespace != mine.namespace:
                continue
            with suppress(OSError):
                descriptor = os.pidfd_open(each.process)
                same = False
                with suppress(OSError):
                    same = started(each.process) == each.started
                if not same:
                    os.close(descriptor)
                    continue
                self._watched[descriptor] = each
                self._poll.register(descriptor, select.EPOLLIN | select.EPOLLONESHOT)

    def _begin(self) -> bool:
        """Begin to watch; return whether the system lets it."""
        try:
            self._poll = select.epoll()
            threading.Thread(target=self._serve, name="wagma-witness", daemon=True).start()
        except (OSError, RuntimeError):
            self._poll = None
        return self._poll is not None

    def _serve(self) -> None:
        assert self._poll is not None
        while True:
            ended = self._poll.poll()
            time.sleep(GRACE)
            for descriptor, _ in ended:
                self._report(self._watched[descriptor])
