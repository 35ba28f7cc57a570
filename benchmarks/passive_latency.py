"""Passive latency: from one rank's call to its result, while all others compute in pure Python.

    mpiexec -n 2 python benchmarks/passive_latency.py

Rank 0 starts versions of 4 KiB at a regular cadence of 10 ms, or at random intervals of that mean;
the other ranks' main threads spin in Python and never call. By messages their progress threads take
part; in shared memory rank 0 needs no other rank. For comparison, the same exchange is served by a
progress thread written in Python. Bounds: with two ranks a median of 100 µs at the regular cadence
and a tenth of the Python thread's; with four ranks 5 ms. Versions of 1.2 MB follow at the regular
cadence; bounds in shared memory: 150 µs with two ranks, 250 µs with four. Beside these, what does
not depend on the engine: the same versions one after the other at once, which find their vectors in
the caches, and a memcpy of 1.2 MB by rank 0 at both intervals.
"""

import functools
import itertools
import random
import statistics
import threading
import time

import numpy as np
from common import TRANSPORTS, figure, parser, ratio, report
from mpi4py import MPI

from collectives import GroupAllreduce

CADENCE = 0.010
BOUNDS = {2: 100, 4: 5000}  # µs
GAIN_BOUND = 0.1
LONG = 300_000  # float32 elements, 1.2 MB
LONG_BOUNDS = {2: 150, 4: 250}  # µs
OURS = {
    "messages": {**TRANSPORTS["messages"], "engine": "adaptive"},
    "messages, dedicated": {**TRANSPORTS["messages"], "engine": "dedicated"},
    "shared": {**TRANSPORTS["shared"], "engine": "adaptive"},
}


class PythonThread:
    """The same collective for one activator, served by a thread that needs the GIL."""

    ACTIVATE, DATA = 1, 2

    def __init__(self, comm, vector):
        self.comm = comm.Dup()
        self.vector = vector
        self.incoming = np.empty_like(vector)
        self.stop = False
        if comm.rank:
            self.thread = threading.Thread(target=self.serve, daemon=True)
            self.thread.start()

    def serve(self):
        status = np.zeros(1, np.int64)
        request = self.comm.Irecv(status, 0, self.ACTIVATE)
        while not self.stop:
            if not request.Test():
                time.sleep(50e-6)
                continue
            if status[0] < 0:
                return
            self.average()
            request = self.comm.Irecv(status, 0, self.ACTIVATE)

    def average(self):
        phase = 1
        total = self.vector.copy()
        while phase < self.comm.size:
            peer = self.comm.rank ^ phase
            self.comm.Sendrecv(total, peer, self.DATA, self.incoming, peer, self.DATA)
            total += self.incoming
            phase *= 2
        total /= self.comm.size

    def __call__(self, version=0):
        word = np.array([version], np.int64)
        for rank in range(1, self.comm.size):
            self.comm.Send(word, rank, self.ACTIVATE)
        if version >= 0:
            self.average()

    def close(self):
        if self.comm.rank == 0:
            self(-1)
        else:
            self.thread.join()
        self.comm.Free()


def measure(comm, call, versions, regular, seconds, cadence=CADENCE):
    """Call on rank 0 at the cadence and return the latencies; spin in Python on the others."""
    comm.Barrier()
    latencies = []
    end = time.perf_counter() + seconds
    if comm.rank:
        while time.perf_counter() < end:
            pass
        return latencies
    chance = random.Random(0)
    tick = time.perf_counter()
    for _ in range(versions):
        tick += cadence if regular else chance.expovariate(1 / cadence)
        if cadence:
            time.sleep(max(0.0, tick - time.perf_counter()))
        begin = time.perf_counter()
        call()
        latencies.append(time.perf_counter() - begin)
    return latencies


def measure_ours(comm, vector, settings, regular, versions, seconds, cadence=CADENCE):
    with GroupAllreduce(
        comm, vector, group_size=comm.size, sync_period=10**9, **settings
    ) as average:
        own = vector.copy()
        return measure(comm, lambda: average(own), versions, regular, seconds, cadence)


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--versions", type=int, default=200)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments = arguments.parse_args()
    comm = MPI.COMM_WORLD
    vector = np.full(1024, float(comm.rank), np.float32)
    long = np.full(LONG, float(comm.rank), np.float32)
    seconds = 1.5 * arguments.versions * CADENCE
    latencies = {}  # a list of each round
    for _ in range(arguments.rounds):
        for name, settings in OURS.items():
            for regular in (True, False):
                latencies.setdefault(f"{name}, {'regular' if regular else 'random'}", []).append(
                    measure_ours(comm, vector, settings, regular, arguments.versions, seconds)
                )
        for intervals, cadence in (("regular", CADENCE), ("at once", 0.0)):
            timing = {"versions": arguments.versions, "regular": True, "seconds": seconds}
            timing["cadence"] = cadence
            for name in TRANSPORTS:
                latencies.setdefault(f"{name}, 1.2 MB, {intervals}", []).append(
                    measure_ours(comm, long, OURS[name], **timing)
                )
            other = np.empty_like(long)
            latencies.setdefault(f"memcpy, 1.2 MB, {intervals}", []).append(
                measure(comm, functools.partial(np.copyto, other, long), **timing)
            )
        python = PythonThread(comm, vector)
        latencies.setdefault("Python thread, regular", []).append(
            measure(comm, python, arguments.versions // 2, True, seconds)
        )
        python.close()
    if comm.rank:
        return
    print(f"# {comm.size} ranks, 4 KiB, {arguments.rounds} rounds of {arguments.versions} versions")
    print(f"{'# transport, intervals':28} {'median':>10} {'p95':>10} {'max':>10}")
    results, medians = {}, {}
    for name, rounds in latencies.items():
        medians[name] = [statistics.median(values) for values in rounds]
        values = sorted(itertools.chain.from_iterable(rounds))
        results[name] = {
            "median": statistics.median(values),
            "p95": values[int(0.95 * len(values))],
            "max": values[-1],
        }
        print(f"{name:28} " + " ".join(f"{1e6 * x:7.0f} µs" for x in results[name].values()))
    gains, figures = {}, []
    for name in TRANSPORTS:
        gain = f"{name} ÷ Python thread"
        gains[gain] = ratio(medians[f"{name}, regular"], medians["Python thread, regular"])
        figures.append(figure(gain, gains[gain], GAIN_BOUND))
        if comm.size in BOUNDS:
            median = 1e6 * results[f"{name}, regular"]["median"]
            figures.append(figure(f"median of {name}, regular in µs", median, BOUNDS[comm.size]))
    if comm.size in LONG_BOUNDS:
        median = 1e6 * results["shared, 1.2 MB, regular"]["median"]
        figures.append(figure("median of shared, 1.2 MB, in µs", median, LONG_BOUNDS[comm.size]))
    report(arguments, "passive-latency", comm.size, results, ratios=gains, figures=figures)


if __name__ == "__main__":
    main()
