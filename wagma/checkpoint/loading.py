"""Reading checkpoints: the newest good one is found, and all ranks go on from it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from collectives.agreement import agreed, counted, raise_collectively
from wagma import __version__, generators
from wagma.checkpoint import files, state
from wagma.checkpoint.files import BrokenError, CheckpointError
from wagma.checkpoint.saving import settings_of
from wagma.optim.tensors import broadcast

if TYPE_CHECKING:
    from mpi4py import MPI

    from wagma.optim.averager import Averager

# Settings that depend on the number of ranks, and are not compared where that is another.
BY_RANKS = {
    *("group_size", "history", "ranks_per_node", "local_steps", "controller_rank", "server"),
    *("max_age", "backup", "backups", "neighbors", "graph"),
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint from which all ranks go on.

    Attributes:
        path: its directory.
        step: the step in its name.
        ranks: number of ranks that saved it.
        ranks_at_first: number of ranks with which their job had begun; some may have died.
        more: dict of this rank's further values, by name; of objects with a state, that state. On
            another number of ranks P, rank r has those of rank r mod the number that saved it.
        others: by rank, the same of the ranks of which this one has read the parts; together the
            ranks have those of all.
    """

    path: Path
    step: int
    ranks: int
    ranks_at_first: int
    more: dict[str, Any]
    others: dict[int, dict[str, Any]] = field(repr=False)

    def __getitem__(self, name: str) -> Any:
        """Return a further value by name."""
        return self.more[name]


def load(
    directory: str | Path,
    averager: Averager,
    *,
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Loaded | None:
    """Continue from the newest good checkpoint in a directory; collective.

    Broken ones are passed over; rank 0 logs a warning that names each, and says where. The model,
    the optimizers' states and the generators are those that the rank had; of another number of
    ranks, rank r takes over the optimizers' states of rank r mod their number, and generators of
    ranks that did not exist are seeded anew.

    Args:
        directory: as for `save`.
        averager: of the same class and settings, with the same optimizers, of an equal model.
        settings: as for `save`.
        **more: objects with `load_state_dict`, by the names that they were saved under.

    Returns:
        What was loaded; None: there is no checkpoint, so that the training begins anew.

    Raises:
        CheckpointError: no checkpoint is good, or the newest good one is of another model, method,
            other settings, or a format that this version does not read, or the directory cannot
            be read; on all ranks.
        collectives.RankFailedError: another rank has failed.

    Example:
        >>> found = checkpoint.load("checkpoints", averager, scheduler=scheduler)
        >>> first = found["epoch"] if found else 0
    """
    with averager.averaged():  # ranks come here while others still make steps
        pass
    comm = averager.comm
    paths = found_by_all(comm, Path(directory))
    problems = []
    for path in paths:
        manifest, problem = comm.bcast(manifest_of(path) if comm.rank == 0 else None)
        parts: dict[int, dict[str, Any]] = {}
        if problem is None:
            agreed(comm, partial(compare, path, manifest, averager, settings or {}))
            parts, problem = read_parts(path, manifest, averager)
        if problem is None:
            return go_on(path, manifest, parts, averager, more)
        if comm.rank == 0:
            log.warning("checkpoint %s is passed over: %s", path, problem)
        problems.append(f"{path.name}: {problem}")
    if problems:
        found = counted(len(paths), "checkpoint")
        raise CheckpointError(f"none of {found} in {directory} is good: {'; '.join(problems)}")
    return None


def found_by_all(comm: MPI.Intracomm, directory: Path) -> list[Path]:
    """Return on all ranks the checkpoints that rank 0 finds, the newest first; collective.

    Raises:
        CheckpointError: rank 0 cannot look there; on all ranks.
    """
    paths: list[Path] = []
    error: Exception | None = None
    if comm.rank == 0:
        try:
            paths = files.found(directory)
        except OSError as problem:
            error = CheckpointError(f"cannot read {directory}: {problem.strerror}")
    raise_collectively(comm, error)
    paths = comm.bcast(paths)
    return paths


def manifest_of(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return a checkpoint's manifest, or what is wrong with it."""
    try:
        return files.read_json(path / files.MANIFEST), None
    except BrokenError as error:
        return {}, str(error)


def compare(
    path: Path, manifest: dict[str, Any], averager: Averager, settings: Mapping[str, Any]
) -> None:
    """Raise CheckpointError if this version, or this averager, cannot go on from a checkpoint."""
    if manifest["format"] != files.FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']}: wagma {__version__} reads format "
            f"{files.FORMAT}, so continue with the version that wrote it"
        )
    same = manifest["ranks"] == manifest["ranks_at_first"] == averager.collective.size
    saved = manifest["settings"]
    for name, value in {**settings, **settings_of(averager)}.items():
        if saved.get(name) != value and (same or name not in BY_RANKS):
            raise CheckpointError(
                f"{path} was saved with {name} = {saved.get(name)!r}, and now it is {value!r}"
            )


def read_parts(
    path: Path, manifest: dict[str, Any], averager: Averager
) -> tuple[dict[int, dict[str, Any]], str | None]:
    """Read the parts that this rank needs, and check the model; collective.

    Returns:
        The parts by rank, and what is wrong on any rank.
    """
    rank, size, saved = averager.comm.rank, averager.comm.size, manifest["ranks"]
    problem = None
    parts, name = {}, files.MODEL
    try:
        files.check(path, manifest, [files.MODEL] if rank == 0 else [])
        for each in sorted({rank % saved, *range(rank, saved, size)}):
            name = files.part_name(each)
            files.check(path, manifest, [name])
            parts[each] = torch.load(path / name, map_location="cpu", weights_only=True)
    except BrokenError as error:
        problem = str(error)
    except Exception as error:  # what torch raises for files that it cannot read
        problem = f"{name} cannot be read: {state.first_line(error)}"
    problems = averager.comm.allgather(problem)
    return parts, next(filter(None, problems), None)


def go_on(
    path: Path,
    manifest: dict[str, Any],
    parts: dict[int, dict[str, Any]],
    averager: Averager,
    more: Mapping[str, Any],
) -> Loaded:
    """Put a checkpoint's parts into the model, the optimizers and the other objects; collective."""
    comm, flat, optimizers = averager.comm, averager.flat, averager.optimizers.given
    part = parts[comm.rank % manifest["ranks"]]
    error: Exception | None = None
    try:
        check_names(path, part["more"], more)
        if len(optimizers) != (saved := len(part["optimizers"])):
            raise CheckpointError(
                f"{path} has {counted(saved, 'optimizer')}, not {len(optimizers)}"
            )
        if comm.rank == 0:
            tensors = load_file(path / files.MODEL)
            tensors |= {name: tensors[other] for name, other in manifest["tied"].items()}
            state.check_model(flat, tensors, str(path / files.MODEL))
            flat.model.load_state_dict({**part["own"], **tensors})
        for each, kept in zip(optimizers, part["optimizers"], strict=True):
            each.load_state_dict(kept)
    except Exception as problem:  # also what reading or the module's hooks raise
        error = CheckpointError(str(problem) or type(problem).__name__)
    raise_collectively(comm, error)
    broadcast(comm, state.shared(flat))
    flat.model.load_state_dict(part["own"], strict=False)
    averager.load_state_dict(part["averaging"])
    for name, value in more.items():
        value.load_state_dict(part["more"][name])
    generators.restore(part["generators"], flat.device)
    if comm.rank >= manifest["ranks"]:
        generators.seed_anew(part["generators"], comm.rank)
    others = {rank: each["more"] for rank, each in parts.items()}
    step, ranks, at_first = (manifest[name] for name in ("step", "ranks", "ranks_at_first"))
    return Loaded(path, step, ranks, at_first, part["more"], others)


def check_names(path: Path, saved: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise CheckpointError for a name under which nothing was saved."""
    for name in names:
        if name not in saved:
            raise CheckpointError(f"{path} has nothing saved as {name!r}")
