"""``wagma simulate``: compare methods in simulated time, on any number of ranks."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.agreement import counted
from wagma import plots
from wagma.job import OK, Interrupted, Signals, UsageError, complain
from wagma.methods import Choice
from wagma.runs import new_directory, recorded, write_json
from wagma.simulation import MACHINES, Machine, Result, Settings, simulate, steps

if TYPE_CHECKING:  # it loads torch
    from wagma.tasks.contract import Task

NAME = 19  # characters of the table's column of names, if none is longer
DEFAULT_STEP_TIME_MS = 500.0  # also in --help
DEFAULT_SIGMA = 0.05

log = logging.getLogger(__name__)


def run(settings: argparse.Namespace, signals: Signals) -> int:
    """Simulate every algorithm at every number of ranks, print, plot, and return the exit status.

    Args:
        settings: The command line's.
        signals: Signals that may end the simulation early.

    Raises:
        UsageError: The settings cannot be simulated.
    """
    machine = machine_of(settings)
    trace = read_trace(settings)
    directory = new_directory(settings.runs_dir, settings.name)
    results: dict[str, list[Result]] = {each.label: [] for each in settings.algorithms}
    error = None
    job, network = job_in_words(settings), machine_in_words(settings, machine)
    print(f"# {job}\n# {network}\n{header(name_width(settings))}", flush=True)
    try:
        with signals.raising():
            for ranks in sorted(settings.ranks):
                simulate_all(settings, machine, trace, ranks, results)
    except Interrupted:
        complain(f"stopped: partial results are in {directory}")
    except UsageError as caught:
        error = caught
    record = {
        "settings": recorded(settings),
        "machine": dataclasses.asdict(machine),
        "results": {name: [in_json(each) for each in of] for name, of in results.items()},
    }
    write_json(directory / "simulation.json", record)
    plots.draw_simulation(directory, results, f"{directory.name}: {job}\n{network}")
    if error:
        raise error
    print(f"# results are in {directory}")
    return 128 + signals.received if signals.received else OK


def simulate_all(
    settings: argparse.Namespace,
    machine: Machine,
    trace: np.ndarray | None,
    ranks: int,
    results: dict[str, list[Result]],
) -> None:
    """Simulate all algorithms on this number of ranks; print their results and collect them."""
    first = None
    try:
        step_times = step_times_of(settings, trace, ranks)
        for choice in settings.algorithms:
            began, name = time.perf_counter(), choice.label
            chosen = settings_of(settings, choice, ranks)
            result = simulate(choice.method, step_times, machine, chosen, settings.seconds)
            seconds = time.perf_counter() - began
            log.info("%s: %d events in %.1f s", name, result.events, seconds)
            first = first or result
            results[name].append(result)
            print(line(name, name_width(settings), result, first), flush=True)
    except (ValueError, OverflowError, MemoryError) as error:
        reason = str(error) or "not enough memory"
        raise UsageError(f"cannot simulate {counted(ranks, 'rank')}: {reason}") from error


def machine_of(settings: argparse.Namespace) -> Machine:
    """Return the machine that the command line names, with the values that it sets."""
    try:
        return dataclasses.replace(MACHINES[settings.machine], **settings.set)
    except ValueError as error:
        raise UsageError(f"argument --set: {error}") from error


def job_in_words(settings: argparse.Namespace, trained: Task | None = None) -> str:
    """Return a description of the job: its steps, its model and the injected delays.

    Args:
        settings: the command line's.
        trained: the task that is trained; None: none is.
    """
    kind = "recorded" if settings.trace else settings.step_times
    model = f"training {trained.name}" if trained else ""
    if settings.parameters:
        parameters = "parameter" if settings.parameters == 1 else "parameters"
        size = f"{settings.parameters:,} {parameters} of {counted(settings.itemsize or 4, 'byte')}"
        model = f"{model} as if it had {size}" if trained else size
    if settings.seconds is None:
        parts = [counted(settings.steps, f"{kind} step"), model]
    else:
        parts = [f"{settings.seconds:g} s of {kind} steps", model]
    if trained and settings.step_time_per_work_ms:
        longer = settings.step_time_per_work_ms
        parts.insert(1, f"each longer by {longer:g} ms × its batches' {trained.unit}")
    if settings.imbalance != "none":
        scale = settings.imbalance_scale
        parts.append(f"imbalance {settings.imbalance}" + (f" × {scale:g}" if scale != 1 else ""))
    slow = settings.slow_rank.items()
    parts += [f"rank {rank} takes {factor:g} times as long" for rank, factor in slow]
    return ", ".join(parts)


def machine_in_words(settings: argparse.Namespace, machine: Machine) -> str:
    """Return the machine's name, the names of values that the command line sets, and its values."""
    name = settings.machine
    if settings.set:
        name += f" with another {', '.join(settings.set)}"
    times = {
        "latency": machine.latency,
        "overhead": machine.overhead,
        "gap": machine.gap,
        "response": machine.response,
        "latency within a node": machine.local_latency,
    }
    rates = {
        "a rank's messages": 1 / machine.byte_gap if machine.byte_gap else math.inf,
        "a node's": machine.injection,
        "within a node": 1 / machine.local_byte_gap if machine.local_byte_gap else math.inf,
        "memory": machine.memory,
        "staging": machine.staging,
    }
    values = [f"{what} {1e6 * seconds:,.6g} µs" for what, seconds in times.items() if seconds]
    values += [f"{what} {rate / 1e9:,.6g} GB/s" for what, rate in rates.items() if rate < math.inf]
    server = ", the server on a further node" if settings.dedicated_server else ""
    return f"{name}: {', '.join(values)}, ranks per node {machine.ranks_per_node}{server}"


def read_trace(settings: argparse.Namespace) -> np.ndarray | None:
    """Return the recorded steps, None without --trace."""
    if settings.trace is None:
        return None
    try:
        return steps.read_trace(settings.trace)
    except OSError as error:
        reason = f"cannot read {settings.trace}: {error.strerror}"
        raise UsageError(f"argument --trace: {reason}") from error
    except ValueError as error:
        raise UsageError(f"argument --trace: {error}") from error


def settings_of(settings: argparse.Namespace, choice: Choice, ranks: int) -> Settings:
    """Return the settings of a method.

    Raises:
        ValueError: the method cannot have them on so many ranks.
    """
    inert = choice.method.check(choice.options, ranks)
    if inert:
        log.warning("%s, %s: %s", choice.label, counted(ranks, "rank"), inert)
    return Settings(
        settings.parameters * settings.itemsize,
        seed=settings.seed,
        accumulate=getattr(settings, "accumulate", 1),
        dedicated_server=settings.dedicated_server,
        **{name: choice.options[name] for name in choice.method.simulated_options},
    )


def step_times_of(settings: argparse.Namespace, trace: np.ndarray | None, ranks: int) -> np.ndarray:
    """Return the seconds of all ranks' steps, of shape (steps, ranks).

    If the job runs for a fixed time, each rank has as many steps as it could make in that time.
    """
    if settings.seconds is None:
        return first_steps(settings, trace, ranks, settings.steps)
    count = max(64, 0 if trace is None else len(trace))
    limits = [each.options.get("compute_limit") for each in settings.algorithms]
    limit = min(filter(None, limits), default=None)
    while True:
        made = first_steps(settings, trace, ranks, count)
        total = steps.begun_within(limit, made, getattr(settings, "accumulate", 1))[1].sum(axis=0)
        if (total >= settings.seconds).all():
            return made
        if not total.all():
            raise ValueError(
                f"the steps of rank {total.argmin()} take no time: the simulation would not end"
            )
        count = max(2 * count, math.ceil(count * 1.1 * settings.seconds / total.min()))


def first_steps(
    settings: argparse.Namespace, trace: np.ndarray | None, ranks: int, count: int
) -> np.ndarray:
    """Return the seconds of all ranks' first steps, of shape (count, ranks)."""
    seed = settings.seed
    seconds = or_default(settings.step_time_ms, DEFAULT_STEP_TIME_MS) / 1000
    if trace is not None:
        made = steps.recorded(trace, count, ranks, seed)
    elif settings.step_times == "long-tailed":
        made = steps.long_tailed(count, ranks, seed)
    elif settings.step_times == "log-normal":
        sigma = or_default(settings.sigma, DEFAULT_SIGMA)
        made = steps.log_normal(count, ranks, seconds, sigma, seed)
    else:
        made = steps.constant(count, ranks, seconds)
    slow_ranks = settings.slow_rank
    return steps.delayed(made, settings.imbalance, seed, settings.imbalance_scale, slow_ranks)


def or_default(value: float | None, default: float) -> float:
    """Return the value given, or else the default."""
    return default if value is None else value


def name_width(settings: argparse.Namespace) -> int:
    """Return the width of the column of names, in characters."""
    return max(NAME, *(len(each.label) + 1 for each in settings.algorithms))


def header(width: int) -> str:
    """Return the table's first line."""
    return (
        f"{'ranks':>7} {'algorithm':<{width}}{'wall s':>10}{'steps/s':>11}{'ratio':>7}{'idle':>7}"
        f"{'timely':>8}   staleness: mean, 95 %, most"
    )


def line(name: str, width: int, result: Result, first: Result) -> str:
    """Return a line of the table: a result, with its ratio to the first algorithm's."""
    # The time limit may have ended the first algorithm before its first step.
    ratio = f"{result.throughput / first.throughput:.2f}" if first.throughput else "–"
    text = f"{result.ranks:7} {name:<{width}}{result.wall:10.2f}{result.throughput:11.2f}"
    text += f"{ratio:>7}{result.idle_share:7.1%}"
    if result.left_out_share:
        text += f"   {result.left_out_share:.1%} of the batches left out"
    if not result.staleness.any():
        return text  # there are no group averages
    mean, high, most = staleness(result)
    return f"{text}{result.timely_share:8.1%}   {mean:.2f}, {high}, {most}"


def staleness(result: Result) -> tuple[float, int, int]:
    """Return the mean, the 95th percentile and the highest staleness, in versions."""
    counts = result.staleness
    versions = np.arange(len(counts))
    shares = np.cumsum(counts) / counts.sum()
    return (
        float((versions * counts).sum() / counts.sum()),
        int(np.searchsorted(shares, 0.95)),
        int(np.flatnonzero(counts)[-1]),
    )


def in_json(result: Result) -> dict[str, Any]:
    """Return a result for JSON, with its per-rank arrays summed or averaged."""
    return {
        "ranks": result.ranks,
        "steps": result.made.sum() / result.ranks,
        "iterations": result.reached.sum() / result.ranks,
        "wall_s": result.wall,
        "steps_per_s": result.throughput,
        "compute_s": float(result.compute.sum()),
        "waited_s": float(result.waited.sum()),
        "idle_share": result.idle_share,
        "timely_share": result.timely_share,
        "left_out_share": result.left_out_share,
        "updates": result.updates,
        "staleness": result.staleness.tolist(),
        "events": result.events,
        "messages": result.messages,
    }
