"""``wagma simulate``: methods side by side in simulated time, on as many ranks as one likes."""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

import numpy as np

from wagma import plots
from wagma.job import OK, Interrupted, Signals, UsageError, complain
from wagma.runs import write_json
from wagma.simulation import MACHINES, Machine, Result, Settings, simulate, steps

HEADER = (
    f"{'ranks':>7} {'algorithm':<12}{'wall s':>10}{'steps/s':>11}{'ratio':>7}{'idle':>7}"
    f"{'timely':>8}   staleness: mean, 95 %, most"
)


def run(settings: argparse.Namespace, directory: Path, signals: Signals) -> int:
    """Simulate every algorithm at every number of ranks, print, plot, and return the exit status.

    Args:
        settings: The command line's.
        directory: Where the results go; it is empty.
        signals: What may end the simulation early.
    """
    machine = machine_of(settings)
    results: dict[str, list[Result]] = {name: [] for name in settings.algorithms}
    print(f"# {machine}\n{HEADER}", flush=True)
    try:
        with signals.raising():
            for ranks in settings.ranks:
                step_times = step_times_of(settings, ranks)
                for name in settings.algorithms:
                    began = time.perf_counter()
                    result = simulate(name, step_times, machine, settings_of(settings, ranks))
                    results[name].append(result)
                    print(line(name, result, results[settings.algorithms[0]][-1]), flush=True)
                    report_speed(settings, result, time.perf_counter() - began)
    except Interrupted:
        complain(f"stopped: what is there is in {directory}")
    record = {
        "settings": vars(settings),
        "machine": dataclasses.asdict(machine),
        "results": {name: [in_json(each) for each in of] for name, of in results.items()},
    }
    write_json(directory / "simulation.json", record)
    plots.draw_simulation(directory, results)
    print(f"# results are in {directory}")
    return 128 + signals.received if signals.received else OK


def machine_of(settings: argparse.Namespace) -> Machine:
    """Return the machine that the command line names, with the values that it sets."""
    try:
        return dataclasses.replace(MACHINES[settings.machine], **settings.set)
    except ValueError as error:
        raise UsageError(f"argument --set: {error}") from error


def settings_of(settings: argparse.Namespace, ranks: int) -> Settings:
    """Return what the methods need to know; a group is never larger than the job."""
    group_size = settings.group_size and min(settings.group_size, ranks)
    return Settings(
        settings.parameters * settings.itemsize, group_size, settings.sync_period, settings.wait
    )


def step_times_of(settings: argparse.Namespace, ranks: int) -> np.ndarray:
    """Return the seconds of all ranks' steps, of shape (steps, ranks).

    Raises:
        UsageError: The trace cannot be read.
    """
    count, seed, seconds = settings.steps, settings.seed, settings.step_time_ms / 1000
    if settings.trace:
        try:
            made = steps.recorded(settings.trace, count, ranks, seed)
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"argument --trace: {error}") from error
    elif settings.step_times == "long-tailed":
        made = steps.long_tailed(count, ranks, seed)
    elif settings.step_times == "log-normal":
        made = steps.log_normal(count, ranks, seconds, settings.sigma, seed)
    else:
        made = steps.constant(count, ranks, seconds)
    slow = {rank: factor for rank, factor in settings.slow_rank.items() if rank < ranks}
    return steps.delayed(made, settings.imbalance, seed, settings.imbalance_scale, slow)


def line(name: str, result: Result, first: Result) -> str:
    """Return a result as a line of the table, beside the first algorithm's on as many ranks."""
    ratio = result.throughput / first.throughput
    text = f"{result.ranks:7} {name:<12}{result.wall:10.2f}{result.throughput:11.2f}"
    text += f"{ratio:7.2f}{result.idle_share:7.1%}{result.timely_share:8.1%}"
    if result.staleness.any():
        mean, high, most = staleness(result)
        text += f"   {mean:.2f}, {high}, {most}"
    return text


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


def report_speed(settings: argparse.Namespace, result: Result, seconds: float) -> None:
    """Say how long a simulation took, where that was asked for."""
    if settings.log_level in ("info", "debug"):
        complain(f"simulated {result.events:,} events in {seconds:.1f} s")


def in_json(result: Result) -> dict:
    """Return a result without its arrays of ranks, but for their sums."""
    return {
        "ranks": result.ranks,
        "steps": result.steps,
        "wall_s": result.wall,
        "steps_per_s": result.throughput,
        "idle_share": result.idle_share,
        "timely_share": result.timely_share,
        "staleness": result.staleness.tolist(),
        "events": result.events,
        "messages": result.messages,
    }
