"""Host memory that a collective takes beside the user's vector, per rank.

    mpiexec -n 4 python benchmarks/memory.py

A vector of 64 MiB of float32, all ranks in one group; calls of every kind: timely, late on each
rank in turn, started and waited for, published, synchronized, average(). Counted is the
proportional set size (PSS of /proc/self/smaps_rollup): a rank's private pages, and of pages that
it shares with others its part, so that the ranks' sum is what they take together. That includes
whatever MPI allocates meanwhile. The largest of what is seen after each call and, every 20 ms,
during calls; of the rank that has most. Bound: 3 × the vector.
"""

import contextlib
import threading
import time

import numpy as np
from common import TRANSPORTS, figure, parser, quartiles, report
from mpi4py import MPI

from collectives import GroupAllreduce

BOUND = 3.0
RULES = ("paper", "conserving")
LATENESS = 0.2  # seconds


def proportional_set_size():
    """Bytes of this process's memory, shared pages divided by the number of those that share."""
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


class Peak:
    """The largest set size that is seen while the context lasts."""

    def __enter__(self):
        self.value = proportional_set_size()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.ended.wait(0.02):
            self.value = max(self.value, proportional_set_size())

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()
        self.value = max(self.value, proportional_set_size())


def late(comm, average, vector):
    """Be late in turn."""
    for rank in range(comm.size):
        comm.Barrier()
        if rank == comm.rank:
            time.sleep(LATENESS)
        average(vector)


KINDS = {
    "timely": lambda comm, average, vector: average(vector),
    "late": late,
    "started": lambda comm, average, vector: average.start(vector).wait(),
    "published": lambda comm, average, vector: average.publish(vector),
    "synchronized": lambda comm, average, vector: average.synchronize(vector),
    "average()": lambda comm, average, vector: average.average(vector),
}


def measure(comm, vector, **settings):
    """Return {kind of call: bytes beside the vector, of the rank that has most}."""
    comm.Barrier()
    before = proportional_set_size()
    comm.Barrier()
    seen = {}
    with contextlib.ExitStack() as stack:
        with Peak() as peak:
            average = stack.enter_context(
                GroupAllreduce(comm, vector, group_size=comm.size, sync_period=10**9, **settings)
            )
        seen["constructed"] = peak.value - before
        for kind, call in KINDS.items():
            comm.Barrier()
            with Peak() as peak:
                call(comm, average, vector)
            seen[kind] = peak.value - before
    return {kind: comm.allreduce(value, op=MPI.MAX) for kind, value in seen.items()}


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--mib", type=int, default=64)
    arguments = arguments.parse_args()
    comm = MPI.COMM_WORLD
    vector = np.full(arguments.mib << 18, comm.rank, np.float32)
    results = {
        f"{name}, {rule}": measure(comm, vector, late=rule, **transport)
        for name, transport in TRANSPORTS.items()
        for rule in RULES
    }
    if comm.rank:
        return
    print(f"# {comm.size} ranks, memory beside a vector of {arguments.mib} MiB, in vectors")
    kinds = ["constructed", *KINDS]
    print(f"{'#':22}" + "".join(f"{kind:>13}" for kind in kinds))
    found = {}
    for name, seen in results.items():
        results[name] = {kind: value / vector.nbytes for kind, value in seen.items()}
        print(f"{name:22}" + "".join(f"{results[name][kind]:13.2f}" for kind in kinds))
        found[f"{name}: memory ÷ vector"] = quartiles([max(results[name].values())])
    figures = [figure(name, value, BOUND) for name, value in found.items()]
    report(arguments, "memory", comm.size, results, ratios=found, figures=figures)


if __name__ == "__main__":
    main()
