"""WP-SGD in wall time: methods on ranks of which one is slow, the inner loop, memory.

    mpiexec -n 4 python benchmarks/wp_sgd_wall.py

Methods: seconds until the objective on 1,000 test samples is below 1, with the paper's settings for
real-sim (section 6.6) on data generated in its shape; rank 1 has half of the speed. Ranks sleep so
that a sample takes 10 µs, as in modelled time, which is shown for comparison: ranks then wait for
each other and not for processors. "as fast as it goes" is without that. Methods take turns in every
round, each of which has its own seed; medians of the rounds. Of minibatch, which makes the modelled
steps, 500 are measured. r is fitted by a probe.

Inner loop: ns per non-zero of passes over 5,000 rows of real-sim's shape on rank 0, the others
asleep, beside scikit-learn's SGDClassifier, and the same step in numpy and with scipy's rows. The
passes take turns; the median, and the minimum, which other load on the machine affects least.

Memory: a node's memory beside the model, w itself, and the samples, in vectors of as many features,
each method's largest; PSS, of the rank with the most.
"""

import functools
import statistics
import time

import numpy as np
from common import parser, report
from memory import Peak, proportional_set_size
from mpi4py import MPI
from sklearn.linear_model import SGDClassifier

from wagma.job import meet
from wagma.simulation import MACHINES
from wagma.svm import share_out
from wagma.wpsgd import fit_contraction
from wagma.wpsgd.files import split
from wagma.wpsgd.methods import METHODS, PRESETS, STEP, TEST_SAMPLES
from wagma.wpsgd.modelled import SAMPLE_SECONDS, Modelled
from wagma.wpsgd.ranks import Ranks
from wagma.wpsgd.samples import generate
from wagma.wpsgd.steps import Steps
from wagma.wpsgd.training import Problem, run
from wagma.wpsgd.workers import Workers

REAL_SIM = PRESETS["real-sim"]
NEAR = 1.0
MOST = 150_000  # samples
EVERY = 2500
SLOW, FACTOR = 1, 2.0
ROWS = 5000  # per pass
NUMPY_ROWS = 500
STEPS = 500  # measured steps of minibatch: one takes long on many ranks and few processors
FEATURES = 4 << 20  # of the measurement of memory


def problem(train, test, rate=None):
    preset = REAL_SIM
    return Problem(train, test, preset.start, preset.lr, preset.l2, rate, preset.span)


def seconds_until_near(method, team, comm=None):
    """Return when a team's objective is below NEAR, None if never; collective on ranks."""
    for point in run(method, team, REAL_SIM.span, MOST, EVERY):
        near = point.objective < NEAR
        if comm.bcast(near) if comm else near:
            return point.seconds
    return None


def on_ranks(comm, name, everything, rate, seed, sample_seconds, samples):
    """Return the seconds of a run on the ranks, and the counts of its updates."""
    method = METHODS[name]
    shard = share_out(everything, seed, comm)
    train = everything[0] if method.alone and comm.rank == 0 else shard
    given = problem(train, everything[1] if everything else train, rate)
    slow = comm.rank == SLOW and not method.alone
    team = Ranks(
        method,
        given,
        comm,
        factor=FACTOR if slow else 1.0,
        sample_seconds=sample_seconds,
        seed=seed,
        trains=not method.alone or comm.rank == 0,
    )
    if method.averages == STEP:
        team.advance_together(STEPS)
        found = team.seconds / STEPS * samples
    else:
        found = seconds_until_near(method, team, comm)
    updates = team.updates()
    team.close()
    return comm.bcast(found), updates


def modelled(comm, name, everything, rate, seed):
    """Return the seconds of a run in modelled time, and its samples."""
    speeds = [1 / FACTOR if rank == SLOW else 1.0 for rank in range(comm.size)]
    given = problem(*everything, rate)
    team = Modelled(METHODS[name], given, speeds, MACHINES["10gbe"], seed=seed)
    return seconds_until_near(METHODS[name], team), max(node.consumed for node in team.nodes)


def methods(comm, everything, arguments, results):
    """Let all methods take turns in rounds, and print the medians as docs/wp-sgd.md has them."""
    rate = None
    if comm.rank == 0:
        rate = results["r"] = fit_contraction(problem(*everything), MOST).rate
    rate = comm.bcast(rate)
    columns = {"modelled": [], "ranks": [], "as fast as it goes": []}
    found = {name: {column: [] for column in columns} for name in METHODS}
    late = {}
    for seed in range(arguments.rounds):
        for name in METHODS:
            samples = None
            if comm.rank == 0:
                seconds, samples = modelled(comm, name, everything, rate, seed)
                found[name]["modelled"].append(seconds)
            meet(comm)
            samples = comm.bcast(samples)
            for column, least in (("ranks", SAMPLE_SECONDS), ("as fast as it goes", 0.0)):
                seconds, updates = on_ranks(comm, name, everything, rate, seed, least, samples)
                found[name][column].append(seconds)
                if METHODS[name].delayed:
                    late.setdefault(f"{name}, {column}", []).append(updates)
    if comm.rank:
        return {}
    print(
        f"# {comm.size} ranks, rank {SLOW} at {1 / FACTOR:g}: seconds to an objective of {NEAR:g}"
    )
    print(f"| | {' | '.join(columns)} |\n{'|---' * (1 + len(columns))}|")
    for name, of in found.items():
        row = {column: median(values) for column, values in of.items()}
        results[name] = {"seconds": of, "medians": row}
        print(f"| `{name}` | {' | '.join(map(shown, row.values()))} |", flush=True)
    print("# updates by how many others were applied between their pull and push")
    for label, runs in late.items():
        total = sum(runs[1:], runs[0])
        shares = total.late / total.late.sum()
        results[f"late: {label}"] = {"counts": total.late.tolist(), "longest": total.longest}
        print(f"{label:<30} 0: {shares[0]:.1%}  1: {shares[1]:.1%}  2: {shares[2]:.1%}  "
              f"more: {shares[3:].sum():.1%}  longest: {total.longest:,}")  # fmt: skip
    wp, others = found["wp"], ("simuparallel", "minibatch")
    return {
        f"wp ÷ {other}, {column}": ratios(wp[column], found[other][column])
        for column in list(columns)[1:]
        for other in others
    }


def median(values):
    return None if None in values else statistics.median(values)


def ratios(numerators, denominators):
    values = [a / b for a, b in zip(numerators, denominators) if a and b]
    return {"low": min(values), "median": statistics.median(values), "high": max(values)}


def shown(value):
    return "–" if value is None else f"{value:.3g}"


def numpy_steps(samples, rows, w, scale=1.0):
    """Make the same step with numpy, on slices of a row."""
    shrink = 1 - REAL_SIM.lr * REAL_SIM.l2
    indptr, indices, data = samples.indptr, samples.indices, samples.data
    for row in rows:
        part = slice(indptr[row], indptr[row + 1])
        columns, x, y = indices[part], data[part], samples.labels[row]
        margin = y * scale * (x @ w[columns])
        scale *= shrink
        if margin < 1:
            w[columns] += REAL_SIM.lr * y / scale * x


def scipy_steps(samples, matrix, rows, w, scale=1.0):
    """Make the same step with scipy's matrix of one row."""
    shrink = 1 - REAL_SIM.lr * REAL_SIM.l2
    for row in rows:
        x, y = matrix[row], samples.labels[row]
        margin = y * scale * (x @ w)[0]
        scale *= shrink
        if margin < 1:
            w[x.indices] += REAL_SIM.lr * y / scale * x.data


def inner_loop(samples, arguments, results):
    """Measure passes, which take turns; return the ratios to scikit-learn's."""
    rows = np.random.default_rng(0).permutation(len(samples))[:ROWS]
    few, part = rows[:NUMPY_ROWS], samples.take(rows)
    start = np.full(samples.features, REAL_SIM.start)
    matrix = samples.matrix
    make = functools.partial(Steps, samples, start, REAL_SIM.lr, REAL_SIM.l2)
    alone, turns, together = make(), make(workers=2), make(workers=2)
    threads = Workers(together)
    learner = SGDClassifier(alpha=REAL_SIM.l2, learning_rate="constant", eta0=REAL_SIM.lr,
                            fit_intercept=False)  # fmt: skip
    classes = np.array([-1.0, 1.0])
    # The number of rows, and the function that consumes them.
    variants = {
        "native": (rows, lambda: alone.advance(rows)),
        "native, Check": (rows, functools.partial(make(workers=2, check=True).advance, rows)),
        "native, 2 workers take turns": (rows, lambda: turns.advance(rows)),
        "native, 2 threads": (rows, lambda: threads.consume(rows)),
        "SGDClassifier.partial_fit": (
            rows, lambda: learner.partial_fit(part.matrix, part.labels, classes)),
        "numpy": (few, lambda: numpy_steps(samples, few, start.copy())),
        "scipy": (few, lambda: scipy_steps(samples, matrix, few, start.copy())),
    }  # fmt: skip
    lengths = np.diff(samples.indptr)

    def timed(name):
        consumed, make_pass = variants[name]
        make_pass()  # brings the rows into the cache, for each variant alike
        began = time.perf_counter()
        make_pass()
        return (time.perf_counter() - began) / lengths[consumed].sum() * 1e9

    times = {name: [] for name in variants}
    for _ in range(arguments.passes + 1):
        for name in variants:
            times[name].append(timed(name))
    threads.close()
    print(
        f"# ns per non-zero, of rows that have {lengths.mean():.1f}\n{'#':<30}    median     least"
    )
    for name, values in times.items():
        value = statistics.median(values[1:]), min(values[1:])
        results[f"ns per non-zero: {name}"] = dict(zip(("median", "least"), value))
        print(f"{name:<30}{value[0]:10.2f}{value[1]:10.2f}", flush=True)
    sklearn = times["SGDClassifier.partial_fit"][1:]
    return {
        f"{name} ÷ SGDClassifier.partial_fit": ratios(times[name][1:], sklearn)
        for name in ("native", "native, 2 threads")
    }


def memory(comm, results):
    """Measure a node's memory beside its model."""
    Ranks(METHODS["wp"], problem(*2 * [generate(20, 20, 2, 0)]), comm).close()  # MPI's memory
    samples = generate(2000, FEATURES, 20, comm.rank)
    given, found = problem(samples, samples), {}
    vector = 8 * FEATURES
    for name, method in METHODS.items():
        meet(comm)
        before = proportional_set_size()
        with Peak() as peak:
            team = Ranks(method, given, comm, trains=not method.alone or comm.rank == 0)
            for _ in run(method, team, 200, 20 if method.averages == STEP else 2000, 1000):
                pass
            team.model()
            meet(comm)  # while a rank has closed, the others' part of shared pages is larger
        team.close()
        del team
        taken = (peak.value - before) / vector - 1
        found[name] = comm.allreduce(taken, op=MPI.MAX)
    if comm.rank == 0:
        print(f"# memory beside the model of {vector >> 20} MiB, in vectors, of the rank with most")
        for name, value in found.items():
            results[f"vectors: {name}"] = value
            print(f"{name:<14}{value:10.2f}", flush=True)


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--passes", type=int, default=25)
    arguments = arguments.parse_args()
    comm = MPI.COMM_WORLD
    results, everything = {}, []
    memory(comm, results)
    if comm.rank == 0:
        everything = split(generate(REAL_SIM.rows + TEST_SAMPLES, REAL_SIM.features,
                                    REAL_SIM.nonzeros, 0), 0)  # fmt: skip
        found = inner_loop(everything[0], arguments, results)
    meet(comm)
    wall = methods(comm, everything, arguments, results)
    if comm.rank == 0:
        report(arguments, "wp-sgd-wall", comm.size, results, ratios={**wall, **found})


if __name__ == "__main__":
    main()
