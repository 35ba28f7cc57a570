"""Tasks whose steps take unequal times by themselves: what methods gain when nothing is injected.

    python benchmarks/workloads.py --record
    python benchmarks/workloads.py --ranks 4 8 16

First, the processor time of each task's steps, alone on a core, by their work: a line. Then
trainings in simulated time, in which each step takes what its own batch costs by that line, on an
HDR network; all ranks train for the same time. The tasks are those of `wagma train`, but smaller: a
Transformer of one layer and batches of 8 sentences, PPO with 8 environments a rank, a GPT of one
layer and batches of 4 paragraphs. Each training is written when it has ended, and a later run goes
on from there. One core needs an hour for all on 4, 8 and 16 ranks, and as long for five methods on
64.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from common import figure, parser, report

from wagma.comparison import deviation_of
from wagma.simulation import MACHINES, steps, train
from wagma.tasks import control, language, translation
from wagma.tasks.contract import Task, seed_generators

METHODS = {
    "Allreduce": "allreduce",
    "local SGD": "local-sgd",
    "WAGMA": "wagma",
    "WAGMA, own pace": "wagma:pace=own",
    "eager-SGD, majority": "eager-sgd:trigger=majority",
    "P-Reduce": "partial-reduce",
    "D-PSGD": "d-psgd",
    "SGP": "sgp",
    "AD-PSGD": "ad-psgd",
}
FIRST = "Allreduce"  # which others are divided by
PUBLISHED = ("Allreduce", "D-PSGD", "SGP", "AD-PSGD")  # that the paper compares WAGMA-SGD with
RATE = 0.003  # of AdamW, as `wagma train` has it for these tasks
EVALUATIONS = 12
SHORT, SENTENCES = 24, 48  # tokens at most, and number, of the sentences of tests
EPISODES, PARAGRAPHS = 20, 24  # of tests
WARM_UP = 5  # steps
DRAWS = 4000  # of P step times each
TITLES = {"loss": "loss", "bleu": "BLEU", "return": "return"}
DIGITS = {"loss": 2, "bleu": 0, "return": 0}
UNITS = {"translation": "tokens", "control": "transitions", "language": "bytes"}
BENCHMARK = "workloads"  # in the names of the files of results
RECORDED = 1  # rank, in the name of the file of step times


class Timed(NamedTuple):
    """A part of the steps of a task, as recorded.

    Attributes:
        work: of each, in the task's unit.
        seconds: of processor time.
    """

    work: list[float]
    seconds: list[float]


@dataclass(frozen=True)
class Workload:
    """A task, and how it is trained.

    Attributes:
        task: function that returns the task.
        batch_size: of a rank.
        seconds: simulated ones, that all ranks train.
        targets: {metric: value to reach}.
        rising: metrics that rise when the model gets better.
        recorded: number of steps whose time is recorded.
        full: the task with the defaults of `wagma train`, the batch size and the number of steps
            that are recorded of that.
    """

    task: Callable[[], Task]
    batch_size: int
    seconds: float
    targets: dict[str, float]
    recorded: int
    full: tuple[Callable[[], Task], int, int]
    rising: tuple[str, ...] = ()
    settings: dict = field(default_factory=dict)


def with_test(task, test, model=None):
    """Return a task with another test, which rank 0 has, and perhaps with another model."""

    def data(rank, size, batch_size, seed):
        return task.data(rank, size, batch_size, seed)[0], [] if rank else [test]

    return task._replace(data=data, model=model or task.model)


def sentences(layers=translation.LAYERS):
    """Return the translation of generated text, tested by short sentences."""
    found = translation.read(None)
    task = translation.task(found, by_tokens=False)
    pieces = task.model().token.num_embeddings
    short = [n for n, each in enumerate(zip(*found.test)) if max(map(len, each)) <= SHORT]
    test = translation.batch_of(found.test.select(np.array(short[:SENTENCES])))
    return with_test(task, test, partial(translation.Transformer, pieces, layers))


def paragraphs(length=128, layers=language.LAYERS):
    """Return the model of the help topics' language, by paragraphs."""
    found = language.read(None, length, packing=False)
    task = language.task(found, length, "iid")
    few = np.linspace(0, len(found[1].labels) - 1, PARAGRAPHS).astype(int)
    test = language.batch_of(found[1].select(few))
    return with_test(task, test, partial(language.GPT, length, layers))


def episodes():
    """Return CartPole, played by whole episodes."""
    task = control.task(control.Settings("CartPole-v1", by_steps=False))
    return with_test(task, control.Trial("CartPole-v1", range(EPISODES)))


WORKLOADS = {
    "translation": Workload(
        partial(sentences, 1),
        batch_size=8,
        seconds=1.5,
        targets={"loss": 0.6, "bleu": 50.0},
        recorded=400,
        full=(sentences, 32, 150),
        rising=("bleu",),
    ),
    "control": Workload(
        episodes,
        batch_size=8,
        seconds=0.5,
        targets={"return": 400.0},
        recorded=16 * 40,
        full=(episodes, 32, 16 * 20),
        rising=("return",),
    ),
    "language": Workload(
        partial(paragraphs, 512, 1),
        batch_size=4,
        seconds=0.7,
        targets={"loss": 3.0},
        recorded=300,
        full=(paragraphs, 32, 100),
    ),
}


# Step times


def record(task, batch_size, count):
    """Train alone, with one thread, and return what was recorded: {part of a step: `Timed`}.

    The parts are "step", and where episodes are played "rollout", which is no part of the former.

    Args:
        task: what to train.
        batch_size: of the rank.
        count: number of steps.
    """
    seed_generators(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    batches = iter(task.data(0, 1, batch_size, 0)[0])
    found = {"step": Timed([], [])}
    for number in range(-WARM_UP, count):
        batch = next(batches)
        began = time.thread_time()
        if isinstance(batch, control.Minibatch):
            batch.transitions(model)
            if batch.played and number >= 0:
                rollouts = found.setdefault("rollout", Timed([], []))
                rollouts.work.append(batch.played)
                rollouts.seconds.append(time.thread_time() - began)
            began = time.thread_time()
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        if number >= 0:
            found["step"].seconds.append(time.thread_time() - began)
            found["step"].work.append(float(task.work(batch)))
    return found


def described(timed):
    """Return the line through recorded times, and their distribution.

    Args:
        timed: a `Timed`.

    Returns:
        "base_s" and "per_work_s": the line, which has the least squares of relative residuals;
        "residual": the root of their mean; "correlation" of times and work; "median_s" and
        "mean_s"; "p90", "most": quantiles ÷ the median; "slowest": by the number of ranks, the
        mean of the slowest one's time ÷ the mean.
    """
    work, seconds = map(np.array, timed)
    slope, base = np.polyfit(work, seconds, 1, w=1 / seconds)
    residuals = (base + slope * work) / seconds - 1
    median, mean = np.median(seconds), seconds.mean()
    generator = np.random.default_rng(0)
    slowest = {
        str(ranks): generator.choice(seconds, (DRAWS, ranks)).max(axis=1).mean() / mean
        for ranks in (4, 8, 16, 64)
    }
    return {
        "count": len(seconds),
        "base_s": float(base),
        "per_work_s": float(slope),
        "residual": float(np.sqrt((residuals**2).mean())),
        "correlation": float(np.corrcoef(work, seconds)[0, 1]),
        "median_s": float(median),
        "mean_s": float(mean),
        "median_work": float(np.median(work)),
        "p90": float(np.quantile(seconds, 0.9) / median),
        "most": float(seconds.max() / median),
        "slowest": {ranks: float(value) for ranks, value in slowest.items()},
        "work": [float(each) for each in work],
        "seconds": [float(f"{each:.4g}") for each in seconds],
    }


def record_all(arguments):
    """Record the step times of these tasks, small and as by default; write them."""
    found = read(arguments, RECORDED)
    for name in arguments.tasks:
        of = WORKLOADS[name]
        made = {"trained": (of.task, of.batch_size, of.recorded), "default": of.full}
        found[name] = {
            size: {
                part: described(timed) for part, timed in record(make(), batch_size, count).items()
            }
            for size, (make, batch_size, count) in made.items()
        }
    print(table_of_times(found))
    report(arguments, BENCHMARK, RECORDED, found)


def table_of_times(found):
    """Return the table of recorded times, of Markdown."""
    head = (
        "|  | a step, ms | by | residual | correlation | median, ms | 90 % ÷ median | "
        "longest ÷ median | slowest of 16 ÷ mean |"
    )
    lines = [head, "|---" * 9 + "|"]
    for name, sizes in found.items():
        for size, parts in sizes.items():
            for part, of in parts.items():
                label = f"{name}, {size}" + (f": {part}" if len(parts) > 1 else "")
                line = f"{1e3 * of['base_s']:.2f} + {1e3 * of['per_work_s']:.4f} n"
                cells = [
                    f"{100 * of['residual']:.0f} %",
                    f"{of['correlation']:.2f}",
                    f"{1e3 * of['median_s']:.1f}",
                    f"{of['p90']:.2f}",
                    f"{of['most']:.1f}",
                    f"{of['slowest']['16']:.2f}",
                ]
                unit = UNITS[name]
                lines.append(f"| {label} | {line} | {unit} | {' | '.join(cells)} |")
    return "\n".join(lines)


# Trainings


@functools.cache
def prepared(name, lines):
    """Return a workload's task, whose work is in seconds, and the seconds of a step without work.

    Args:
        name: the workload's.
        lines: of its recorded parts: ((part, seconds without work, seconds for each of it), …).
    """
    task = WORKLOADS[name].task()
    by_part = {part: line for part, *line in lines}
    base, per_work = by_part["step"]

    def seconds_of(batch):
        seconds = per_work * task.work(batch)
        if getattr(batch, "played", 0):
            without, each = by_part["rollout"]
            seconds += without + each * batch.played
        return seconds

    return task._replace(work=seconds_of, unit="seconds"), base


def train_one(name, lines, ranks, method, seed):
    """Train in simulated time; return its figures and its evaluations."""
    of = WORKLOADS[name]
    task, base = prepared(name, lines)
    began = time.process_time()
    learned = train(
        task,
        METHODS[method],
        steps.constant(math.ceil(of.seconds / base) + 1, ranks, base),
        MACHINES["hdr"],
        seconds=of.seconds,
        seconds_per_work=1.0,
        batch_size=of.batch_size,
        optimizer="adamw",
        lr=RATE,
        seed=seed,
        evaluate_every_seconds=of.seconds / EVALUATIONS,
    ).summary
    return {
        "samples_per_s": learned["samples_per_s"],
        "steps": statistics.mean(learned["steps_of_rank"]),
        "computing": 1 - learned["waiting_share"],
        "seconds": [each["elapsed_s"] for each in learned["evaluations"]],
        **{
            name: [float(f"{each[name]:.5g}") for each in learned["evaluations"]]
            for name in of.targets
        },
        "took_s": round(time.process_time() - began, 1),
    }


def read(arguments, ranks, benchmark=BENCHMARK):
    """Return the results that former runs have written, an empty dict without any."""
    path = arguments.results / f"{benchmark}-{ranks}.json"
    return json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}


def train_all(arguments):
    """Make the trainings that are missing, and write each one's results."""
    recorded = read(arguments, RECORDED)
    for name in arguments.tasks:
        lines = tuple(
            (part, of["base_s"], of["per_work_s"]) for part, of in recorded[name]["trained"].items()
        )
        settings = settings_of(name, lines)
        for seed in range(arguments.seeds):
            for ranks in arguments.ranks:
                for method in missing(arguments, ranks, name, settings, seed):
                    run = train_one(name, lines, ranks, method, seed)
                    took = f"{run['took_s']} s"
                    print(f"{name}, {ranks} ranks, {method}, seed {seed}: {took}", flush=True)
                    add(arguments, ranks, name, settings, seed, {method: run})


def missing(arguments, ranks, name, settings, seed, benchmark=BENCHMARK):
    """Return the methods whose training with these settings is not written.

    Args:
        arguments: the benchmark's, with all methods.
        ranks, name, seed: the number of ranks, the workload's name, and the seed.
        settings: what its trainings depend on, as JSON has it.
        benchmark: the name of the file of results.
    """
    of = read(arguments, ranks, benchmark).get(name, {})
    runs = of["runs"] if of.get("settings") == settings else {}
    return [each for each in arguments.methods if str(seed) not in runs.get(each, {})]


def add(arguments, ranks, name, settings, seed, made, benchmark=BENCHMARK):
    """Write the results of trainings beside those of others, unless these had other settings.

    Args:
        arguments, ranks, name, settings, seed, benchmark: those of `missing`.
        made: {method: its figures}.
    """
    results = read(arguments, ranks, benchmark)
    if results.get(name, {}).get("settings") != settings:
        results[name] = {"settings": settings, "runs": {}}
    runs = results[name]["runs"]
    for method, run in made.items():
        runs.setdefault(method, {})[str(seed)] = run
    results[name]["runs"] = {label: runs[label] for label in METHODS if label in runs}
    in_order = {each: results[each] for each in WORKLOADS if each in results}
    report(arguments, benchmark, ranks, in_order, figures=figures_of(in_order, ranks))


def settings_of(name, lines):
    """Return what a workload's trainings depend on, as JSON has it."""
    of = WORKLOADS[name]
    return {
        "batch_size": of.batch_size,
        "seconds": of.seconds,
        "lines": [list(each) for each in lines],
    }


# Figures and tables


def time_to(run, metric, target, rising):
    """Return when a metric reached a value in two evaluations in a row, or in the last one.

    It is interpolated between the first of these and the one before; inf if never.
    """
    sign = 1 if rising else -1
    values = [sign * (each - target) for each in run[metric]]
    for place, (at, value) in enumerate(zip(run["seconds"], values)):
        if min(values[place : place + 2]) >= 0:
            if place == 0:
                return at
            before, former = run["seconds"][place - 1], values[place - 1]
            return at - (at - before) * value / (value - former)
    return math.inf


def summary_of(name, runs, first):
    """Return a method's figures over its seeds, each with the first method's of the same seed."""
    of = WORKLOADS[name]
    seeds = [seed for seed in runs if seed in first]
    ratios = [runs[seed]["samples_per_s"] / first[seed]["samples_per_s"] for seed in seeds]
    times, faster = {}, {}
    for metric, target in of.targets.items():
        mine, its = (
            [time_to(each[seed], metric, target, metric in of.rising) for seed in seeds]
            for each in (runs, first)
        )
        times[metric] = mine
        faster[metric] = [a / b if math.isfinite(b) else 0.0 for a, b in zip(its, mine)]
    return {
        "seeds": len(seeds),
        "throughput": ratios,
        "computing": [runs[seed]["computing"] for seed in seeds],
        "times": times,
        "first": max(runs[seed]["seconds"][0] for seed in seeds) if seeds else math.nan,
        "faster": faster,
        "last": {metric: [runs[seed][metric][-1] for seed in seeds] for metric in of.targets},
    }


def summaries(name, results):
    """Return every method's `summary_of` with one workload."""
    runs = results[name]["runs"]
    found = {each: summary_of(name, runs[each], runs.get(FIRST, {})) for each in runs}
    return {each: of for each, of in found.items() if of["seeds"]}


def figures_of(results, ranks):
    """Return the figures that the paper has of such a workload, with its value as the bound."""
    figures = []
    for name, metric, at, faster in (
        ("translation", "bleu", 16, ()),
        ("translation", None, 64, ("AD-PSGD",)),
        ("control", "return", 16, ("AD-PSGD",)),
    ):
        if ranks != at or name not in results:
            continue
        found = summaries(name, results)
        if not {"WAGMA", *PUBLISHED} <= found.keys():
            continue
        wagma, others = found["WAGMA"], [found[each] for each in PUBLISHED]
        slower = [found[each] for each in PUBLISHED if each not in faster]
        best = max(statistics.median(each["throughput"]) for each in slower)
        than = f"the best other{' but AD-PSGD' if faster else ''}"
        ratio = best / statistics.median(wagma["throughput"])
        figures.append(figure(f"{name}: throughput, {than} ÷ WAGMA", ratio, 1.0))
        if metric is None:
            continue
        best = max(statistics.mean(each["last"][metric]) for each in others)
        least = best / statistics.mean(wagma["last"][metric])
        figures.append(figure(f"{name}: {metric} at the end, the best other ÷ WAGMA", least, 1.0))
    return figures


def table(name, ranks, results):
    """Return the table of a workload on so many ranks, of Markdown."""
    targets, found = WORKLOADS[name].targets, summaries(name, results)
    seeds = max(each["seeds"] for each in found.values())
    head = [f"{ranks} ranks, {seeds} seed{'s' if seeds > 1 else ''}", "throughput, ÷", "computing"]
    for metric, target in targets.items():
        head += [f"s to {TITLES[metric]} {target:g}", "÷"]
    head += [f"{TITLES[metric]} at the end" for metric in targets]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for method, each in found.items():
        cells = [
            method if each["seeds"] == seeds else f"{method} ({each['seeds']} of {seeds})",
            spread(each["throughput"], 2),
            f"{100 * statistics.median(each['computing']):.0f} %",
        ]
        for metric in targets:
            cells += cells_of_times(each["times"][metric], each["faster"][metric], each["first"])
        cells += [spread(each["last"][metric], DIGITS[metric]) for metric in targets]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cells_of_times(times, faster, first):
    """Return the median time to a target, and of how many times as fast as the first that is.

    The deviation is that of the seeds that reached it.

    Args:
        times: of the seeds, inf where the target was not reached.
        faster: the first method's time with the same seed ÷ each, 0 where it was not reached.
        first: time of the first evaluation, before which nothing is known.
    """
    middle, reached = statistics.median(times), [each for each in times if math.isfinite(each)]
    few = "" if len(reached) == len(times) else f" ({len(reached)} of {len(times)})"
    if not math.isfinite(middle):
        return [f"–{few}", "–"]
    deviation = f" ± {statistics.stdev(reached):.2f}" if len(reached) > 1 else ""
    ratio = statistics.median(faster)
    most = "≤ " if middle <= first else ""
    return [f"{most}{middle:.2f}{deviation}{few}", f"{ratio:.2f}" if 0 < ratio < math.inf else "–"]


def spread(values, digits):
    """Return "median ± standard deviation", without the latter of one value."""
    text = f"{statistics.median(values):.{digits}f}"
    deviation = deviation_of(values)
    return text if deviation is None else f"{text} ± {deviation:.{digits}f}"


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--record", action="store_true", help="record the step times")
    arguments.add_argument("--tasks", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    arguments.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = arguments.parse_args()
    torch.set_num_threads(1)
    if arguments.record:
        record_all(arguments)
        return
    train_all(arguments)
    for ranks in arguments.ranks:
        results = read(arguments, ranks)
        for name in arguments.tasks:
            print(f"\n{name}\n\n{table(name, ranks, results)}")


if __name__ == "__main__":
    main()
