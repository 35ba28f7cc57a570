"""The preparation and checks of `wagma train` and `wagma compare` in the running job."""

from __future__ import annotations

import argparse
import math
from functools import partial
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
    found = find_data(settings, comm, comm.size)
    run = find_run(settings, comm) or runs.make_directory(settings.runs_dir, settings.name, comm)
    logs.to_file(run, comm.rank)
    task = devices.on(load_task(settings, found, comm), device)
    if settings.step_time_per_work_ms:
        task.check_work()
    local.resolve(settings, task)
    return task, run


def find_run(settings: argparse.Namespace, comm) -> Path | None:
    """Return the directory of the run to continue, None if a new one begins; collective."""
    if getattr(settings, "resume", None) is None:
        return None
    from wagma import continuing  # not at the top: it loads torch

    return job.from_rank_0(lambda: continuing.find(settings), comm)


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


def find_data(settings: argparse.Namespace, comm, size: int):
    """Return a function that makes the task of these data, None with a script; collective.

    Args:
        settings: The command line's.
        comm: An mpi4py communicator.
        size: The number of ranks that are to share the data.

    Raises:
        UsageError: There are no data, or too few.
    """
    if settings.script:
        job.together(lambda: check_file(settings.script), comm)
        return None
    make, count, samples = FINDERS[settings.task](settings, comm)
    if size > count:
        raise job.UsageError(f"{count} training {samples} are too few for {ranks(size)}")
    return make


# Each returns a function that makes its task, and the number and the name of the samples. They
# import what only their task needs.


def find_digits(settings: argparse.Namespace, comm):
    from wagma import data
    from wagma.tasks import digits

    make = partial(digits.task, settings.shards, comm, settings.dirichlet_alpha)
    return make, data.TRAIN_IMAGES, "images"


def find_images(settings: argparse.Namespace, comm):
    from wagma.tasks import images

    found = images_of(settings.images, comm)
    given = settings.image_size, settings.shards, settings.dirichlet_alpha
    how = settings.model, settings.augment, settings.augment_with
    make = partial(images.task, found, *given, *how)
    return make, len(found.train.labels), "images"


def images_of(directory: Path | None, comm):
    """Return the images of a folder, the digits without one; collective."""
    from wagma.tasks import arrays, folders

    if directory is None:
        return job.from_rank_0(arrays.digits, comm)
    if job.from_rank_0(lambda: arrays.are_in(directory), comm):
        return job.together(lambda: arrays.read(directory), comm)  # each rank maps the files
    return job.from_rank_0(lambda: folders.scan(directory), comm)


def find_translations(settings: argparse.Namespace, comm):
    from wagma.tasks import translation

    found = job.from_rank_0(lambda: translation.read(settings.text), comm)
    make = partial(translation.task, found, settings.batch_by == "tokens")
    return make, len(found.train.sources), "sentences"


def find_text(settings: argparse.Namespace, comm):
    from wagma.tasks import language

    length = settings.sequence_length
    found = job.from_rank_0(lambda: language.read(settings.text, length, settings.packing), comm)
    make = partial(language.task, found, length, settings.shards, settings.dirichlet_alpha)
    return make, len(found[0].labels), "sequences"


def find_environment(settings: argparse.Namespace, comm):
    from wagma.tasks import control

    steps = settings.batch_by == "steps"
    played = control.Settings(settings.environment, steps, settings.environment_time_ms / 1000)
    job.together(lambda: control.make(settings.environment).close(), comm)
    return partial(control.task, played), math.inf, "episodes"  # as many as any ranks play


FINDERS = {
    "digits": find_digits,
    "images": find_images,
    "translation": find_translations,
    "language": find_text,
    "control": find_environment,
}


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
    if settings.script:
        from wagma.tasks import script  # not at the top: it loads torch

        return job.together(lambda: script.load(settings.script), comm)
    return found()
