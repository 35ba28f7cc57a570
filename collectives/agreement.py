"""Agreement of a job's ranks before they start, so that none raises alone while others wait."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from mpi4py import MPI

__all__ = [
    "agreed",
    "by_value",
    "counted",
    "is_on_all_ranks",
    "launched_tasks",
    "list_values",
    "name_ranks",
    "raise_collectively",
    "singleton_error",
]

TASK_COUNTS = ("SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
TORCH_COUNT = "WORLD_SIZE"
T = TypeVar("T")


def raise_collectively(comm: MPI.Comm, error: Exception | None) -> None:
    """Raise the same error on every rank if any rank has one; collective.

    It has the type of the error on the lowest such rank, and lists all errors with their ranks.
    """
    errors = comm.allgather(_portable(error))
    found = [each for each in errors if each is not None]
    if not found:
        return
    ranks = by_value(None if each is None else str(each) for each in errors)
    ranks.pop(None, None)
    text = "; ".join(f"{name_ranks(who)}: {what}" for what, who in ranks.items())
    if len(ranks) == 1 and len(found) == len(errors):
        text = str(found[0])
    raised = type(found[0])(text)
    raised._on_all_ranks = True
    raise raised


def agreed(
    comm: MPI.Comm, make: Callable[[], T], undo: Callable[[T], object] = lambda made: None
) -> T:
    """Return what a function makes, or raise on all ranks what it raises on any; collective.

    Args:
        comm: of the ranks.
        make: makes it; collective at most in agreements that begin like `raise_collectively`.
        undo: is called with what was made on this rank, if another could not make its own.
    """
    error: Exception | None = None
    try:
        made = make()
    except Exception as problem:  # of whatever kind: the others wait for the outcome
        if is_on_all_ranks(problem):
            raise
        error = problem
    try:
        raise_collectively(comm, error)
    except BaseException:
        if error is None:
            undo(made)
        raise
    return made


def is_on_all_ranks(error: BaseException) -> bool:
    """Return whether all ranks raise this error, by `raise_collectively`."""
    return getattr(error, "_on_all_ranks", False)


def _portable(error: Exception | None) -> Exception | None:
    """Return the error, or a RuntimeError if it cannot be pickled and rebuilt from its text."""
    if error is None:
        return None
    try:
        type(pickle.loads(pickle.dumps(error)))(str(error))._on_all_ranks = True
    except Exception:
        if isinstance(error, MemoryError):  # numpy's has a shape
            return MemoryError(str(error))
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def by_value(values: Iterable[Hashable]) -> dict[Hashable, list[int]]:
    """Return the ranks of each value, given the values by rank."""
    ranks: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def list_values(ranks: dict[Hashable, list[int]]) -> str:
    """Return "a on ranks 0-1; b on rank 2" for a dict from `by_value`."""
    return "; ".join(f"{value} on {name_ranks(who)}" for value, who in ranks.items())


def name_ranks(ranks: list[int]) -> str:
    """Return "rank 3", or "ranks 0-3, 7" for sorted ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def counted(number: int, what: str) -> str:
    """Return "1 rank" or "4 ranks"."""
    return f"{number} {what}{'s' if number != 1 else ''}"


def singleton_error(world_size: int) -> RuntimeError | None:
    """Return the error if every rank of a job considers itself the only one, else None.

    That happens if the MPI of the ranks does not understand their launcher.
    """
    tasks, name = launched_tasks()
    if world_size > 1 or tasks == 1:
        return None
    if name == TORCH_COUNT:
        return RuntimeError(
            f"MPI made each of the job's {tasks} processes ({name}) a job of its own, because it "
            "does not know torchrun: start it with mpiexec or srun"
        )
    return RuntimeError(
        f"MPI made each of the job's {tasks} tasks ({name}) a job of its own: start it "
        "with that MPI's mpiexec, or with the srun --mpi that matches it (pmi2 for MPICH, pmix "
        "for Open MPI)"
    )


def launched_tasks() -> tuple[int, str]:
    """Return the number of tasks that the launcher started, and its variable; else 1 and "".

    Under torchrun its variable comes first, because `srun` may have started torchrun. Otherwise it
    comes last, because scripts that start no processes set it as well.
    """
    torch = (TORCH_COUNT,) if "LOCAL_RANK" in os.environ else ()
    at_work = "TORCHELASTIC_RUN_ID" in os.environ
    for name in (*torch, *TASK_COUNTS) if at_work else (*TASK_COUNTS, *torch):
        tasks = os.environ.get(name, "")
        if tasks.isdigit() and int(tasks) > 1:
            return int(tasks), name
    return 1, ""
