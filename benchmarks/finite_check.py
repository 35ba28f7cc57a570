"""What the check that a vector is finite costs, and what a check of the mean would cost instead.

    mpiexec -n 2 python benchmarks/finite_check.py

The engine reads a vector once before an average overwrites it, to leave it out if it is not finite.
The mean itself could tell, as Inf and NaN propagate, but then the vectors must be restored: in a
window each rank would save what it overwrites in its slice of all of them ("undo"); an array
elsewhere would be copied before the first block of the mean is returned ("copy"). Either takes
memory for one more vector. The passes are the engine's kernels on float32, in memory that all ranks
map, and take turns; each rank has just written its vector, as after a step. Between them ranks
would wait for each other equally often either way, which is left out.
"""

import ctypes
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from common import machine, parser, ratio, report, take_turns
from mpi4py import MPI

SOURCE = Path(__file__).with_suffix(".c")
KERNELS = SOURCE.parent.parent / "collectives" / "memory"
SIZES = {"256 KiB": 1 << 18, "16 MiB": 1 << 24, "100 MB": 100_000_000}
REFERENCE = "check + average"


def library(folder):
    """Compile the passes, with the engine's options."""
    path = Path(folder) / "passes.so"
    options = ["-O3", "-ffp-contract=off", "-fno-trapping-math", "-shared", "-fPIC"]
    command = [shutil.which("cc") or "gcc", *options, f"-I{KERNELS}", "-o", path, SOURCE]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(path))


def shared(comm, count):
    """Return a window, and each rank's vector in it."""
    window = MPI.Win.Allocate_shared(4 * count, 4, comm=comm)
    buffers = [window.Shared_query(rank)[0] for rank in range(comm.size)]
    return window, [np.frombuffer(buffer, np.float32, count) for buffer in buffers]


class Passes:
    """The passes over vectors of one size.

    Args:
        functions: the library.
        vectors, saved: each rank's.
    """

    def __init__(self, comm, functions, vectors, saved):
        self.comm, self.own, self.copied = comm, vectors[comm.rank], saved[comm.rank]
        self.count = ctypes.c_ssize_t(self.own.size)
        first, end = (self.own.size * k // comm.size for k in (comm.rank, comm.rank + 1))
        pointers = ctypes.c_void_p * comm.size
        shares = (ctypes.c_double * comm.size)(*[1 / comm.size] * comm.size)
        slice_ = shares, comm.size, ctypes.c_ssize_t(first), ctypes.c_ssize_t(end - first)
        every = pointers(*[vector.ctypes.data for vector in vectors])
        old = pointers(*[vector.ctypes.data for vector in saved])
        self.average = partial(functions.average, every, *slice_)
        self.undo = partial(functions.average_and_save, every, old, *slice_)
        self.check = partial(functions.check, self.address(self.own), self.count)
        self.copy = partial(
            functions.copy, self.address(self.copied), self.address(self.own), self.count
        )

    def address(self, vector):
        return ctypes.c_void_p(vector.ctypes.data)

    def check_and_average(self):
        self.check()
        self.average()

    def time(self, name, calls, first):
        """Return the seconds of a pass on the slowest rank; each is after a step."""
        call = {
            "check": self.check,
            "copy": self.copy,
            "average": self.average,
            REFERENCE: self.check_and_average,
            "undo": self.undo,
        }[name]
        total = 0.0
        for _ in range(calls):
            np.multiply(self.own, 0.5, out=self.own)
            self.comm.Barrier()
            begin = MPI.Wtime()
            call()
            total += self.comm.allreduce(MPI.Wtime() - begin, op=MPI.MAX)
        return total / calls


def main():
    comm = MPI.COMM_WORLD
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=31, help="at most (default 31)")
    arguments.add_argument("--seconds", type=float, default=12.0, help="for a size (default 12)")
    arguments = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        functions = library(folder)
    names = "check", "copy", "average", REFERENCE, "undo"
    rows, found = [], {}
    if comm.rank == 0:
        print(f"# {comm.size} ranks, {', '.join(str(value) for value in machine().values())}")
        print(f"# {'µs, medians':<10}" + "".join(f"{name:>18}" for name in names), flush=True)
    for label, size in SIZES.items():
        (first, vectors), (second, saved) = (shared(comm, size // 4) for _ in range(2))
        vectors[comm.rank][:], saved[comm.rank][:] = 1, 0
        passes = Passes(comm, functions, vectors, saved)
        timed = {name: partial(passes.time, name) for name in names}
        times = take_turns(comm, timed, arguments.rounds, arguments.seconds)
        del passes, vectors, saved, timed
        first.Free()
        second.Free()
        if comm.rank:
            continue
        medians = {name: 1e6 * median(values) for name, values in times.items()}
        print(f"{label:<12}" + "".join(f"{value:18.1f}" for value in medians.values()), flush=True)
        rows.append({"bytes": size, "rounds": len(times["check"]), "microseconds": medians})
        found[f"{label}: undo ÷ {REFERENCE}"] = ratio(times["undo"], times[REFERENCE])
        found[f"{label}: copy ÷ check"] = ratio(times["copy"], times["check"])
    if comm.rank == 0:
        report(arguments, "finite-check", comm.size, rows, ratios=found)


if __name__ == "__main__":
    main()
