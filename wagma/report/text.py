"""A report in words: the lines of the command, and the one line at the end of a training."""

from __future__ import annotations

from collections.abc import Iterator

from wagma.report.findings import PARTS, Cost, Remedy, Report, Straggler

__all__ = ["advice", "columns", "headline", "lines", "remedy_columns"]

MATTERS = 0.05  # of the throughput, or of the steps
BEST = 3
NAMED = 4  # stragglers in a line
THROTTLED = 0.1  # of the excess: a shorter time does not explain it
ROWS = 32  # of the table of ranks
NOTHING = "–"
UNEQUAL = "no straggler, but unequal steps on all ranks"


def headline(report: Report) -> str | None:
    """Return the stragglers in a line; None if they do not cost enough to matter."""
    cost = report.cost
    if cost is None or cost.share < MATTERS:
        return None
    first, *others = report.stragglers
    text = slowness(first)
    if others:
        text += f", as {listed([each.name for each in others])} did"
    return f"{text}: {percent(cost.share)} of the throughput{remedy(report)}"


def advice(report: Report) -> str:
    """Return a line about what to try after a run, and why."""
    if line := headline(report):
        return line
    if report.insufficient:
        return f"insufficient evidence of who is slow: {report.insufficient}"
    if report.stragglers and report.cost is None:
        return slowness(report.stragglers[0])
    imbalance = report.imbalance
    if imbalance and imbalance.everywhere and imbalance.cost and imbalance.cost.share >= MATTERS:
        share = percent(imbalance.cost.share)
        return f"{UNEQUAL}: {share} of the throughput{remedy(report)}"
    return f"no rank costs {percent(MATTERS)} of the throughput{remedy(report)}"


def remedy(report: Report) -> str:
    """Return the method that would make the most steps, after "; "; "" if none is simulated."""
    others = [each for each in report.remedies if each.algorithm != report.algorithm]
    if not others:
        return ""
    best = others[0]
    if best.ratio < 1 + MATTERS:
        return f"; no other method would make {percent(MATTERS)} more steps"
    return (
        f"; --algorithm {best.algorithm} would make about {best.ratio:.2f} × the steps in the same "
        "time"
    )


def listed(names: list[str]) -> str:
    """Return "one, two and three"; of many the first ones and the number of the others."""
    if len(names) > NAMED:
        names = [*names[:NAMED], f"{len(names) - NAMED} more"]
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else last


def slowness(each: Straggler, steps: str = "steps") -> str:
    """Return "rank 3 took 2.1 × the others' median in 94 % of steps, in data loading".

    Args:
        each: who.
        steps: what was compared, such as "periods of 10 steps".
    """
    share = percent(each.share)
    text = f"{each.name} took {each.ratio:.1f} × the others' median in {share} of {steps}"
    return text if each.part is None else f"{text}, in {PARTS[each.part]}"


def percent(share: float) -> str:
    """Return a share as "31 %"."""
    return f"{100 * share:.0f} %"


def lines(report: Report) -> Iterator[str]:
    """Yield what the report says above its tables, a paragraph in each line."""
    yield f"{report.run}: {report.algorithm}, {report.size} ranks, {report.compared} steps compared"
    if report.insufficient:
        yield f"insufficient evidence of who is slow: {report.insufficient}"
    for each in report.stragglers:
        yield f"{slowness(each)}; {pattern(each)}"
        yield from (f"  {line}" for line in limits(each))
        if each.cost:
            yield f"  it costs {cost(each.cost)}"
    if report.cost and len(report.stragglers) > 1:
        yield f"together they cost {cost(report.cost)}"
    yield from report.notes
    imbalance = report.imbalance
    if imbalance and imbalance.everywhere:
        price = imbalance.cost and f": {percent(imbalance.cost.share)} of the throughput"
        yield (
            f"{UNEQUAL}: the slowest takes "
            f"{imbalance.slowest_over_mean:.2f} × the mean of a step{price or ''}"
        )
    elif not report.stragglers and not report.insufficient:
        yield "no straggler: no rank is slower than the others"
    if report.error is not None:
        yield (
            f"the run took {report.wall_s:.2f} s, and {report.simulated_s:.2f} s in simulated time "
            f"({report.error:+.1%}): the costs are as uncertain"
        )


def limits(each: Straggler) -> Iterator[str]:
    """Yield what has held a straggler back from outside, as far as it is known."""
    if each.throttled_s > max(0.0, THROTTLED * sum(each.excess.values())):
        yield (
            f"its cgroup's limit on processors stopped it for {each.throttled_s:.2f} s, of all "
            "processors together"
        )
    if each.gpu_reasons:
        reasons = ", ".join(
            f"{name} (in {percent(share)} of its slow steps)"
            for name, share in each.gpu_reasons.items()
        )
        yield f"its GPU lowered its clock: {reasons}"


def pattern(each: Straggler) -> str:
    """Return the pattern of a straggler in words."""
    if each.pattern == "now and then" and each.every:
        return f"every {each.every} steps"
    if each.pattern == "from a step on":
        return f"from step {each.since} on"
    if each.pattern == "growing":
        return f"growing since step {each.since}"
    if each.pattern == "in phases":
        return "in steps " + ", ".join(f"{first} to {last}" for first, last in each.phases)
    return each.pattern


def cost(found: Cost) -> str:
    """Return what something costs in words."""
    text = (
        f"{found.seconds:.2f} s: {percent(found.share)} of the throughput, a slow-down of "
        f"{found.slowdown:.2f}"
    )
    if found.explained is not None:
        text += f"; {percent(min(1.0, found.explained))} of what unequal steps cost in all"
    return text


def columns(report: Report) -> dict[str, list[str]]:
    """Return the table of the ranks, of many the slowest: by heading, one string for each rank."""
    slowest = sorted(report.ranks, key=lambda rank: -rank.ratio)[:ROWS]
    ranks = sorted(slowest, key=lambda rank: rank.rank)
    names = () if report.trace else (*PARTS, "waiting")
    recorded = [name for name in names if any(rank.seconds.get(name) for rank in ranks)]
    found = {"rank": [str(rank.rank) for rank in ranks]}
    if len({rank.node for rank in report.ranks}) > 1:
        found["node"] = [rank.node or NOTHING for rank in ranks]
    found["steps"] = [str(rank.steps) for rank in ranks]
    found["own ms"] = [f"{1000 * rank.median_s:.2f}" for rank in ranks]
    found["÷ others"] = [f"{rank.ratio:.2f}" for rank in ranks]
    for name in recorded:
        found[f"{name} ms"] = [f"{1000 * rank.seconds[name]:.2f}" for rank in ranks]
    return found


def remedy_columns(report: Report) -> dict[str, list[str]]:
    """Return the table of the best methods and the run's own: columns by heading."""
    shown = best_of(report)
    return {
        "same steps under": [each.algorithm for each in shown],
        "steps/s": [f"{each.steps_per_s:,.2f}" for each in shown],
        "bound": [f"{each.bound:,.2f}" for each in shown],
        "ratio": [f"{each.ratio:.2f}" for each in shown],
        "lost": [percent(each.loss) for each in shown],
    }


def best_of(report: Report) -> list[Remedy]:
    """Return the run's own method, and then the best others."""
    own = [each for each in report.remedies if each.algorithm == report.algorithm]
    return own + [each for each in report.remedies if each.algorithm != report.algorithm][:BEST]
