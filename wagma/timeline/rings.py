"""Reading what ranks have recorded: see `collectives.recording.recorder`."""

from __future__ import annotations

import json
import logging
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from collectives.recording.recorder import MAGIC
from collectives.timeline import FOLDER
from wagma.job import UsageError

log = logging.getLogger(__name__)

# As `ring_header` and `ring_event` of the recorder.
HEADER = struct.Struct("<8sQQQQ24xQ")
EVENT = np.dtype(
    [
        ("time", "<i8"),
        ("length", "<i8"),
        ("numbers", "<i8", (5,)),
        ("sequence", "<u4"),
        ("kind", "u1"),
        ("collective", "u1"),
        ("thread", "u1"),
        ("count", "u1"),
    ]
)
AGE = 1.0  # seconds by which an earlier recording's last event is older than a new one's beginning


class Unfinished(UsageError):
    """The process that made the file was ended while it began to record."""


@dataclass(frozen=True)
class Ring:
    """What one rank has recorded.

    Attributes:
        path: of the file.
        about: what the file says of itself, see `collectives.timeline.Recording`.
        events: structured array of the newest events, in the order of their recording.
        dropped: how many older ones have been overwritten.
        torn: how many were not complete when the process ended.
    """

    path: Path
    about: dict[str, Any]
    events: np.ndarray
    dropped: int
    torn: int

    @property
    def rank(self) -> int:
        """The rank in the job."""
        return self.about["rank"]

    @property
    def identities(self) -> set[int]:
        """What identifies its collectives on all of their ranks."""
        return {each["identity"] for each in self.about["collectives"].values()}

    @property
    def began(self) -> float:
        """When the recording began, in seconds since 1970."""
        return self.about["began"][0]

    @property
    def ended(self) -> float:
        """When its last event was recorded, in seconds since 1970."""
        wall, monotonic = self.about["began"]
        ends = self.events["time"] + np.maximum(self.events["length"], 0)
        return wall + (max(int(ends.max()), monotonic) - monotonic) * 1e-9 if len(ends) else wall


def read(path: Path) -> Ring:
    """Read a rank's file, of a process that has ended or still runs.

    Raises:
        Unfinished: nothing is in it yet.
        UsageError: it is not such a file, is damaged, or cannot be read.
    """
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if not any(contents[: HEADER.size]):
        raise Unfinished(f"{path} is empty: its process was ended while it began to record")
    if len(contents) < HEADER.size or contents[:8] != MAGIC:
        raise UsageError(f"{path} is no recorded timeline")
    _, capacity, place, current, length, following = HEADER.unpack_from(contents)
    try:
        # The two descriptions end there; where they begin depends on the writer's size of pages.
        begin = place + (current - 2) * length
        text = contents[begin : begin + length].rstrip(b"\0")
        if not text and len(contents) >= place:
            raise Unfinished(f"{path} has no description: its process was ended while it began")
        about = json.loads(text)
        events = np.frombuffer(contents, EVENT, capacity, place)
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    for each in about["collectives"].values():
        each.setdefault("ranks", range(each.get("size", 0)))
    numbers = np.arange(max(0, following - capacity), following)
    newest = events[numbers % capacity]
    whole = newest["sequence"] == (numbers + 1) % 2**32
    return Ring(path, about, newest[whole], max(0, following - capacity), int((~whole).sum()))


def read_all(directory: Path) -> tuple[list[Ring], list[Ring]]:
    """Read the files of a run, or of any directory that was recorded into.

    Files of processes that were ended while they began to record are skipped, with a warning.

    Returns:
        The ranks' rings, in their order, and those that a former job has left in the directory.

    Raises:
        UsageError: there are none, or one is damaged.
    """
    rings = []
    for path in sorted((directory / FOLDER).glob("rank-*.ring")):
        try:
            rings.append(read(path))
        except Unfinished as error:
            log.warning("%s; it is skipped", error)
    if not rings:
        raise UsageError(
            f"no timeline in {directory}: record one by wagma train --timeline, or by "
            "WAGMA_TIMELINE=DIR"
        )
    rings.sort(key=lambda ring: ring.rank)
    newest = max(rings, key=lambda ring: ring.began)
    same_job = together_with(newest, rings)
    former = [r for r in rings if r.rank not in same_job and r.ended < newest.began - AGE]
    left = {ring.rank for ring in former}
    return [ring for ring in rings if ring.rank not in left], former


def together_with(ring: Ring, rings: list[Ring]) -> set[int]:
    """Return the ranks that have recorded a collective of its job, whatever their clocks say.

    They are in a collective with this rank, or with one that is.
    """
    found, known = {ring.rank}, ring.identities
    while more := [r for r in rings if r.rank not in found and not known.isdisjoint(r.identities)]:
        found |= {each.rank for each in more}
        known = known.union(*(each.identities for each in more))
    return found
