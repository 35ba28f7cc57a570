"""The preparation and checks of `wagma train` and `wagma compare` in the running job."""

from __future__ import annotations

import argparse
from pathlib import Path

from wagma import job, logs
from wagma.tasks import local


def prepare(settings: argparse.Namespace, comm):
    """Return the task and the run's directory, after starting the logs in it; collective.

    Raises:
        UsageError: The job does not support these settings.
    """
    from wagma import runs  # not at the top: --help needs no numpy

    logs.start(settings.log_level, comm.rank)
    check_ranks(settings, comm.size)
    from wagma import devices  # not at the top: it loads torch

    device = devices.choose(settings.device, comm)
    settings.device = device.type
    if comm.size == 1:
        print("training on 1 rank: start more of them with mpiexec or srun", flush=True)
    found = find_data(settings, comm)
    run = runs.make_directory(settings.runs_dir, settings.name, comm)
    logs.to_file(run, comm.rank)
    task = devices.on(load_task(settings, found, comm), device)
    local.resolve(settings, task)
    return task, run


def check_ranks(settings: argparse.Namespace, size: int) -> None:
    """Raise UsageError for options that are invalid for so many ranks."""
    several = "algorithms" in settings
    for choice in settings.algorithms if several else [settings.algorithm]:
        problem = choice.method.problem(choice.options, size)
        if problem:
            raise job.UsageError(f"algorithm {choice.label}: {problem}")
    for rank in settings.slow_rank:
        if rank >= size:
            raise job.UsageError(f"argument --slow-rank: no rank {rank} in a job of {ranks(size)}")


def ranks(size: int) -> str:
    """Return "1 rank" or "4 ranks"."""
    return f"{size} rank{'s' if size > 1 else ''}"


def find_data(settings: argparse.Namespace, comm):
    """Return the `folders.Folders` of --images, None without the option; collective.

    Raises:
        UsageError: There are no data, or too few.
    """
    from wagma import data
    from wagma.tasks import folders

    if settings.script:
        job.together(lambda: check_file(settings.script), comm)
        return None
    found, images = None, data.TRAIN_IMAGES
    if settings.images:
        found = job.from_rank_0(lambda: folders.scan(settings.images), comm)
        images = len(found.train.paths)
    if comm.size > images:
        raise job.UsageError(f"{images} training images are too few for {ranks(comm.size)}")
    return found


def check_file(path: Path) -> None:
    """Raise UsageError if a script cannot be read."""
    try:
        path.open().close()
    except OSError as error:
        raise job.UsageError(f"argument --script: cannot read {path}: {error.strerror}") from error


def load_task(settings: argparse.Namespace, found, comm):
    """Return the task that the settings name; collective.

    Args:
        settings: The command line's.
        found: The result of `find_data`.
        comm: An mpi4py communicator.
    """
    from wagma.tasks import digits, images, script  # not at the top: they load torch

    if settings.script:
        return job.together(lambda: script.load(settings.script), comm)
    if settings.images:
        return images.task(found, settings.image_size, settings.shards, settings.dirichlet_alpha)
    return digits.task(settings.shards, comm, settings.dirichlet_alpha)
