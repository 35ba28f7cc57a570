"""The timeline of a job: what each rank does when, for ``wagma timeline`` to put together.

With ``WAGMA_TIMELINE=DIR`` in the environment every rank records from its first collective to its
end, in ``DIR/timeline/rank-0000.ring`` and so on; `Collective.timeline` and `Averaging.timeline`
record a block. The newest events are kept, as many as fit into 16 MiB, or into
``WAGMA_TIMELINE_MIB``; the file has them however the process ends. Ranks compare their clocks when
a recording or a collective begins and when it ends.

A loop tells what it does between calls by `span`:

    from collectives.timeline import span

    with optimizer.timeline("runs/mine"):
        for _ in range(steps):
            with span("loading"):
                batch = next(batches)
            with span("compute"):
                loss(model, batch).backward()
            optimizer.step()
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives import process
from collectives.agreement import raise_collectively
from collectives.errors import CollectiveError
from collectives.recording import recorder
from collectives.recording.recorder import span, told
from collectives.settings import level_name, shown_name

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from mpi4py import MPI

    from collectives.collective import Collective

__all__ = ["span", "told"]

log = logging.getLogger("collectives")

VARIABLE = "WAGMA_TIMELINE"
SIZE_VARIABLE = "WAGMA_TIMELINE_MIB"
SIZE = 16  # MiB of events
FOLDER = "timeline"
PATIENCE = 5.0  # seconds after which a rank that does not compare its clock is given up


@dataclass
class Recording:
    """What is being recorded in this process, as its file describes it.

    Attributes:
        path: of the file.
        ranks, rank: number of ranks of the job, and this one.
        host, clock: the host's name, and what its clock is: processes with the same have one clock.
        began: the time in seconds since 1970, and in nanoseconds on the process's clock.
        collectives: of each collective, by its number in events: its class, what identifies it on
            all ranks, how many ranks it has, and the job's ranks that are its ranks 0, 1, …, unless
            these are the same.
        clocks: comparisons: the rank of the job whose clock it was, and what `clocks.compare` has
            returned.
        thinned: whether its description once had no place in the file.
    """

    path: Path
    ranks: int
    rank: int
    host: str = field(default_factory=socket.gethostname)
    clock: str = field(default_factory=lambda: clock_identity())
    began: tuple[float, int] = field(default_factory=lambda: (time.time(), time.perf_counter_ns()))
    collectives: dict[int, dict[str, Any]] = field(default_factory=dict)
    clocks: list[list[int]] = field(default_factory=list)
    thinned: bool = False

    def fitted(self) -> str:
        """Return the description, with fewer comparisons of clocks if it has no place otherwise."""
        text = self.described()
        if recorder.has_place(text):
            return text
        if not self.thinned:
            self.thinned = True
            log.warning(
                "the description of the timeline %s is full: it keeps the first and the last "
                "comparison of clocks, and nothing new for which there is no place",
                self.path,
            )
        first = {each[0]: each for each in reversed(self.clocks)}
        last = {each[0]: each for each in self.clocks}
        self.clocks = [
            each for each in self.clocks if each is first[each[0]] or each is last[each[0]]
        ]
        return self.described()

    def described(self) -> str:
        """Return the description, however long."""
        own = ("path", "thinned")
        mine = {name: value for name, value in vars(self).items() if name not in own}
        # Not at the top: it initializes MPI.
        from collectives.engine.words import OPERATIONS

        kinds = {
            "kinds": recorder.KIND_NAMES,
            "names": recorder.names(),
            "operations": OPERATIONS,
        }
        return json.dumps({**mine, **kinds, "process": os.getpid()})

    def add(self, collective: Collective) -> None:
        """Describe a collective."""
        number = collective.native.number
        ours = collective.comm.Get_group()
        world = process.load_mpi().COMM_WORLD.Get_group()
        ranks = list(ours.Translate_ranks(range(collective.size), world))
        ours.Free()
        world.Free()
        self.collectives[number] = described = {
            "kind": shown_name(type(collective)),
            "identity": collective._identity,
            "size": collective.size,
        }
        if ranks != list(range(collective.size)):
            described["ranks"] = ranks

    def compare(self, comm: MPI.Intracomm) -> None:
        """Compare this rank's clock with that of the communicator's rank 0; collective."""
        from collectives.engine import clocks

        found = clocks.compare(comm, PATIENCE)
        world = process.load_mpi().COMM_WORLD.Get_group()
        group = comm.Get_group()
        (reference,) = group.Translate_ranks([0], world)
        group.Free()
        world.Free()
        if found is not None:
            self.clocks.append([reference, *found])


_recording: Recording | None = None


def clock_identity() -> str:
    """Return what is equal for processes whose monotonic clocks are one, as far as is known."""
    boot, namespace = socket.gethostname(), ""
    with suppress(OSError):  # /proc may be restricted
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):  # before Linux 5.6 there are none
        namespace = os.readlink("/proc/self/ns/time")
    return f"{boot} {namespace}"


def is_recording() -> bool:
    """Return whether this process records a timeline."""
    return _recording is not None


def begin(directory: str | os.PathLike[str]) -> None:
    """Record the timeline of this process, as a rank of the job, in a directory.

    Raises:
        OSError, ValueError: the file cannot be written, or its size is invalid.
        RuntimeError: a timeline is being recorded already.
    """
    global _recording
    if _recording is not None:
        raise RuntimeError(f"this process records a timeline already: {_recording.path}")
    world = process.load_mpi().COMM_WORLD
    folder = Path(directory) / FOLDER
    path = folder / f"rank-{world.rank:04}.ring"
    size = size_given()
    folder.mkdir(parents=True, exist_ok=True)
    made = Recording(path, world.size, world.rank)
    for collective in process.opened():
        made.add(collective)
    recorder.begin(path, int(size * 2**20), made.fitted())
    _recording = made


def size_given() -> float:
    """Return the size of the events in MiB, from its variable or by default.

    Raises:
        ValueError: it is no number above 0.
    """
    given = os.environ.get(SIZE_VARIABLE, SIZE)
    try:
        size = float(given)
    except ValueError:
        size = 0
    if not 0 < size < 2**20:
        raise ValueError(f"{SIZE_VARIABLE} is {given!r}, not a number of MiB above 0")
    return size


def end() -> None:
    """Record no more."""
    global _recording
    recorder.end()
    _recording = None


def describe_again() -> None:
    """Write the description once more, because it has changed, unless it has no place."""
    if _recording is not None:
        recorder.describe(_recording.fitted())


def begin_if_asked() -> Exception | None:
    """Begin to record if the environment asks for it; return the error, or None."""
    directory = os.environ.get(VARIABLE)
    if not directory or _recording is not None:
        return None
    try:
        begin(directory)
    except (OSError, ValueError) as error:
        return type(error)(f"{VARIABLE}: {error}")
    return None


def opened(collective: Collective, comm: MPI.Intracomm) -> None:
    """Add a collective to the timeline, while it is made; collective.

    Args:
        collective: has its `native`, but no other rank uses it yet.
        comm: its communicator for control messages.
    """
    if _recording is not None:
        _recording.add(collective)
        collective._compares_clocks = True
        compare_clocks(comm)


def compare_clocks(comm: MPI.Intracomm) -> None:
    """Compare the ranks' clocks, if all of them are recorded; collective.

    It ends without ranks that have died.
    """
    if _recording is not None:
        _recording.compare(comm)
        describe_again()


@contextmanager
def recorded(directory: str | os.PathLike[str], comm: MPI.Intracomm) -> Iterator[None]:
    """Record what happens in a block, on all ranks of a communicator; collective.

    Clocks are compared when it begins and, unless an exception ends it, at its end. Collectives
    that are made in the block compare them as well. Arguments and errors are those of `begun`.
    """
    with begun(directory, comm):
        yield
        compare_clocks(comm)


@contextmanager
def begun(directory: str | os.PathLike[str], comm: MPI.Intracomm) -> Iterator[None]:
    """Begin to record on all ranks, compare clocks, and record until the block ends; collective.

    Args:
        directory: where the files go, in its folder ``timeline``.
        comm: a communicator that nobody else uses meanwhile.

    Raises:
        OSError, ValueError, RuntimeError: see `begin`; on all ranks.
        RuntimeError: MPI's thread level does not allow it while a collective is open.
    """
    check_thread_level()
    error = None
    try:
        begin(directory)
    except (OSError, ValueError, RuntimeError) as problem:
        error = problem
    try:
        raise_collectively(comm, error)
        compare_clocks(comm)
        yield
    finally:
        if error is None:
            end()


@contextmanager
def of_collective(collective: Collective, directory: str | os.PathLike[str]) -> Iterator[None]:
    """Record a block in which a collective is used: see `Collective.timeline`."""
    if process.place_of(collective.comm) is not process:  # simulated time has no timeline
        yield
        return
    wait_for_all(collective)
    with begun(directory, collective._communicators[0]):
        collective._compares_clocks = True
        try:
            yield
            if not collective.closed:
                wait_for_all(collective)
                compare_clocks(collective._communicators[0])
        finally:
            collective._compares_clocks = False


def check_thread_level() -> None:
    """Raise RuntimeError if a progress thread may be in MPI, and this thread may not be as well.

    The ranks cannot tell each other so: that would be a call of MPI.
    """
    MPI = process.load_mpi()
    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE and any(each.engine != "none" for each in process.opened()):
        raise RuntimeError(
            f"MPI was initialized with thread level {level_name(level)}, with which no timeline "
            "can begin while a collective is open (MULTIPLE is needed): record the whole job by "
            f"{VARIABLE}=DIR, or by --timeline of wagma train"
        )


def wait_for_all(collective: Collective) -> None:
    """Wait until all ranks call this, with nothing under way between them; collective."""
    native = collective.native
    if not hasattr(native, "pause"):  # calls of others need no call of this rank
        native.meet()
        return
    try:
        native.pause(True)
        native.meet()
    except BaseException:
        with suppress(CollectiveError):  # others have failed, and wait for nobody
            native.pause(False)
        raise
    native.pause(False)


recorder.set_on_new_name(describe_again)
os.register_at_fork(after_in_child=end)
