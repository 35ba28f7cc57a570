"""What a straggler costs, and what would help: the run's steps once more, in simulated time.

Source: Lin et al., Understanding Stragglers in Large Model Training Using What-if Analysis, OSDI
2025, who replace a worker's operations by the others' median in the same way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from wagma import runs
from wagma.commands.methods import chosen
from wagma.methods import METHODS, Choice, named
from wagma.report.findings import Cost, Remedy
from wagma.report.records import Recorded
from wagma.simulation import FREE, MACHINES, Machine, Settings, simulate

__all__ = ["Job", "NotSimulated"]

# Methods whose throughput is told, with their defaults and the run's group size and period.
CANDIDATES = (
    *METHODS,
    "wagma:pace=own",
    "local-sgd:trigger=solo",
    "eager-sgd:trigger=majority",
    "parameter-server:mode=backup:backups=1",
    "parameter-server:mode=asp",
    "hop:backup=1",
)
SHARED = "sync_period", "group_size"
MOST = 200_000  # steps of all ranks that are simulated; of longer runs every second, third, …
EXCHANGES = 60  # simulated to find how long one takes
NOTICED = 0.005  # of the time: a smaller slow-down has no shares
REPEATED = 10_000  # times that steps are repeated at most: others take next to no time
PARAMETERS = 25_559_081 * 4  # bytes of ResNet-50, if the model's are not known


class NotSimulated(Exception):
    """The run's method cannot be simulated; the message says why."""


class Job:
    """A recorded run in simulated time.

    Args:
        recorded: its records.
        machine: the name of a machine, of `wagma.simulation.MACHINES`; None: one on which an
            exchange takes as long as measured in the run, or no time if that is not recorded.

    Attributes:
        times: seconds of the ranks' own steps, float64 array of shape (steps, ranks); if they
            trained for a fixed time, enough to last for it.
        wall: simulated seconds of the run as it was.

    Raises:
        NotSimulated: the method cannot be simulated.
    """

    def __init__(self, recorded: Recorded, machine: str | None = None) -> None:
        self.recorded, self.limit = recorded, recorded.limit
        self.size = len(recorded.ranks)
        self.every, self.times = thinned(recorded)
        self.nbytes = int(recorded.config.get("model_bytes") or PARAMETERS)
        self.choice = self.chosen()
        if machine is not None:
            self.machine = MACHINES[machine]
        else:
            self.machine = self.measured_machine()
        self.made = self.simulated(self.times)
        self.wall = self.seconds_of(self.made)
        if self.wall <= 0:
            raise NotSimulated("its steps take no time")

    def chosen(self) -> Choice:
        """Return the run's method, with its options."""
        config, label = self.recorded.config, self.recorded.algorithm
        try:
            method = named(label)
        except KeyError as error:
            raise NotSimulated(f"no method {label} is installed") from error
        given = {**config.get("options", {}), **config}
        options = method.resolved({each.name: given[each.name] for each in method.options
                                   if each.name in given})  # fmt: skip
        for name, value in options.items():
            options[name] = tuple(value) if isinstance(value, list) else value
        return Choice(label, method, options)

    def measured_machine(self) -> Machine:
        """Return a machine on which the run's exchanges take as long as they did.

        All its times are those of the preset for InfiniBand, multiplied by the same factor.
        """
        seconds = exchange_of(self.recorded)
        if not seconds:
            return FREE
        shape = MACHINES["hdr"]
        equal = np.full((EXCHANGES, self.size), float(self.times.mean()))
        result = self.run(self.choice, equal, shape, None)
        simulated = float(result.waited.mean()) / EXCHANGES
        if simulated <= 0:
            return FREE
        return scaled(shape, seconds / simulated)

    def run(
        self, choice: Choice, times: np.ndarray, machine: Machine, seconds: float | None
    ) -> Any:
        """Simulate a method; return its `wagma.simulation.Result`."""
        names = set(choice.method.simulated_options) - {"compute_limit"}  # it has cut the steps
        options = {name: choice.options[name] for name in names}
        try:
            settings = Settings(self.nbytes, **options)
            return simulate(choice.method, times, machine, settings, seconds)
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            raise NotSimulated(f"{choice.label} cannot be simulated: {error}") from error

    def simulated(self, times: np.ndarray) -> Any:
        """Simulate the run's own method, for the run's number of steps or its time."""
        if self.limit is not None and times.sum(axis=0).min() <= self.limit:
            times = lasting([*times.T], self.limit)
        return self.run(self.choice, times, self.machine, self.limit)

    def seconds_of(self, result: Any) -> float:
        """Return the seconds of the run by a simulation, of its steps if it had a fixed time."""
        if self.limit is None:
            return float(result.wall) * self.every
        made = float(result.made.sum())
        if not made:
            raise NotSimulated(f"no rank ends a step in {self.limit:g} s")
        return self.limit * sum(self.recorded.counts) / made

    def cost(self, without: np.ndarray) -> Cost:
        """Return what the run costs more than with these step times, of the shape of `times`."""
        slowdown = self.slowdown(without)
        share = 1 - 1 / slowdown
        measured = self.recorded.wall or self.wall
        all_of_it = 1 - 1 / self.slowdown(self.equal())
        return Cost(
            seconds=measured * share,
            share=share,
            slowdown=slowdown,
            explained=share / all_of_it if all_of_it > NOTICED else None,
        )

    def slowdown(self, without: np.ndarray) -> float:
        """Return the simulated time divided by that with these step times."""
        seconds = self.seconds_of(self.simulated(without))
        if seconds <= 0:
            raise NotSimulated("these steps take no time")
        return self.wall / seconds

    def equal(self) -> np.ndarray:
        """Return step times that are equal for all ranks, with the same sum."""
        return np.repeat(self.times.mean(axis=1, keepdims=True), self.size, axis=1)

    def without(self, slow: Sequence[int]) -> np.ndarray:
        """Return the step times with those of some ranks replaced by the others' median.

        Args:
            slow: indices of the ranks.
        """
        others = [rank for rank in range(self.size) if rank not in slow]
        times = self.times.copy()
        times[:, list(slow)] = np.median(times[:, others], axis=1, keepdims=True)
        return times

    def remedies(self, without: np.ndarray) -> tuple[Remedy, ...]:
        """Return every method's throughput with the run's steps, the best first.

        Args:
            without: step times without the stragglers.
        """
        seconds = self.limit or self.wall / self.every
        reached = self.rate(self.choice, without, self.machine, seconds)
        own = self.rate(self.choice, self.times, self.machine, seconds)
        if not (reached and own):
            raise NotSimulated("no step ends in the run's time")
        found = []
        for choice in self.choices():
            try:
                rate = self.rate(choice, self.times, self.machine, seconds)
                bound = self.rate(choice, self.times, FREE, seconds)
            except NotSimulated:
                continue
            found.append(Remedy(choice.label, rate, bound, rate / own, 1 - rate / reached))
        return tuple(sorted(found, key=lambda each: -each.steps_per_s))

    def choices(self) -> Iterator[Choice]:
        """Yield the run's own method, and others that so many ranks can train by."""
        yield self.choice
        common = {name: self.choice.options.get(name) for name in SHARED}
        common = {name: value for name, value in common.items() if value is not None}
        for label in CANDIDATES:
            choice = chosen(METHODS)(label).resolved(common)
            same = choice.method is self.choice.method and same_options(choice, self.choice)
            if not same and not choice.method.problem(choice.options, self.size):
                yield choice

    def rate(self, choice: Choice, times: np.ndarray, machine: Machine, seconds: float) -> float:
        """Return the steps per second of all ranks that train for a time."""
        result = self.run(choice, lasting([*times.T], seconds), machine, seconds)
        return float(result.made.sum()) / seconds


def same_options(one: Choice, other: Choice) -> bool:
    """Return whether two choices of a method are the same simulation."""
    names = one.method.simulated_options
    return all(one.options[name] == other.options[name] for name in names)


def thinned(recorded: Recorded) -> tuple[int, np.ndarray]:
    """Return the ranks' step times for a simulation, and of how many steps one is taken.

    A rank that needs longer for its part of averages, by which it does not wait, has the excess
    over the others in its steps.
    """
    ranks = range(len(recorded.ranks))
    averaging = [recorded.parts(rank)["averaging"] for rank in ranks]
    exchanges = np.array([float(np.median(each)) for each in averaging])
    excess = np.maximum(0.0, exchanges - np.median(exchanges))
    own = [recorded.own(rank) - averaging[rank] + excess[rank] for rank in ranks]
    if recorded.limit is not None:
        return 1, lasting(own, recorded.limit)
    times = np.array([each[: recorded.compared] for each in own]).T
    every = math.ceil(times.size / MOST)
    return every, np.ascontiguousarray(times[::every])


def exchange_of(recorded: Recorded) -> float:
    """Return the mean seconds of a step that averaging takes, without waiting for late ranks."""
    without_waiting = recorded.part("averaging")
    if without_waiting.any():
        return float(without_waiting.mean())
    # The last rank that arrives does not wait.
    return float(recorded.column("average_s").min(axis=1).mean())


def scaled(machine: Machine, factor: float) -> Machine:
    """Return a machine on which communication takes `factor` times as long."""
    times = ("latency", "overhead", "gap", "byte_gap", "response")
    rates = ("injection", "memory", "staging")
    return dataclasses.replace(
        machine,
        **{name: getattr(machine, name) * factor for name in times},
        **{name: getattr(machine, name) / factor for name in rates},
    )


def lasting(own: Sequence[np.ndarray], seconds: float) -> np.ndarray:
    """Return each rank's steps, repeated until all last for `seconds`; shape (steps, ranks).

    Raises:
        NotSimulated: those of a rank take no time, or next to none.
    """
    shortest = min(float(each.sum()) for each in own)
    if shortest * REPEATED < seconds or shortest <= 0:
        raise NotSimulated("the steps of a rank take next to no time")
    return runs.lasting(own, seconds).T
