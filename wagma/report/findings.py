"""What a report says, as frozen dataclasses: all numbers are Python's, so that they become JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PARTS", "PATTERNS", "Cost", "Imbalance", "Rank", "Remedy", "Report", "Straggler"]

# The parts of a step by name, in words.
PARTS = {
    "data": "data loading",
    "gradient": "forward and backward",
    "delay": "injected delay",
    "optimizer": "the local optimizer",
    "averaging": "averaging, without waiting",
    "other": "between steps",
    "outside": "outside the process",
}
PATTERNS = ("always", "now and then", "from a step on", "in phases", "growing")


@dataclass(frozen=True)
class Rank:
    """One rank in numbers.

    Attributes:
        rank: its number.
        node: the name of its host; None if the run has not recorded it.
        steps: number of steps that it has made.
        median_s: median seconds of its own steps of equal work, without waiting for others.
        ratio: its own seconds divided by the other ranks' median, in the median step.
        seconds: mean seconds of a step by part, of `PARTS`, and "waiting" for other ranks; they add
            up to the mean time of a step. A run that has not recorded the parts has what it has
            recorded. Time outside the process is in the part in which it fell, not among these.
    """

    rank: int
    node: str | None
    steps: int
    median_s: float
    ratio: float
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Cost:
    """What something costs the job, by simulating its recorded steps with and without it.

    Attributes:
        seconds: seconds by which the job would have been shorter without it, or would have made its
            steps earlier if it trained for a fixed time.
        share: the same as a share of the job's time: 0.31 is 31 % of the throughput.
        slowdown: S, the simulated seconds of the run as it was, divided by those without it.
        explained: the share of the job's whole slow-down by unequal steps that it explains: what
            the job would save without it, divided by what it would save if in every step all ranks
            took their mean time; None if that is nothing. It may exceed 1, as the others' median is
            below the mean.
    """

    seconds: float
    share: float
    slowdown: float
    explained: float | None


@dataclass(frozen=True)
class Straggler:
    """A rank, or all ranks of a node, whose steps are longer than the others'.

    Attributes:
        ranks: the rank; of a node all of its ranks.
        node: the name of the host; None if not recorded.
        whole_node: whether these are all ranks of a node, slow in the same way.
        pattern: one of `PATTERNS`.
        ratio: its seconds divided by the other ranks' median, in the median of its slow steps.
        share: the share of its steps that are slow.
        since: the first slow step, counted from 0, for "from a step on" and "growing"; else None.
        phases: pairs of the first and the last step of each phase, for "in phases"; else ().
        every: number of steps from one slow step to the next if that is regular, for "now and
            then"; else None.
        part: the part of the step, a key of `PARTS`, with most of the excess over the others; None
            if the parts are not recorded.
        excess: seconds by which its steps took longer than the others' median, by part, summed over
            all steps; of a node, the mean of its ranks. Those "outside" are not in other parts.
        throttled_s: seconds for which its cgroup's limit stopped processes, on all processors
            together; of a node, the mean of its ranks.
        gpu_reasons: why its GPU lowered its clock more often than the others' did: by reason, of
            `wagma.throttling.REASONS`, the share of its slow steps.
        cost: what it costs the job alone, while other stragglers stay as slow as they are; None if
            the run's method cannot be simulated.
    """

    ranks: tuple[int, ...]
    node: str | None
    whole_node: bool
    pattern: str
    ratio: float
    share: float
    since: int | None
    phases: tuple[tuple[int, int], ...]
    every: int | None
    part: str | None
    excess: Mapping[str, float]
    throttled_s: float
    gpu_reasons: Mapping[str, float]
    cost: Cost | None

    @property
    def name(self) -> str:
        """What it is: "rank 3", or "node n7 (ranks 4, 5)"."""
        numbers = ", ".join(map(str, self.ranks))
        if self.whole_node:
            return f"node {self.node} (ranks {numbers})"
        return f"rank {numbers}"


@dataclass(frozen=True)
class Imbalance:
    """Steps that differ between ranks, by whichever causes.

    Attributes:
        slowest_over_mean: the slowest rank's seconds divided by the ranks' mean, in the mean step.
        everywhere: whether the steps are unequal on all ranks alike: it matters, and no rank or
            node is a straggler.
        cost: what it costs the job that not all ranks take their mean time in every step; None if
            the run's method cannot be simulated.
    """

    slowest_over_mean: float
    everywhere: bool
    cost: Cost | None


@dataclass(frozen=True)
class Remedy:
    """The run's steps under a method, in simulated time; says nothing about accuracy.

    Attributes:
        algorithm: the method with its options, as for --algorithm.
        steps_per_s: simulated steps per second of all ranks together, if they train for as long as
            the run took.
        bound: these steps per second if communication took no time.
        ratio: `steps_per_s` divided by those of the run's own method, simulated alike.
        loss: the share of the throughput that the run's own method would have without the
            stragglers, or with equal steps if there are none, that is not reached; negative if it
            is exceeded.
    """

    algorithm: str
    steps_per_s: float
    bound: float
    ratio: float
    loss: float


@dataclass(frozen=True)
class Report:
    """Where a run's time went, who is slow, what that costs, and what would help.

    Attributes:
        run: the directory of the run, or the file of the trace.
        algorithm: the method with its options; of a trace, the one that it is assumed to use.
        size: number of ranks.
        trace: whether it is a table of step times, which has no other records.
        compared: number of steps that are compared: those that all ranks have made.
        wall_s: measured seconds of the run; None for a trace.
        simulated_s: seconds of the run, as it was, in simulated time; None if the method cannot be
            simulated.
        error: `simulated_s` divided by `wall_s`, minus 1: the simulation's own error; None if one
            of them is.
        steps_per_s: measured steps per second of all ranks together; of a trace, simulated.
        insufficient: why no rank can be called slow, such as unequal work that was not told; None
            if it can.
        ranks: all ranks in numbers, by rank.
        stragglers: those found, the most expensive first.
        cost: what they cost together; None if there are none, or nothing can be simulated.
        imbalance: steps that are unequal; None without evidence.
        remedies: methods by their simulated throughput, the best first; () if nothing can be
            simulated. The run's own method is among them.
        notes: what the summary says of losses and updates that were not finite, in words.
    """

    run: str
    algorithm: str
    size: int
    trace: bool
    compared: int
    wall_s: float | None
    simulated_s: float | None
    error: float | None
    steps_per_s: float | None
    insufficient: str | None
    ranks: tuple[Rank, ...]
    stragglers: tuple[Straggler, ...]
    cost: Cost | None
    imbalance: Imbalance | None
    remedies: tuple[Remedy, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return all fields by name, those of the parts as well, for JSON."""
        return dataclasses.asdict(self)
