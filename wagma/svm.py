"""``wagma svm``: WP-SGD and the methods that it is compared with, on ranks or simulated nodes."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from collectives.agreement import counted
from wagma import logs, progress
from wagma.commands.preparation import ranks as ranks_in_words
from wagma.job import OK, Signals, UsageError, complain, from_rank_0
from wagma.runs import make_directory, new_directory, write_json
from wagma.wpsgd import figure, files, samples
from wagma.wpsgd.methods import METHODS, PRESETS, TEST_SAMPLES
from wagma.wpsgd.probe import fit_contraction
from wagma.wpsgd.rates import delay_contracts
from wagma.wpsgd.samples import Samples
from wagma.wpsgd.training import Point, Problem, Team, Updates, Weighing, run

log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """The results of a method.

    Attributes:
        runs: for each seed an array of shape (points, 4), the fields of its `Point`s.
        model: the model of the last seed.
        accuracies: for each seed the model's accuracy on the test samples; nan if it is not known.
        weighings: for each seed the last average's.
        consumed: for each seed the number of samples that each node has consumed.
        updates: sums over all seeds and nodes.
    """

    runs: list[np.ndarray] = field(default_factory=list)
    model: np.ndarray | None = None
    accuracies: list[float] = field(default_factory=list)
    weighings: list[Weighing] = field(default_factory=list)
    consumed: list[list[int]] = field(default_factory=list)
    updates: Updates = field(default_factory=Updates)

    def mean(self) -> np.ndarray:
        """Return the mean over the seeds, up to the last point that all have reached."""
        shortest = min(map(len, self.runs))
        return np.mean([points[:shortest] for points in self.runs], axis=0)


def train_on_ranks(settings: argparse.Namespace, comm, signals: Signals) -> int:
    """Train by all methods on the ranks of a job, and return the exit status; collective.

    Rank 0 reads or generates the samples, and sends each rank its shard.
    """
    from wagma.wpsgd.ranks import Ranks  # not at the top: simulated nodes need no MPI

    logs.start(settings.log_level, comm.rank)
    for rank in settings.slow_rank:
        if rank >= comm.size:
            of = ranks_in_words(comm.size)
            raise UsageError(f"argument --slow-rank: no rank {rank} in a job of {of}")
    everything: list[Samples] = []
    from_rank_0(lambda: everything.extend(load(settings, comm.size)), comm)
    directory = make_directory(settings.runs_dir, settings.name, comm)
    logs.to_file(directory, comm.rank)
    factors = [settings.slow_rank.get(rank, 1.0) for rank in range(comm.size)]
    shards: dict[int, Samples] = {}
    rate = from_rank_0(lambda: contraction(settings, problem_of(settings, *everything)), comm)
    test = everything[-1] if everything else None

    def start(name: str, seed: int) -> Team:
        method = METHODS[name]
        if seed not in shards:
            shards.clear()
            shards[seed] = share_out(everything, seed, comm)
        train = everything[0] if method.alone and comm.rank == 0 else shards[seed]
        return Ranks(
            method,
            replace(problem_of(settings, train, test or train), rate=rate["r"]),
            comm,
            factor=min(factors) if method.alone else factors[comm.rank],
            sample_seconds=(settings.sample_time_us or 0) * 1e-6,
            seed=seed,
            trains=not method.alone or comm.rank == 0,
            asked_to_stop=lambda: bool(signals.received),
        )

    outcomes = train_all(settings, start, test, comm.rank)
    where = counted(comm.size, "rank")
    from_rank_0(lambda: report(settings, directory, where, outcomes, rate), comm)
    received = next(filter(None, comm.allgather(signals.received)), 0)
    if received and comm.rank == 0:
        complain(f"stopped: partial results are in {directory}")
    return 128 + received if received else OK


def train_simulated(settings: argparse.Namespace, signals: Signals) -> int:
    """Train by all methods on simulated nodes, and return the exit status."""
    from wagma.simulation import MACHINES
    from wagma.wpsgd.modelled import Modelled

    logs.start(settings.log_level, 0)
    nodes = len(settings.cluster)
    train, test = load(settings, nodes)
    directory = new_directory(settings.runs_dir, settings.name)
    logs.to_file(directory, 0)
    problem, machine = problem_of(settings, train, test), MACHINES[settings.machine]
    rate = contraction(settings, problem)
    problem = replace(problem, rate=rate["r"])

    def start(name: str, seed: int) -> Team:
        return Modelled(
            METHODS[name],
            problem,
            settings.cluster,
            machine,
            settings.sample_time_us * 1e-6,
            seed,
            lambda: bool(signals.received),
            settings.links,
        )

    outcomes = train_all(settings, start, test)
    where = f"{counted(nodes, 'simulated node')}, {settings.machine}"
    report(settings, directory, where, outcomes, rate)
    if signals.received:
        complain(f"stopped: partial results are in {directory}")
    return 128 + signals.received if signals.received else OK


def load(settings: argparse.Namespace, nodes: int) -> tuple[Samples, Samples]:
    """Return the training and test samples, with the same number of features.

    Raises:
        UsageError: a file has no valid samples for the model, or too few for the nodes.
    """
    preset = PRESETS[settings.preset]
    if settings.data is None:
        features = settings.features or preset.features
        made = samples.generate(
            preset.rows + TEST_SAMPLES, features, preset.nonzeros, settings.seed
        )
        train, test = files.split(made, settings.seed)
    elif settings.test:
        train, test = files.read_all([settings.data, settings.test], settings.features)
    else:
        train, test = files.split(files.read(settings.data, settings.features), settings.seed)
    if len(train) < nodes:
        few = f"{counted(len(train), 'sample')} to train on"
        raise UsageError(f"{few}, fewer than the {nodes} nodes: a shard would be empty")
    warn(settings, train)
    return train, test


def warn(settings: argparse.Namespace, train: Samples) -> None:
    """Log the paper's conditions that do not hold."""
    most = 1 - settings.lr * settings.l2
    if settings.rate is not None and settings.rate > most:
        log.warning("r is %g; the paper's bound is 1 - lr * l2 = %g", settings.rate, most)
    delays = any(METHODS[name].delayed for name in settings.methods)
    square, delay = train.largest_square(), settings.workers - 1
    if delays and not delay_contracts(settings.lr, settings.l2, square, 1.0, delay):
        log.warning(
            "late updates may diverge: for samples of norm %.3g, lr * l2 + lr * %.3g is above "
            "(1 - lr * l2)^%d (Lemma 4)",
            *(square**0.5, square, delay),
        )


def share_out(everything: list[Samples], seed: int, comm) -> Samples:
    """Return this rank's shard of rank 0's samples; collective."""
    from mpi4py.util import pkl5  # its messages may be longer than 2 GiB

    large = pkl5.Intracomm(comm)
    if comm.rank:
        return large.recv(source=0)
    parts = samples.shards(len(everything[0]), comm.size, np.random.default_rng([seed]))
    for rank in range(1, comm.size):
        large.send(everything[0].take(parts[rank]), rank)
    return everything[0].take(parts[0])


def problem_of(settings: argparse.Namespace, train: Samples, test: Samples) -> Problem:
    """Return the training problem of the settings on these samples."""
    return Problem(
        train,
        test,
        settings.start,
        settings.lr,
        settings.l2,
        settings.rate,
        settings.span,
        settings.workers,
        settings.acceptance == "paper",
        settings.loss == "logistic",
        settings.count_delays == "run",
    )


def contraction(settings: argparse.Namespace, problem: Problem) -> dict:
    """Return r, as given or else fitted before the run, and what it was fitted to.

    Args:
        settings: the command line's.
        problem: with all training samples.
    """
    if settings.rate is not None:
        return {"r": settings.rate, "from": "--rate"}
    bound = {"r": problem.r, "from": "1 - lr * l2"}
    if not (settings.fit_contraction and any(METHODS[name].weighted for name in settings.methods)):
        return bound
    try:
        fitted = fit_contraction(problem, settings.samples, settings.seed)
    except ValueError as error:
        log.warning("r is 1 - lr * l2 = %g, because a probe did not fit it: %s", problem.r, error)
        return bound
    return {
        **{"r": fitted.rate, "from": f"a probe of {fitted.samples:,} samples"},
        **{"every": fitted.every, "objectives": fitted.objectives.tolist()},
    }


def train_all(
    settings: argparse.Namespace,
    start: Callable[[str, int], Team],
    test: Samples | None,
    rank: int = 0,
) -> dict[str, Outcome]:
    """Train by all methods with one seed before the next seed; return each method's outcome.

    Args:
        settings: The command line's.
        start: Function of a method's name and a seed that returns its nodes.
        test: the test samples; None on ranks that do not have them.
        rank: This process's rank; rank 0 shows the progress.
    """
    length = settings.samples * len(settings.methods) * settings.seeds
    shown = progress.start(rank, length, words=("sample", "objective"))
    outcomes: dict[str, Outcome] = {}
    done, began = 0, time.perf_counter()
    with closing(shown):
        for seed in range(settings.seed, settings.seed + settings.seeds):
            for name in settings.methods:
                team = start(name, seed)
                points = []
                method = METHODS[name]
                for point in run(method, team, settings.span, settings.samples, settings.every):
                    points.append(astuple(point))
                    total, elapsed = done + point.samples, time.perf_counter() - began
                    shown.update(total, elapsed, point.objective, total / elapsed)
                if points:  # else it was stopped before
                    add(outcomes.setdefault(name, Outcome()), team, points, test)
                # All ranks close together: one that has failed ends the job instead.
                team.close()
                done += settings.samples
                if team.stopped:
                    return outcomes
    return outcomes


def add(outcome: Outcome, team: Team, points: list, test: Samples | None) -> None:
    """Add a finished run; collective on ranks."""
    outcome.runs.append(np.array(points))
    outcome.model = model = team.model()
    right = test.labels * (test.matrix @ model) > 0 if test else np.array([np.nan])
    outcome.accuracies.append(float(right.mean()))
    if team.weighing:
        outcome.weighings.append(team.weighing)
    outcome.consumed.append(team.consumed())
    outcome.updates += team.updates()


def report(
    settings: argparse.Namespace,
    directory: Path,
    where: str,
    outcomes: dict[str, Outcome],
    rate: dict,
) -> None:
    """Write, plot and print the methods' results."""
    if not outcomes:
        return
    results = {}
    print(f"{'method':<14}{'samples':>12}{'seconds':>12}{'objective':>12}{'accuracy':>10}")
    for name, outcome in outcomes.items():
        np.savez(directory / f"{name}.npz", model=outcome.model)
        points, updates = outcome.mean(), outcome.updates
        accuracy = float(np.mean(outcome.accuracies))
        results[name] = {
            "accuracy": accuracy,
            "T": [each.delays.tolist() for each in outcome.weighings],
            "q": [each.weights.tolist() for each in outcome.weighings],
            "consumed": outcome.consumed,
            "applied": updates.applied,
            "abandoned": updates.abandoned,
            "updates_by_delay": np.trim_zeros(updates.late, "b").tolist(),
            "longest_delay": updates.longest,
            "points": points.tolist(),
            "runs": [each.tolist() for each in outcome.runs],
        }
        count, seconds, objective, _ = points[-1]
        late = delays_in_words(updates) if METHODS[name].delayed else ""
        print(f"{name:<14}{count:12,.0f}{seconds:12.3f}{objective:12.5g}{accuracy:10.2%}{late}")
    columns = [each.name for each in fields(Point)]
    record = {"settings": vars(settings), "contraction": rate, "columns": columns}
    write_json(directory / "svm.json", {**record, "results": results})
    print(f"contraction rate r: 1 - {1 - rate['r']:.3g}, from {rate['from']}")
    curves = {name: outcome.mean() for name, outcome in outcomes.items()}
    parts = where, f"{settings.loss} loss", counted(settings.seeds, "seed")
    figure.draw(directory / "svm.png", curves, f"{directory.name}: {', '.join(parts)}")
    print(f"models, figures and the objective over time are in {directory}", flush=True)


def delays_in_words(updates: Updates) -> str:
    """Return the end of a delayed method's line: the shares of its updates by delay."""
    pushed = max(updates.applied + updates.abandoned, 1)
    counts = *updates.late[:2], updates.late[2:].sum()
    words = "  late by 0: {:.1%}, 1: {:.1%}, more: {:.1%}".format(*(n / pushed for n in counts))
    if updates.longest > 1:
        words += f" (up to {updates.longest:,})"
    if updates.abandoned:
        words += f", {updates.abandoned / pushed:.1%} abandoned"
    return words
