"""Trainings that are continued: the checkpoints of `wagma train`, and resuming from them."""

from __future__ import annotations

import argparse
import copy
import fcntl
import json
import logging
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mpi4py import MPI

from collectives.agreement import counted, raise_collectively
from collectives.process import end_job, last_words
from wagma import checkpoint, generators
from wagma.checkpoint import files
from wagma.checkpoint.state import Unchanging
from wagma.commands.checkpoints import LATEST
from wagma.evaluation import Kept
from wagma.job import FAILED, Signals, UsageError, complain, from_rank_0, together
from wagma.pauses import Pauses, PausesOfSurvivors, Said, common_period
from wagma.runs import JsonLines, Tally, in_json, job_numbers, metrics_file, metrics_files
from wagma.tasks import kinds

if TYPE_CHECKING:
    from wagma.trainer import Trainer

FOLDER = "checkpoints"
CLAIM = ".claim"  # of the job that trains in a run, which it locks until its process ends
ENDING = 5.0  # seconds in which a job that was killed may still hold that
RESTARTED = 120.0  # the same where Slurm began it again, as file servers keep a lost node's locks
LOOK_EVERY = 0.1  # seconds
EARLY = 60.0  # seconds by which Slurm may send its signal early
# What must be the same to continue; the method's options and settings are compared as well.
SETTINGS = (
    *("script", "task", *kinds.OWN, "seed"),
    *("batch_size", "accumulate", "optimizer", "lr", "momentum", "weight_decay", "clip_norm"),
    *("evaluate_every", "evaluate_every_seconds"),
)
# In a tally, by a collective.
COUNTED = "waiting_s", "communicating_s", "bytes_sent", "left_out", "staleness"

log = logging.getLogger(__name__)


def find(settings: argparse.Namespace) -> Path | None:
    """Return the directory of the run to continue, None if a new run begins.

    Raises:
        UsageError: `--resume` names a directory without checkpoints.
    """
    if settings.resume != LATEST:
        if not files.found(settings.resume / FOLDER):
            raise UsageError(f"argument --resume: {settings.resume} has no checkpoints")
        return settings.resume
    if settings.name:
        run = settings.runs_dir / settings.name
        ended = any((run / name).exists() for name in ("summary.json", "model.pt"))
        if ended and not files.found(run / FOLDER):
            raise UsageError(f"argument --resume: {run} has ended, and has no checkpoints")
        return run if run.is_dir() else None
    ending = "".join(f"_{part}" for part in job_numbers())
    newest = {
        run: checkpoints[0].stat().st_mtime
        for run in settings.runs_dir.glob(f"*{ending}")
        if (checkpoints := files.found(run / FOLDER)) and not (run / "summary.json").exists()
    }
    return max(newest, key=lambda run: newest[run], default=None)


def check_engines(trainer: Trainer, comm: MPI.Intracomm) -> None:
    """Refuse ranks that serve nobody while they pause, where others' steps need them; collective.

    Raises:
        UsageError: there are some.
    """
    engines = comm.allgather(getattr(trainer.averager.collective, "engine", None))
    if "none" in engines and common_period(trainer) is None:
        raise UsageError(
            f"checkpoints of {trainer.settings.algorithm.label} need progress threads, as ranks "
            "do not all pause after the same step: WAGMA_ENGINE must not be none"
        )


def compared(trainer: Trainer) -> dict[str, Any]:
    """Return by name what must be the same to continue, as JSON has it."""
    # What an averager resolves itself is taken from it. None stands for a default, as in
    # checkpoints in which an option is missing.
    options = {
        option.name: None if (value := trainer.options[option.name]) == option.default else value
        for option in trainer.method.options
        if option.name != "transport"
    }
    settings = {name: getattr(trainer.settings, name, None) for name in SETTINGS}
    same: dict[str, Any] = json.loads(in_json(options | settings))
    return same


def claimed(path: Path) -> IO[str]:
    """Return a file that no other job has locked, and which this process locks until its end.

    A lock of POSIX ends with the process, however that ends, and its children do not have it.

    Raises:
        UsageError: another job has.
        OSError: it cannot be made.
    """
    file, began = path.open("w"), time.monotonic()
    patience = RESTARTED if int(os.environ.get("SLURM_RESTART_COUNT", 0)) else ENDING
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            if time.monotonic() - began > patience:
                file.close()
                run = path.parent.parent
                raise UsageError(
                    f"another job trains in {run} now; if none does any more, remove {path}"
                ) from error
            time.sleep(LOOK_EVERY)
        except OSError as error:
            log.info("%s cannot be locked: %s", path, error.strerror)
            return file
        else:
            return file


class Continuing:
    """One rank's part in the checkpoints of a training.

    Args:
        trainer: the rank's, which has made no steps.
        tally: of its steps.
        run: the run's directory.
        comm: the ranks that train together.
        signals: which may stop the training.

    Attributes:
        complete: whether this rank's steps have ended, with a checkpoint.
        stopped: whether all ranks have stopped before the last step.
        resumed: from what the run was continued, for its record: one entry each time.
        recorded: bytes of this rank's metrics that belong to steps before the checkpoint.

    Raises:
        UsageError: checkpoints cannot be written, another job trains in the directory, or ranks
            without a progress thread would let others wait.
    """

    def __init__(
        self, trainer: Trainer, tally: Tally, run: Path, comm: MPI.Intracomm, signals: Signals
    ) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UsageError("checkpoints need MPI's THREAD_MULTIPLE")
        settings = trainer.settings
        check_engines(trainer, comm)
        self.trainer, self.tally, self.run = trainer, tally, run
        self.status, self.recorded = settings.requeue, 0
        self.complete = self.stopped = False
        self.resumed: list[dict[str, Any]] = []
        self.newest: Path | None = None
        self._resumed_at: int | None = None  # this rank's steps then
        self._is_writing = False
        self._claim: IO[str] | None = None  # on rank 0
        from_rank_0(self._try_to_write, comm)
        trainer.recovered = self._claim_again
        self.saver = checkpoint.Saver(
            run / FOLDER,
            trainer.averager,
            keep=settings.checkpoint_keep,
            settings=compared(trainer),
        )
        self.signals = signals
        kind = PausesOfSurvivors if settings.survive else Pauses
        self.pauses = trainer.pauses = kind(trainer, comm, signals, settings)
        last_words[:] = [self._how_to_continue]

    @property
    def comm(self) -> MPI.Intracomm:
        """The ranks that train together."""
        comm: MPI.Intracomm = self.trainer.averager.comm
        return comm

    def _try_to_write(self) -> None:
        folder = self.run / FOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".tried").touch()
            (folder / ".tried").unlink()
            self._claim = claimed(folder / CLAIM)
        except OSError as error:
            raise UsageError(f"cannot write checkpoints to {folder}: {error.strerror}") from error

    def _claim_again(self) -> None:
        """Lock the run's directory after the death of the rank that did, on the first one left."""
        if self.comm.rank == 0 and self._claim is None:
            try:
                self._claim = claimed(self.run / FOLDER / CLAIM)
            except (UsageError, OSError) as error:
                complain(f"warning: the run is not locked: {error}")

    # Resuming

    def resume(self) -> None:
        """Go on from the newest good checkpoint, if there is one; collective.

        Raises:
            UsageError: there are checkpoints, of which none is good, or they are of another
                training.
        """
        began, trainer = time.monotonic(), self.trainer
        try:
            found = checkpoint.load(
                self.saver.directory, trainer.averager, settings=self.saver.settings
            )
        except checkpoint.CheckpointError as error:
            raise UsageError(f"cannot resume: {error}") from error
        if found is None:
            # Those of a job on more ranks, which was killed before it saved.
            from_rank_0(lambda: self._remove_metrics(self.comm.size), self.comm)
            return
        self.newest = found.path
        alike = found.ranks == found.ranks_at_first == self.comm.size
        states = generators.states(trainer.device)
        self._go_on_with_data(found, alike)
        if trainer.scheduler is not None:
            trainer.scheduler.load_state_dict(found["scheduler"])
        generators.restore(states, trainer.device)
        # Those that survive others make equal steps.
        own = alike and not trainer.settings.survive
        trainer.made = found["steps"] if own else found.step * trainer.trains
        self._resumed_at = trainer.made
        trainer.earlier = found["elapsed_s"]
        trainer.scheduled = found["scheduled"]
        trainer.kept = [Kept(*each) for each in found["kept"]]
        self.pauses.saved()
        if not alike and not any(self.comm.allgather(self._has_steps_left())):
            raise UsageError(
                f"cannot resume: {self.run} has made all its steps, on "
                f"{counted(found.ranks, 'rank')}: give more of them, or the same number of ranks"
            )
        if alike:
            from_rank_0(lambda: self._take_back(found), self.comm)
            self.recorded = found["metrics"]
            together(lambda: self._read_records(found["counted"]), self.comm)
        else:
            self.tally.begin_at(trainer.earlier, found.step)
        entry = {"checkpoint": found.path.name, "step": found.step, "ranks": found.ranks}
        self.resumed = [*from_rank_0(lambda: self._clear(found, alike), self.comm), entry]
        if self.comm.rank == 0:
            seconds = time.monotonic() - began
            print(f"continuing from {found.path}, in {seconds:.1f} s", flush=True)

    def _go_on_with_data(self, found: checkpoint.Loaded, alike: bool) -> None:
        """Go to this rank's position in its data, or deal what is left of the pass anew."""
        trainer = self.trainer
        if alike:
            trainer.batches.load_state_dict(found["batches"])
            return
        parts: dict[int, dict[str, Any]] = {}
        mine = {rank: each["batches"] for rank, each in found.others.items() if each["trains"]}
        for some in self.comm.allgather(mine):
            parts |= some
        positions = [parts[rank] for rank in sorted(parts)]
        trainer.batches.deal(positions, trainer.place, trainer.trainers)

    def _has_steps_left(self) -> bool:
        """Return whether this rank has steps to make, before it makes any; its clock stands."""
        trainer = self.trainer
        limit = trainer.settings.seconds
        if limit is None:
            return trainer.goes_on(trainer.made)
        return trainer.trains and trainer.earlier < limit

    def _read_records(self, counted: dict[str, Any]) -> None:
        """Count the steps that are recorded, and cut off those after the checkpoint."""
        path = metrics_file(self.run, self.comm.rank)
        kept = path.read_bytes()[: self.recorded] if path.exists() else b""
        self.recorded = 0
        for line in kept.splitlines(keepends=True):
            try:
                record = json.loads(line)
            except ValueError:  # what is left after the end of a node
                break
            self.recorded += len(line)
            if record["loss"] is None:
                record["loss"] = math.nan
            self.tally.add(record)
        for name in COUNTED:
            setattr(self.tally, name, counted[name])

    def _before(self, found: checkpoint.Loaded) -> Path:
        """Return the folder for the metrics of the ranks that have saved a checkpoint.

        It is complete; while they are moved, in either direction, it has the name of `_moving`.
        """
        return self.run / f"until-step-{found.step}"

    def _moving(self, folder: Path) -> Path:
        return folder.with_name(f".{folder.name}")

    def _remove_metrics(self, first: int = 0) -> None:
        """Remove the metrics of rank `first` and those after it."""
        for rank, path in metrics_files(self.run).items():
            if rank >= first:
                path.unlink()

    def _take_back(self, found: checkpoint.Loaded) -> None:
        """Take back what a job on another number of ranks has moved, which saved nothing."""
        folder = self._before(found)
        moving = self._moving(folder)
        if folder.is_dir():
            self._remove_metrics()
            folder.rename(moving)
        if moving.is_dir():
            for path in metrics_files(moving).values():
                path.replace(self.run / path.name)
            moving.rmdir()

    def _clear(self, found: checkpoint.Loaded, alike: bool) -> list[dict[str, Any]]:
        """Remove what says that the run has ended; return from what it was continued before.

        The metrics of another number of ranks go to a folder of their own.
        """
        for name in ("summary.json", "model.pt"):
            (self.run / name).unlink(missing_ok=True)
        if not alike and (folder := self._before(found)).is_dir():
            self._remove_metrics()  # of a job that was killed before it saved
        elif not alike:
            moving = self._moving(folder)
            moving.mkdir(exist_ok=True)  # of a job that was killed while it moved some
            for path in metrics_files(self.run).values():
                path.rename(moving / path.name)
            moving.rename(folder)
        try:
            before = json.loads((self.run / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return list(before.get("resumed", []))

    # Saving

    def steps(self, metrics: JsonLines) -> Iterator[dict[str, Any]]:
        """Make all steps, or those until all ranks stop, with a checkpoint at each pause.

        Args:
            metrics: the file to which the records are written.
        """
        recovery = self.trainer.averager._recovery
        # What has come while the job was set up stops it at once.
        why = self.pauses.said_by_all(self.pauses.wish & Said.STOP)
        while True:
            if not why:
                yield from self.trainer.steps()
                why = self.pauses.meet()
            ends = bool(why & Said.STOP or not why)
            if ends:
                self.signals.stopped()
            with self.signals.held():
                recovery.carried_out(lambda ends=ends: self._save_what_is_new(metrics, ends))
            self.pauses.saved()
            if ends:
                self.complete, self.stopped = True, bool(why)
                return
            why = Said(0)

    def _save_what_is_new(self, metrics: JsonLines, ends: bool) -> None:
        """Save a checkpoint unless there is one of these steps, maybe wait for it; collective."""
        new = self.trainer.made != self.pauses.saved_steps
        new |= not self._finish() or self.newest is None
        if any(self.comm.allgather(new)):
            self._save(metrics)
        if ends:
            self._finish()

    def _save(self, metrics: JsonLines) -> None:
        """Begin to write a checkpoint; collective."""
        try:
            self.saver.begin(**self._state(metrics))
            self._is_writing = True
        except (checkpoint.CheckpointError, TypeError) as error:
            self._warn(error)

    def _state(self, metrics: JsonLines) -> dict[str, Any]:
        """Return what this rank has to continue with; collective.

        Raises:
            CheckpointError: a rank's metrics cannot be written; on all ranks.
        """
        trainer = self.trainer
        counts = copy.copy(self.tally)
        counts.add_averaging(trainer.statistics())
        size = 0
        error: Exception | None = None
        try:
            size = metrics.size()
        except OSError as problem:
            error = checkpoint.CheckpointError(f"cannot write the metrics: {problem.strerror}")
        raise_collectively(self.comm, error)
        return {
            "step": max(self.comm.allgather(trainer.made)),
            "steps": trainer.made,
            "elapsed_s": trainer.elapsed if trainer.started is not None else trainer.earlier,
            "scheduled": trainer.scheduled,
            "scheduler": trainer.scheduler,
            "batches": trainer.batches,
            "trains": trainer.trains,
            "kept": Unchanging([tuple(each) for each in trainer.kept]),
            "metrics": size,
            "counted": {name: getattr(counts, name) for name in COUNTED},
        }

    def _finish(self) -> bool:
        """Wait for the checkpoint that is being written; the training survives its failure.

        Returns:
            Whether that was not lost with a rank.
        """
        path, lost = None, False
        try:
            path = self.saver.finish()
            lost = self._is_writing and path is None
        except checkpoint.CheckpointError as error:
            self._warn(error)
        self._is_writing = False
        self.newest = path or self.newest
        self.pauses.writing = self.saver.longest
        return not lost

    def _warn(self, error: Exception) -> None:
        if self.comm.rank == 0:
            log.warning("no checkpoint, the training goes on: %s", error)
            if self.trainer.rank:  # the log of the first rank of all was seen
                complain(f"warning: no checkpoint, the training goes on: {error}")

    def interruptible(self) -> AbstractContextManager[None]:
        """Return a block for the steps, which `Interrupted` ends where a rank cannot stop."""
        pauses = self.pauses
        return self.signals.raising_after(lambda: pauses.patience, lambda: pauses.deadline)

    def in_time(self) -> AbstractContextManager[None]:
        """Return a block after the steps, which a signal or the time limit ends."""
        return self.signals.raising_after(lambda: 0.0, lambda: self.pauses.deadline)

    def give_up(self) -> None:
        """End the job without another checkpoint."""
        rank, waited = self.comm.rank, self.pauses.patience
        where = f"rank {rank} cannot stop: it has waited {waited:.1f} s for other ranks"
        remedy = self._how_to_continue()
        complain(f"error: {where}; {remedy or 'there is no checkpoint'}")
        end_job(MPI.COMM_WORLD, self.status if remedy else FAILED)

    def _how_to_continue(self) -> str:
        """Return what continues from the newest checkpoint in words; "": there is none."""
        newest = next(iter(files.found(self.saver.directory)), None)
        return f"--resume {self.run} continues from {newest.name}" if newest else ""

    def ended(self, received: list[int]) -> int:
        """Say how to continue after a stop, and return the exit status.

        Args:
            received: the signals that ranks received (0: none).
        """
        names = sorted({signal.Signals(number).name for number in received if number})
        who = " and ".join(names) or "the time limit"
        made = counted(self.trainer.made, "step")
        idle = all(self.comm.allgather(self.trainer.made == self._resumed_at))
        near = any(self.comm.allgather(time.time() >= self.pauses.deadline - EARLY))
        if idle and (near or not any(received)):
            if self.comm.rank == 0:  # or it would be requeued for ever
                complain("error: the time limit leaves no time for a step, or for the evaluation")
            return FAILED
        if self.newest is None:
            if self.comm.rank == 0:
                complain(f"error: stopped by {who} after {made}, without a checkpoint")
            return FAILED
        if self.comm.rank == 0:
            complain(
                f"stopped by {who} after {made}: --resume {self.run} continues from "
                f"{self.newest.name}"
            )
        if signal.SIGINT in received:
            return 128 + signal.SIGINT
        status: int = self.status
        return status
