"""Writing checkpoints: the ranks' states are copied, and written while the training goes on."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from collectives import CollectiveError
from collectives.agreement import raise_collectively
from wagma import generators
from wagma.checkpoint import files, state
from wagma.checkpoint.files import CheckpointError

if TYPE_CHECKING:
    from types import TracebackType

    from mpi4py import MPI
    from typing_extensions import Self

    from wagma.optim.averager import Averager

NOT_COMPARED = {"keep_average", "wire_dtype"}  # settings with which a training may go on
LOOK_EVERY = 0.02  # seconds from one look of rank 0 for the other ranks' files to the next


class Saver:
    """Writes an averager's checkpoints in the background: training waits for the copies only.

    All ranks make the same calls. In a block, leaving it waits until the last checkpoint is
    written; an exception that ends the block drops a checkpoint that is not complete.

    Args:
        directory: for the checkpoints, which all ranks see, and no other saver uses; made if it is
            missing.
        averager: any of `wagma.optim`.
        keep: number of complete checkpoints that are kept, at least 1.
        settings: what must be the same to continue, as JSON has it; the averager's class and
            settings are compared as well.

    Attributes:
        longest: seconds that this rank has taken to write the one that took longest, of those that
            are complete; rank 0's are until all parts were there.

    Raises:
        ValueError: `keep` is less than 1.

    Example:
        >>> with averager, checkpoint.Saver("checkpoints", averager) as saver:
        ...     for epoch in range(epochs):
        ...         ...
        ...         saver.begin(epoch=epoch + 1, scheduler=scheduler)
    """

    def __init__(
        self,
        directory: str | Path,
        averager: Averager,
        *,
        keep: int = 2,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, not at least 1")
        self.directory, self.keep = Path(directory), keep
        self._averager, self.settings = averager, dict(settings or {})
        self._writing: _Writing | None = None
        self.longest = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
        elif self._writing is not None:
            self._writing.give_up()

    def begin(self, **more: Any) -> None:
        """Average over all ranks, copy everything, and begin to write it; collective.

        It waits for the checkpoint before, if that is still being written. What the method has
        under way is brought in first: afterwards all ranks have the same model, and go on from it
        as they would after `load`.

        Args:
            **more: what else this rank has to continue with: objects with `state_dict`, such as
                schedulers, or values; of the value `step`, if given, the checkpoint has its name.

        Raises:
            CheckpointError: this checkpoint or the one before cannot be written, or the model is
                not finite; on all ranks.
            TypeError: a value could not be read back; on all ranks.
            RuntimeError: inside `join` or `averaged`.
            collectives.ClosedError: after the averager's `close`.
            collectives.RankFailedError: another rank has failed.
            Exception: what an object's `state_dict` raises on any rank; on all ranks.
        """
        self._averager._recovery.carried_out(lambda: self._begin(more))

    def _begin(self, more: Mapping[str, Any]) -> None:
        averager = self._averager
        if averager._inside_join:
            raise RuntimeError(
                "a checkpoint inside join(), which some ranks may have left: take it after the "
                "block"
            )
        averager._settle()  # before ranks wait for each other outside of steps
        self._finish()
        error: Exception | None = None
        part: dict[str, Any] = {}
        try:
            part = self._part(more)
            state.check_readable(part["more"])
            own = {f"{name} of the model's state": value for name, value in part["own"].items()}
            local = {"the optimizer's state": part["optimizers"]}
            state.check_readable({**own, **local, "the averager's state": part["averaging"]})
            if not all(bool(vector.isfinite().all()) for vector in averager.flat.memory):
                raise CheckpointError("the model is not finite")
        except CollectiveError:  # others are told of it otherwise
            raise
        except Exception as problem:  # of this rank alone, such as of an object's state_dict
            error = problem
        raise_collectively(averager.comm, error)
        averaging = part["averaging"]
        known = averager.comm.allgather((averaging["version"], averager.steps))
        averaging["version"], most = map(max, zip(*known))
        step = part["more"].get("step")
        step = most if not isinstance(step, int) else step
        unfinished = self._make_directory(step)
        averager.flat.round()
        averager._go_on_from(averaging)
        rank, size = averager.collective.rank, averager.collective.size
        at_first = averager._recovery.first_size or size
        manifest = {"step": step, "ranks": size, "ranks_at_first": at_first}
        manifest["settings"] = self._compared()
        tensors, tied = state.model_of(averager.flat) if rank == 0 else ({}, {})
        self._writing = _Writing(
            *(unfinished, rank, part, tensors, {**manifest, "tied": tied}, self.keep),
            comm=averager.comm,
        )

    def finish(self) -> Path | None:
        """Wait until the checkpoint that was begun last is complete; collective.

        Other ranks may still make steps, as for the averager's `averaged`, which it uses.

        Returns:
            Its directory; None: none was begun since the last call, or ranks have died since, and
            their parts may be missing.

        Raises:
            CheckpointError: it could not be written, on some rank; on all ranks.
            collectives.RankFailedError: another rank has failed.
        """
        return self._averager._recovery.carried_out(self._finish_between_steps)

    def _finish_between_steps(self) -> Path | None:
        if self._writing is None or self._averager.closed:
            return self._finish()
        with self._averager.averaged():
            return self._finish()

    def _finish(self) -> Path | None:
        writing, comm = self._writing, self._averager.comm
        if writing is not None and writing.comm is not comm:
            writing.give_up()
            writing = None
        if writing is None:
            self._writing = None
            return None
        try:
            raise_collectively(comm, writing.part_error())
        except CheckpointError:
            writing.give_up()
            self._writing = None
            raise
        error = writing.error() if writing.rank == 0 else None
        self._writing = None
        raise_collectively(comm, error)
        self.longest = max(self.longest, writing.seconds)
        return writing.path

    def _part(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of everything that is this rank's own."""
        averager = self._averager
        averaging = averager.state_dict() | {"equal": True}
        averaging.pop("wide", None)  # it is rounded
        values = {name: state_of(value) for name, value in more.items()}
        return {
            "optimizers": [state.copied(each.state_dict()) for each in averager.optimizers.given],
            "averaging": state.copied(averaging),
            "own": state.copied(state.own_of(averager.flat)),
            "more": state.copied(values),
            "generators": generators.states(averager.flat.device),
        }

    def _compared(self) -> dict[str, Any]:
        return {**self.settings, **settings_of(self._averager)}

    def _make_directory(self, step: int) -> Path:
        """Make the unfinished checkpoint's directory, which every rank must see; collective."""
        comm = self._averager.comm
        made: Path | CheckpointError | None = None
        if comm.rank == 0:
            try:
                made = files.begin(self.directory, step)
            except OSError as problem:
                made = CheckpointError(f"cannot write to {self.directory}: {problem.strerror}")
        made = comm.bcast(made)
        error = made if isinstance(made, CheckpointError) else None
        raise_collectively(comm, error)
        assert isinstance(made, Path)
        try:
            there = made.is_dir()
        except OSError:
            there = False
        if not there:
            error = CheckpointError(f"{made}, which rank 0 has made, is not on this rank's disk")
        raise_collectively(comm, error)
        return made


def save(
    directory: str | Path,
    averager: Averager,
    *,
    keep: int = 2,
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Average over all ranks, and write a checkpoint; collective.

    Args:
        directory, averager, keep, settings: as for `Saver`.
        **more: as for `Saver.begin`.

    Returns:
        The checkpoint's directory.

    Raises:
        Exception: as `Saver.begin` does.

    Example:
        >>> checkpoint.save("checkpoints", averager, epoch=epoch + 1, scheduler=scheduler)
    """
    saver = Saver(directory, averager, keep=keep, settings=settings)
    path = None
    while path is None:  # once, unless ranks die
        saver.begin(**more)
        path = averager._recovery.carried_out(saver._finish)  # no rank makes steps
    return path


def state_of(value: Any) -> Any:
    """Return the state of an object that has one, else the value."""
    return value.state_dict() if callable(getattr(value, "state_dict", None)) else value


def settings_of(averager: Averager) -> dict[str, Any]:
    """Return what must be the same of an averager, as JSON has it."""
    known = averager.settings.items()
    settings = {name: plain(value) for name, value in known if name not in NOT_COMPARED}
    return {"method": type(averager).__name__, **settings}


def plain(value: Any) -> Any:
    """Return a setting as JSON has it."""
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


class _Writing:
    """A checkpoint that this rank's thread is writing; on rank 0, until all ranks have.

    The thread makes no call of MPI: ranks say by small files that their parts are written.

    Args:
        unfinished: its directory.
        rank: this one.
        part: what this rank writes.
        tensors: the model, on rank 0.
        manifest: without the files.
        keep: number of checkpoints that are kept.
        comm: of the ranks that write it.
    """

    def __init__(
        self,
        unfinished: Path,
        rank: int,
        part: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        manifest: dict[str, Any],
        keep: int,
        *,
        comm: MPI.Intracomm,
    ) -> None:
        self.rank, self.comm = rank, comm
        self.path = files.completed(unfinished)
        self._unfinished, self._part, self._tensors = unfinished, part, tensors
        self._manifest, self._keep = manifest, keep
        self._written, self._given_up = threading.Event(), threading.Event()
        self._error: CheckpointError | None = None
        self.seconds = 0.0  # that this rank's thread has taken
        # Not waited for where the process ends otherwise, as by an exception.
        self._thread = threading.Thread(target=self._run, name="wagma checkpoint", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # said when all ranks are asked
            self._error = CheckpointError(f"the thread that writes it does not start: {error}")
            self._written.set()

    def part_error(self) -> CheckpointError | None:
        """Wait until this rank has written its files; return what went wrong."""
        self._written.wait()
        return self._error

    def error(self) -> CheckpointError | None:
        """Wait until the checkpoint is complete; return what went wrong."""
        self._thread.join()
        return self._error

    def give_up(self) -> None:
        """Remove what is written, if the checkpoint is not complete."""
        self._given_up.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self.rank == 0:
            self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self._unfinished, ignore_errors=True)

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._write_own()
        except Exception as error:  # of the file system, or of a library that writes there
            self._fail(error)
            self._remove_own()  # now, since others may need the space on the disk
        finally:
            self.seconds = time.monotonic() - began
            self._written.set()
            self._part, self._tensors = {}, {}
        if self.rank == 0:
            try:
                self._complete()
            except Exception as error:
                self._fail(error)
                self._remove()
            self.seconds = time.monotonic() - began

    def _fail(self, error: Exception) -> None:
        text = error.strerror if isinstance(error, OSError) else str(error)
        self._error = CheckpointError(f"cannot write {self.path}: {text}")

    def _write_own(self) -> None:
        """Write this rank's files, and one that says so."""
        entries = {}
        if self.rank == 0:
            path = self._unfinished / files.MODEL
            save_file(self._tensors, path, metadata={"format": "pt"})
            entries[path.name] = durable(path)
        path = self._unfinished / files.part_name(self.rank)
        with path.open("wb") as file:
            torch.save(self._part, file)
        entries[path.name] = durable(path)
        files.write_json(self._unfinished / written_by(self.rank), {"files": entries})

    def _remove_own(self) -> None:
        """Remove this rank's files, and say that it has failed."""
        names = [files.part_name(self.rank), *([] if self.rank else [files.MODEL])]
        for name in names:
            with contextlib.suppress(OSError):
                (self._unfinished / name).unlink()
        with contextlib.suppress(OSError):  # empty, it fits on most full disks
            (self._unfinished / failed_by(self.rank)).touch()

    def _complete(self) -> None:
        """Wait for all ranks' files, and complete the checkpoint; remove it if one has failed."""
        entries: dict[str, Any] = {}
        failed = False
        for rank in range(self._manifest["ranks"]):
            path, other = (self._unfinished / of(rank) for of in (written_by, failed_by))
            while not path.exists() and not other.exists():
                if self._given_up.wait(LOOK_EVERY):
                    return
                if not self._unfinished.is_dir():
                    raise CheckpointError("its directory has been removed meanwhile")
            if other.exists():
                failed = True
                continue
            entries |= files.read_json(path)["files"]
            path.unlink()
        if failed:  # of which that rank has the reason
            self._remove()
            return
        files.complete(self._unfinished, {**self._manifest, "files": entries})
        files.keep_newest(self.path.parent, self._keep)


def written_by(rank: int) -> str:
    """Return the name of the file by which a rank says that it has written its own."""
    return f"rank-{rank:04}.written"


def failed_by(rank: int) -> str:
    """Return the name of the file by which a rank says that it could not write its own."""
    return f"rank-{rank:04}.failed"


def durable(path: Path) -> list[Any]:
    """Have a file written to the disk; return its size and checksum."""
    files.sync(path)
    return [*files.look_at(path)]
