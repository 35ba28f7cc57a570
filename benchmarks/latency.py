"""Latency of the average by size, beside MPI's and gloo's allreduce on the same ranks.

    mpiexec -n 4 python benchmarks/latency.py

Vectors of float32 of 1 KiB to 256 MiB in powers of four, in place, all ranks of one node in one
group; the copy that publishes the vector is included. "messages" and "shared" are the transports,
"window" is shared memory with vectors of `collectives.empty`, as optimizers have them. Without skew
(wait="group") all ranks call together, under both late rules. With one rank late (wait="nobody",
the default rule) the last rank sleeps, its engine takes part for it, and the time is that of the
others. memcpy is a copy of the vector by all ranks at once.

With --blocks only what is averaged by slots is measured, 1 to 16 KiB in shared memory without skew,
beside the same by blocks, as longer vectors are averaged; the results are named "slots".

The variants take turns in every round, each collective being the only one open then, after calls
to warm up; the first round is discarded, and all results are checked in it. A time is that of
the slowest rank, per call of several in a row. The table has medians over the rounds, and a ratio
is the median of the ratios round by round. A size ends after --rounds rounds or --seconds seconds,
whichever is first, but not before three rounds more. To measure longer, raise both.
"""

import contextlib
import os
import socket
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import NamedTuple

import numpy as np
from common import (
    TRANSPORTS,
    figure,
    machine,
    memory,
    parser,
    ratio,
    ratio_label,
    report,
    take_turns,
    time_warm,
)
from mpi4py import MPI

from collectives import DEFAULT_LATE, GroupAllreduce, empty
from collectives.exchange.shared import slots

RULES = ("paper", "conserving")
LARGEST_KIB = 256 * 1024
VECTORS = 10  # held by a rank at once: the user's two, a copy, ours, and those of MPI and gloo
BULK = 1 << 20  # bytes from which the memory bandwidth is the limit
PATTERN = np.tile(np.arange(1021, dtype=np.float32), 64)  # a prime: no shift of segments escapes
REFERENCE = "MPI_Allreduce"
WINDOW = "window"
WAYS = {**TRANSPORTS, WINDOW: TRANSPORTS["shared"]}
SHARED = "shared", WINDOW
# Bounds of the ratios to MPI_Allreduce, from 1 KiB to 64 MiB, and to memcpy from 16 MiB on.
BOUNDS = {
    (WINDOW, 2): ((0.9, 0.9, 0.6, 0.5, 0.45, 0.45, 0.7, 0.7, 0.5), 1.3),
    ("shared", 2): ((0.9, 0.9, 0.8, 0.7, 0.65, 0.7, 0.9, 0.8, 0.6), 1.7),
    ("messages", 2): ((1.1, 1.1, 0.95, 0.95, 1.0, 0.95, 1.1, 0.8, 0.75), 2.2),
    (WINDOW, 4): ((0.6, 0.6, 0.45, 0.4, 0.35, 0.45, 0.55, 0.55, 0.35), 2.1),
    ("shared", 4): ((0.6, 0.6, 0.5, 0.55, 0.55, 0.7, 0.75, 0.7, 0.4), 3.0),
    ("messages", 4): ((0.8, 0.8, 0.8, 0.95, 0.9, 1.0, 1.0, 0.75, 0.75), 3.3),
}


class Variant(NamedTuple):
    """A column of the table.

    Attributes:
        name: its heading.
        open: function of the vector that returns a context whose value is the call to measure.
        sums: whether the call gives sums, not means; None if it gives neither.
        late: whether the last rank sleeps meanwhile.
        smallest: smallest size for which it is measured, in bytes.
        in_window: whether the vector is in a window.
    """

    name: str
    open: Callable
    sums: bool | None = False
    late: bool = False
    smallest: int = 0
    in_window: bool = False


class Sleeper:
    """Makes the last rank sleep, outside MPI, until the others are done.

    In an MPI call it would progress the engine itself, which must take part without its help.

    Attributes:
        others: communicator of the ranks that are awake; on the last rank, of that rank alone.
    """

    def __init__(self, comm):
        self.sleeps = comm.rank == comm.size - 1
        self.others = comm.Split(self.sleeps, comm.rank)
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = comm.bcast(server.getsockname())
            self.end = socket.create_connection(address) if self.sleeps else None
            if comm.rank == 0:
                self.end = server.accept()[0]

    def sleep(self):
        self.end.recv(1)

    def wake(self):
        """Wake the last rank; only rank 0 does so."""
        if self.end:
            self.end.send(b"!")

    def close(self):
        self.others.Free()
        if self.end:
            self.end.close()


def mpi_variants(comm):
    @contextlib.contextmanager
    def allreduce(vector):
        yield lambda: comm.Allreduce(MPI.IN_PLACE, vector)

    @contextlib.contextmanager
    def iallreduce(vector):
        yield lambda: comm.Iallreduce(MPI.IN_PLACE, vector).Wait()

    return [
        Variant(REFERENCE, allreduce, sums=True),
        Variant("MPI_Iallreduce", iallreduce, sums=True),
    ]


@contextlib.contextmanager
def gloo_variants(comm):
    """Yield gloo's variants, over the loopback interface; none if a rank has no torch."""
    if not comm.allreduce(find_spec("torch") is not None, op=MPI.LAND):
        yield []
        return
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    # Else gloo takes the network interface of the host's name.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host, meet = "127.0.0.1", partial(distributed.TCPStore, world_size=comm.size)
    store = meet(host, 0, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
    port = comm.bcast(store and store.port)
    store = store or meet(host, port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)

    @contextlib.contextmanager
    def all_reduce(vector):
        tensor = torch.from_numpy(vector)
        yield lambda: distributed.all_reduce(tensor)

    yield [Variant("gloo", all_reduce, sums=True)]
    comm.Barrier()  # no rank leaves while another still needs it, or rank 0's store
    distributed.destroy_process_group()
    comm.Barrier()


def average(comm, by_slots=True, **settings):
    """Return what opens a collective of all ranks; without slots, short vectors go by blocks."""

    @contextlib.contextmanager
    def open_collective(vector):
        slots.set_longest(*(() if by_slots else (-1, -1)))
        with GroupAllreduce(
            comm, vector, group_size=comm.size, sync_period=10**9, **settings
        ) as collective:
            yield lambda: collective(vector)

    return open_collective


def our_variants(comm):
    for name, transport in WAYS.items():
        options = {"in_window": name == WINDOW}
        for late in RULES:
            together = average(comm, wait="group", late=late, **transport)
            yield Variant(f"{name}-{late}", together, **options)
        passive = average(comm, wait="nobody", **transport)
        yield Variant(f"{name}-late", passive, late=True, **options)


def slots_and_blocks(comm):
    for name in SHARED:
        for way in ("slots", "blocks"):
            together = average(comm, way == "slots", wait="group", **WAYS[name])
            yield Variant(f"{name}-{way}", together, in_window=name == WINDOW)


@contextlib.contextmanager
def memcpy(vector):
    copy = np.empty_like(vector)
    yield lambda: np.copyto(copy, vector)


def fill(vector, offset):
    for begin in range(0, vector.size, PATTERN.size):
        part = vector[begin : begin + PATTERN.size]
        np.add(PATTERN[: part.size], offset, out=part)


def check(comm, name, vector, factor, offset):
    """Raise on all ranks if the vector is not factor · PATTERN + offset on all of them."""
    right = True
    for begin in range(0, vector.size, PATTERN.size):
        part = vector[begin : begin + PATTERN.size]
        right &= np.allclose(part, factor * PATTERN[: part.size] + offset, rtol=1e-6, atol=1e-3)
    if not comm.allreduce(right, op=MPI.LAND):
        raise ArithmeticError(f"{name}: wrong result for {vector.nbytes} bytes")


def time_together(comm, variant, vector, calls, checked):
    """Return the seconds per call, with all ranks beginning together."""
    fill(vector, comm.rank)
    with variant.open(vector) as call:
        if checked and variant.sums is not None:
            call()
            factor = comm.size if variant.sums else 1
            check(comm, variant.name, vector, factor, factor * (comm.size - 1) / 2)
        vector.fill(0)  # sums in place neither grow nor become NaN
        return time_warm(comm, call, calls)


def time_late(sleeper, variant, vector, calls, checked):
    """Return the seconds per call while the last rank sleeps; None on that rank."""
    fill(vector, 0)
    with variant.open(vector) as call:
        if sleeper.sleeps:
            return sleeper.sleep()
        try:
            seconds = time_warm(sleeper.others, call, calls)
            if checked:
                check(sleeper.others, variant.name, vector, 1, 0)
            return seconds
        finally:
            sleeper.wake()


def measure(comm, variants, sleeper, size, rounds, seconds):
    """Return {variant: seconds per call in each round} on rank 0; the variants take turns."""
    vectors = {False: np.empty(size // 4, np.float32), True: empty(comm, size // 4)}
    timed = {}
    for variant in variants:
        if size >= variant.smallest:
            function, ranks = (time_late, sleeper) if variant.late else (time_together, comm)
            timed[variant.name] = partial(function, ranks, variant, vectors[variant.in_window])
    return take_turns(comm, timed, rounds, seconds)


def ratios(size, times):
    """Return {label: quartiles} of the ratios of ours to the references, for one size."""
    pairs = []
    for name in WAYS:
        for rule in RULES:
            pairs += [(f"{name}-{rule}", other) for other in (REFERENCE, "memcpy")]
        pairs.append((f"{name}-late", f"{name}-{DEFAULT_LATE}"))
    for name in SHARED:
        pairs += [(f"{name}-slots", other) for other in (REFERENCE, f"{name}-blocks")]
    return {
        ratio_label(size, variant, other): ratio(times[variant], times[other])
        for variant, other in pairs
        if variant in times and other in times
    }


def bounds(ranks, size):
    """Yield (label of a ratio, its bound) for one size."""
    mib = size / 2**20
    power = (size.bit_length() - 11) // 2
    for name in WAYS:
        to_mpi, to_memcpy = BOUNDS.get((name, ranks), ((), None))
        for rule in RULES:
            if power < len(to_mpi):
                yield ratio_label(size, f"{name}-{rule}", REFERENCE), to_mpi[power]
            if to_memcpy and mib >= 16:
                yield ratio_label(size, f"{name}-{rule}", "memcpy"), to_memcpy
    if mib >= 1:
        for name in WAYS:
            yield ratio_label(size, f"{name}-late", f"{name}-{DEFAULT_LATE}"), 1.3


def parse(comm):
    arguments = parser(__doc__)
    arguments.add_argument("--min-kib", type=int, default=1)
    arguments.add_argument(
        "--max-kib", type=int, help=f"default: what the memory allows, at most {LARGEST_KIB}"
    )
    arguments.add_argument("--rounds", type=int, default=21, help="at most (default 21)")
    arguments.add_argument("--seconds", type=float, default=12.0, help="for a size (default 12)")
    arguments.add_argument("--blocks", action="store_true", help="compare slots with blocks")
    parsed = arguments.parse_args()
    if comm.size < 2 or parsed.rounds < 1:
        arguments.error("start it under mpiexec with two ranks or more, and for one round or more")
    if parsed.max_kib is None:
        affordable = memory("MemAvailable") // VECTORS // comm.size // 1024
        parsed.max_kib = min(LARGEST_KIB, comm.bcast(affordable))
    powers = (1 << 10 << shift for shift in (range(5) if parsed.blocks else range(0, 40, 2)))
    sizes = [size for size in powers if parsed.min_kib <= size >> 10 <= parsed.max_kib]
    if not sizes:
        arguments.error(f"no power of four from {parsed.min_kib} to {parsed.max_kib} KiB")
    return parsed, sizes


def line(first, cells, widths):
    row = "".join(f" {cell:>{width}}" for cell, width in zip(cells, widths))
    print(f"{first:<10}{row}", flush=True)


def main():
    comm = MPI.COMM_WORLD
    arguments, sizes = parse(comm)
    sleeper = Sleeper(comm)
    rows, found = [], {}
    with gloo_variants(comm) as gloo:
        if arguments.blocks:
            variants = [mpi_variants(comm)[0], *slots_and_blocks(comm)]
        else:
            variants = [*mpi_variants(comm), *gloo, *our_variants(comm)]
            variants.append(Variant("memcpy", memcpy, sums=None, smallest=BULK))
        widths = [max(13, len(variant.name)) for variant in variants]
        if comm.rank == 0:
            print(f"# {comm.size} ranks, {arguments.rounds} rounds or {arguments.seconds} s a size")
            print("# " + ", ".join(str(value) for value in machine().values()))
            print("# µs per call of the slowest rank, median of the rounds; -late: one rank sleeps")
            if not gloo:
                print("# no gloo: torch is not installed")
            line("# Size (B)", [variant.name for variant in variants], widths)
        for size in sizes:
            times = measure(comm, variants, sleeper, size, arguments.rounds, arguments.seconds)
            if comm.rank == 0:
                medians = {name: 1e6 * median(values) for name, values in times.items()}
                cells = [f"{medians[v.name]:.2f}" if v.name in medians else "-" for v in variants]
                line(size, cells, widths)
                rounds = len(times[REFERENCE])
                rows.append({"bytes": size, "rounds": rounds, "microseconds": medians})
                found |= ratios(size, times)
    sleeper.close()
    if comm.rank == 0:
        figures = [
            figure(label, found[label], bound)
            for size in sizes
            for label, bound in bounds(comm.size, size)
            if label in found
        ]
        report(
            arguments,
            "slots" if arguments.blocks else "latency",
            comm.size,
            rows,
            ratios=found,
            figures=figures,
        )


if __name__ == "__main__":
    main()
