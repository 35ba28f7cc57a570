"""The report of a run: its records, compared, named and priced."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wagma.report import records, slow
from wagma.report.findings import Cost, Imbalance, Rank, Remedy, Report, Straggler
from wagma.report.price import Job, NotSimulated
from wagma.report.records import Recorded
from wagma.runs import notes
from wagma.throttling import REASONS

__all__ = ["Compared", "compared", "of"]

LEAST = 1e-9  # seconds, of a step without any
COMPUTE = "data", "gradient", "optimizer"
FAULTS = 0.1  # of a step, that wait for a disk: the process is swapped
UNEQUAL_WORK = 0.02  # of a step's work: ranks' batches are not equal
FITTED = 10_000  # steps of each rank at most, by which the time of work is told
SUFFICES = 0.1  # of the variance of work: what ranks' own steps tell its time by
SELDOM = 0.1  # the share of steps with unequal work, such as the last ones of the data
MATTERS = 1.1  # the slowest rank's time divided by the mean, from which on the OSDI paper counts it


def of(run: Path | str, machine: str | None = None) -> Report:
    """Return the report of a run, also of one that has not ended.

    Args:
        run: a directory of ``wagma train``, or a text file of step times in seconds with a line for
            each step and a column for each rank, which is assumed to be of synchronous training.
        machine: the network that other methods would use, one of `wagma.simulation.MACHINES`; None:
            one on which an exchange takes as long as the run's own did, or no time for a table.

    Raises:
        ValueError: it is neither, or has no steps.
        OSError: it cannot be read.
    """
    recorded = records.read(Path(run))
    own, equal, insufficient, stragglers = compared(recorded)
    try:
        job = Job(recorded, machine)
    except NotSimulated:
        job = None
    together = None
    if job is not None and stragglers:
        together = cost_of(job, job.without(indices(recorded, stragglers)))
        stragglers = [
            dataclasses.replace(each, cost=cost_of(job, job.without(indices(recorded, [each]))))
            for each in stragglers
        ]
        stragglers.sort(key=lambda each: -each.cost.share if each.cost else 0.0)
    return Report(
        run=str(recorded.path),
        algorithm=recorded.algorithm,
        size=len(recorded.ranks),
        trace=recorded.is_table,
        compared=recorded.compared,
        wall_s=recorded.wall,
        simulated_s=job.wall if job else None,
        error=job.wall / recorded.wall - 1 if job and recorded.wall else None,
        steps_per_s=rate_of(recorded, job),
        insufficient=insufficient,
        ranks=numbers(recorded, equal),
        stragglers=tuple(stragglers),
        cost=together,
        imbalance=imbalance_of(own, stragglers, job),
        remedies=remedies_of(recorded, stragglers, job),
        notes=tuple(notes(recorded.summary)),
    )


def cost_of(job: Job, without: np.ndarray) -> Cost | None:
    """Return what a job costs more than with these step times; None if that is not simulated."""
    try:
        return job.cost(without)
    except NotSimulated:
        return None


class Compared(NamedTuple):
    """The ranks' steps, compared.

    Attributes:
        own: seconds of the ranks' own steps, float64 array of shape (steps, ranks).
        equal: the same for equal work, of the same shape.
        insufficient: why they cannot be compared; None: they can.
        stragglers: those found, without their costs.
    """

    own: np.ndarray
    equal: np.ndarray
    insufficient: str | None
    stragglers: list[Straggler]


def compared(recorded: Recorded) -> Compared:
    """Compare the ranks' steps, and name the stragglers."""
    own = np.array([recorded.own(rank)[: recorded.compared] for rank in places(recorded)]).T
    averaging = recorded.part("averaging")
    scale, insufficient = scale_of(recorded, own - averaging)
    equal = own * scale + averaging * (1 - scale)
    stragglers = [] if insufficient else named(recorded, equal, scale)
    return Compared(own, equal, insufficient, stragglers)


def places(recorded: Recorded) -> range:
    """Return the indices of the ranks that trained."""
    return range(len(recorded.ranks))


def indices(recorded: Recorded, stragglers: Sequence[Straggler]) -> list[int]:
    """Return the indices of the ranks of stragglers."""
    return [recorded.ranks.index(rank) for each in stragglers for rank in each.ranks]


def rate_of(recorded: Recorded, job: Job | None) -> float | None:
    """Return the steps per second of all ranks: measured, or simulated for a table."""
    seconds = recorded.wall or (job.wall if job else None)
    return sum(recorded.counts) / seconds if seconds else None


def scale_of(recorded: Recorded, alone: np.ndarray) -> tuple[np.ndarray, str | None]:
    """Return what times without averaging are multiplied by for equal work; or why that fails.

    Args:
        recorded: the run's records.
        alone: seconds of the ranks' own steps without averaging, of shape (steps, ranks).

    Returns:
        A float64 array of shape (steps, ranks), and None if they can be.
    """
    one = np.broadcast_to(1.0, (recorded.compared, len(recorded.ranks)))
    if len(recorded.ranks) < 2:
        return one, "there is one rank"
    if recorded.compared < slow.ENOUGH:
        return one, f"{recorded.compared} steps are too few: {slow.ENOUGH} are needed"
    told, samples, elements = map(recorded.column, ("work", "samples", "elements"))
    if (told > 0).all():
        return scale_by(told, alone), None
    if is_equal(elements) and is_equal(samples):
        return one, None
    per_sample = np.divide(elements, samples, out=np.zeros(one.shape), where=samples > 0)
    if is_equal(per_sample) and samples.all():
        return scale_by(samples, alone), None
    return one, (
        "the batches of the ranks differ in size, and the script does not tell how much work each "
        "is: define work(batch)"
    )


def scale_by(work: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return what step times are multiplied by for equal work, which a part of a step ignores.

    Args:
        work: of all steps, above 0, of shape (steps, ranks).
        times: as for `line_of`.
    """
    base, slope = line_of(work, times)
    return (base + slope * np.median(work)) / (base + slope * work)


def line_of(work: np.ndarray, times: np.ndarray) -> tuple[float, float]:
    """Return the seconds of a step without work, and those of each unit of it, both 0 or more.

    The slope has the least absolute deviations from each rank's medians, so that a slow rank with
    much work is not taken for one that has only that; or, where ranks differ by far more than
    their own steps do, from the medians of all. The base is that of the lower median of the ranks.

    Args:
        work, times: of all steps, the latter in seconds, of shape (steps, ranks).

    Returns:
        (1, 0) if the time does not depend on the work.
    """
    every = math.ceil(len(work) / FITTED)
    work, times = work[::every], times[::every]
    middle, usual = np.median(work, axis=0), np.median(times, axis=0)
    own, longer = work - middle, times - usual
    everything = work - np.median(work)
    if np.square(own).mean() < SUFFICES * np.square(everything).mean():
        own, longer = everything, times - np.median(times)
    told = own != 0
    if not told.any():
        return 1.0, 0.0
    slope = weighted_median(longer[told] / own[told], np.abs(own[told]))
    if slope <= 0:
        return 1.0, 0.0
    return max(0.0, float(slow.lower_median(usual - slope * middle))), slope


def weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the value below which half of the weight is, of arrays of shape (n,)."""
    order = values.argsort()
    below = weights[order].cumsum()
    return float(values[order][np.searchsorted(below, below[-1] / 2)])


def is_equal(work: np.ndarray) -> bool:
    """Return whether all ranks have equal work in nearly all steps."""
    spread = work.max(axis=1) - work.min(axis=1)
    return bool((spread > UNEQUAL_WORK * work.max(axis=1)).mean() <= SELDOM)


def named(recorded: Recorded, own: np.ndarray, scale: np.ndarray) -> list[Straggler]:
    """Return the stragglers, without their costs.

    Args:
        recorded: the run's records.
        own: seconds of the ranks' own steps of equal work, of shape (steps, ranks).
        scale: what times without averaging were multiplied by for it, of the same shape.
    """
    found = slow_ranks(own, own - recorded.part("averaging"))
    others = [rank for rank in places(recorded) if rank not in {each.rank for each in found}]
    usual = np.median(own[:, others], axis=1)
    nodes = recorded.nodes
    stragglers = []
    for group in groups_of(found, nodes):
        ranks = [each.rank for each in group]
        first = max(group, key=lambda each: float(own[:, each.rank].sum()))
        ratios = [(own[each.slow, each.rank] / usual[each.slow]) for each in group]
        excess = excess_of(recorded, ranks, others, scale)
        stragglers.append(
            Straggler(
                ranks=tuple(recorded.ranks[rank] for rank in ranks),
                node=nodes[ranks[0]],
                whole_node=len(ranks) > 1,
                pattern=first.pattern,
                ratio=float(np.median(np.concatenate(ratios))),
                share=float(np.mean([each.slow.mean() for each in group])),
                since=first.since,
                phases=first.phases,
                every=first.every,
                part=main_part(recorded, excess),
                excess=excess,
                throttled_s=float(np.mean(recorded.column("throttled_s")[:, ranks].sum(axis=0))),
                gpu_reasons=gpu_reasons(recorded, group, others),
                cost=None,
            )
        )
    return stragglers


def slow_ranks(own: np.ndarray, alone: np.ndarray) -> list[slow.Found]:
    """Return the ranks that are slow by themselves, or else with their part of averaging.

    The part that is not waiting varies with how soon a waiting rank is woken. Never all ranks are
    called slow: those that are found only without averaging are left out, or else the fastest one.

    Args:
        own: as for `named`.
        alone: the same without averaging.
    """
    found = {each.rank: each for each in slow.find(np.maximum(own, LEAST))}
    both = found | {each.rank: each for each in slow.find(np.maximum(alone, LEAST))}
    if len(both) < own.shape[1]:
        found = both
    if len(found) == own.shape[1]:
        del found[int(own.sum(axis=0).argmin())]
    return [found[rank] for rank in sorted(found)]


def groups_of(found: list[slow.Found], nodes: Sequence[str | None]) -> list[list[slow.Found]]:
    """Return the slow ranks, all ranks of a node in one if they are slow in the same pattern."""
    groups = []
    by_rank = {each.rank: each for each in found}
    for node in dict.fromkeys(nodes):
        mine = [rank for rank, each in enumerate(nodes) if each == node]
        slow_here = [by_rank[rank] for rank in mine if rank in by_rank]
        whole = 1 < len(mine) == len(slow_here) and len({each.pattern for each in slow_here}) == 1
        groups += [slow_here] if whole else [[each] for each in slow_here]
    return groups


def excess_of(
    recorded: Recorded, slow_ranks: list[int], others: list[int], scale: np.ndarray
) -> Mapping[str, float]:
    """Return by how many seconds the steps of slow ranks took longer, by part.

    Args:
        recorded: the run's records.
        slow_ranks, others: indices of the slow ranks, of which the mean is taken, and of those that
            they are compared with.
        scale: as for `named`.
    """

    def excess(times: np.ndarray, scale: np.ndarray | float = scale) -> float:
        times = times * scale
        usual = np.median(times[:, others], axis=1)
        return float((times[:, slow_ranks].mean(axis=1) - usual).sum())

    inside = {name: excess(recorded.part(name)) for name in COMPUTE}
    found = {
        "delay": excess(recorded.part("delay")),
        "averaging": excess(recorded.part("averaging"), 1.0),
        "other": excess(recorded.part("other")),
    }
    computed = sum(inside.values())
    outside = 0.0
    if recorded.detailed and computed > 0:
        idle = recorded.column("compute_s") - recorded.column("cpu_s")
        swapped = recorded.column("faults")[:, slow_ranks].mean() > FAULTS
        queued, throttled = map(recorded.column, ("queued_s", "throttled_s"))
        # Of all processors, and told once in many steps: it is bounded by what this one lost.
        lost = max(excess(queued), min(excess(throttled), excess(idle)))
        lost = excess(idle) if swapped else lost
        lowered = recorded.column("gpu_reasons") > 0
        alone = lowered[:, slow_ranks].mean(axis=1) > np.median(lowered[:, others], axis=1)
        lost = max(0.0, lost) + max(0.0, excess(recorded.part("gradient") * alone[:, None]))
        outside = min(lost, computed)
    left = 1 - outside / computed if computed > 0 else 1.0
    return {name: seconds * left for name, seconds in inside.items()} | found | {"outside": outside}


def gpu_reasons(
    recorded: Recorded, group: list[slow.Found], others: list[int]
) -> Mapping[str, float]:
    """Return why the GPUs of slow ranks lowered their clocks, and the others' did not.

    Args:
        recorded: the run's records.
        group: the slow ranks.
        others: indices of the ranks that they are compared with.

    Returns:
        By reason the share of the slow steps, where it is more than the others' share of theirs.
    """
    bits = recorded.column("gpu_reasons").astype(np.int64)
    shares = {}
    for bit, name in REASONS.items():
        has = bits & bit > 0
        share = float(np.mean([has[each.slow, each.rank].mean() for each in group]))
        if share > np.median(has[:, others].mean(axis=0)):
            shares[name] = share
    return shares


def main_part(recorded: Recorded, excess: Mapping[str, float]) -> str | None:
    """Return the part with most of the excess, None if it is not recorded."""
    most = max(excess, key=lambda name: excess[name])
    return most if recorded.detailed or most == "delay" else None


def numbers(recorded: Recorded, own: np.ndarray) -> tuple[Rank, ...]:
    """Return all ranks in numbers.

    Args:
        recorded: the run's records.
        own: as for `named`.
    """
    ranks = []
    for rank in places(recorded):
        others = np.delete(own, rank, axis=1)
        usual = np.median(others, axis=1) if others.size else own[:, rank]
        ratios = own[:, rank] / np.maximum(usual, LEAST)
        ranks.append(
            Rank(
                rank=recorded.ranks[rank],
                node=recorded.nodes[rank],
                steps=recorded.counts[rank],
                median_s=float(np.median(own[:, rank])),
                ratio=float(np.median(ratios)),
                seconds={k: float(v.mean()) for k, v in recorded.parts(rank).items()},
            )
        )
    return tuple(ranks)


def imbalance_of(
    own: np.ndarray, stragglers: Sequence[Straggler], job: Job | None
) -> Imbalance | None:
    """Return how unequal the steps are; None for one rank."""
    if own.shape[1] < 2:
        return None
    means = np.maximum(own.mean(axis=1), LEAST)
    ratio = float((own.max(axis=1) / means).mean())
    everywhere = not stragglers and ratio >= MATTERS
    return Imbalance(ratio, everywhere, cost_of(job, job.equal()) if job else None)


def remedies_of(
    recorded: Recorded, stragglers: Sequence[Straggler], job: Job | None
) -> tuple[Remedy, ...]:
    """Return the methods' throughput; () if nothing can be simulated."""
    if job is None or job.size < 2:
        return ()
    slow_ranks = indices(recorded, stragglers)
    try:
        return job.remedies(job.without(slow_ranks) if slow_ranks else job.equal())
    except NotSimulated:
        return ()
