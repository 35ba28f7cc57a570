"""What averaged state and control variates cost WAGMA: traffic, memory and the time of a step.

    mpiexec -n 4 python benchmarks/shards_cost.py

A model of 16 MiB of float32 in 16 parameters, groups of two ranks, τ = 10; the gradients are
there. Bytes that a rank sends in a step, by messages, in models; memory beside the model, its
gradient and the local optimizer's own state, which the rank would have without WAGMA (PSS), in
models; and seconds of a step ÷ those with neither option, and ÷ the local step and an MPI_Allreduce
of the model, which take turns. The bound of memory is 3 for each vector that is averaged, as of
`memory.py`, 2 for cr and the sum of gradients, and 1 for what a lease keeps.
"""

import ctypes
import gc
import time

import numpy as np
import torch
from common import TRANSPORTS, figure, markdown, parser, ratio, report, take_turns
from memory import Peak, proportional_set_size
from mpi4py import MPI

from wagma.optim import WAGMA

PARTS = 16
MMAP_THRESHOLD = -3  # the number of glibc's option
PERIOD = 10
OPTIMIZERS = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), 1),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-3), 2),
}
VARIATES = {"correction": "control-variates"}
CHOICES = {
    "neither": {},
    "state": {"average_state": True},
    "state, all ranks": {"average_state": "all-ranks"},
    "variates": VARIATES,
    "variates, all ranks": {**VARIATES, "correction_every": "all-ranks"},
    "both": {**VARIATES, "average_state": True},
    "both, all ranks": {
        **VARIATES, "average_state": "all-ranks", "correction_every": "all-ranks"
    },
}  # fmt: skip


class Training:
    """A model with its gradients, its optimizer, and an averager."""

    def __init__(self, comm, make, size, **options):
        count = size // 4 // PARTS
        self.model = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(count)) for _ in range(PARTS)
        )
        for value in self.model:
            value.grad = torch.full_like(value, 1e-3 * (comm.rank + 1))
        self.local = make(self.model.parameters())
        self.local.step()
        self.averager = None
        if options.pop("averaged", True):
            self.averager = WAGMA(
                self.model, self.local, comm=comm, group_size=2, sync_period=PERIOD, **options
            )

    def step(self):
        self.local.step()


def traffic(comm, make, size, options):
    """Return the bytes that a rank sends in a step, on average over a period."""
    training = Training(comm, make, size, transport="messages", wait="group", **options)
    with training.averager as averager:
        begun = averager.collective.statistics().bytes_sent
        for _ in range(PERIOD):
            training.step()
        sent = averager.collective.statistics().bytes_sent - begun
    return comm.allreduce(sent, MPI.SUM) / comm.size / PERIOD


def memory(comm, make, size, options):
    """Return the bytes that a step takes beside a local training's, of the rank with the most."""
    used = []
    for averaged in (False, True):
        gc.collect()
        comm.Barrier()
        before = proportional_set_size()
        comm.Barrier()
        with Peak() as peak:
            given = options if averaged else {}
            training = Training(comm, make, size, averaged=averaged, **given)
            for _ in range(PERIOD + 2):
                training.step()
                time.sleep(0.03)  # for the peak to be seen
        if training.averager is not None:
            training.averager.close()
        del training
        used.append(peak.value - before)
    return comm.allreduce(used[1] - used[0], MPI.MAX)


def times(comm, make, size, arguments):
    """Return {name: seconds per step in each round}; on rank 0."""
    vector = np.zeros(size // 4, np.float32)
    local = Training(comm, make, size, averaged=False)
    trainings = {name: Training(comm, make, size, **options) for name, options in CHOICES.items()}

    def timed(step):
        def measure(calls, first):
            comm.Barrier()
            began = time.perf_counter()
            for _ in range(PERIOD):
                step()
            return comm.allreduce((time.perf_counter() - began) / PERIOD, MPI.MAX)

        return measure

    def plain():
        local.step()
        comm.Allreduce(MPI.IN_PLACE, vector)

    variants = {"MPI_Allreduce": timed(plain)}
    variants |= {name: timed(training.step) for name, training in trainings.items()}
    found = take_turns(comm, variants, arguments.rounds, arguments.seconds)
    for training in trainings.values():
        training.averager.close()
    return found


def bound_of(options, state, own_pace):
    """Return the bound of the memory, in models."""
    vectors = 3.0
    if "average_state" in options:
        vectors += 3 * state
    if "correction" in options:
        vectors += 3 + 2 + own_pace
    return vectors


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--mib", type=int, default=16)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--seconds", type=float, default=60.0)
    arguments = arguments.parse_args()
    torch.set_num_threads(1)
    # Else glibc keeps freed tensors for later ones, and the memory that those take is not seen.
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 17)
    comm, size = MPI.COMM_WORLD, arguments.mib << 20
    results, ratios, figures = {}, {}, []
    for kind, (make, state) in OPTIMIZERS.items():
        seconds = times(comm, make, size, arguments)
        for name, options in CHOICES.items():
            found = {"vectors sent": traffic(comm, make, size, options) / size}
            for transport, given in TRANSPORTS.items():
                for pace in ("common", "own"):
                    label = f"memory, {transport}, {pace} pace"
                    used = memory(comm, make, size, {**options, **given, "pace": pace}) / size
                    found[label] = used
                    what = f"{kind}, {name}: {label} ÷ model"
                    figures.append(figure(what, used, bound_of(options, state, pace == "own")))
            if comm.rank == 0:
                mine = seconds[name]
                found["step ÷ neither"] = ratio(mine, seconds["neither"])
                found["step ÷ MPI_Allreduce"] = ratio(mine, seconds["MPI_Allreduce"])
                for other in ("neither", "MPI_Allreduce"):
                    ratios[f"{kind}, {name} ÷ {other}"] = found[f"step ÷ {other}"]
            results[f"{kind}, {name}"] = found
    if comm.rank:
        return
    print(table(results))
    report(arguments, "shards-cost", comm.size, results, ratios=ratios, figures=figures)


def table(results):
    """Return the table of Markdown."""
    rows = {}
    for name, found in results.items():
        most = [
            max(found[f"memory, {transport}, {pace} pace"] for transport in TRANSPORTS)
            for pace in ("common", "own")
        ]
        ratios = [found[f"step ÷ {other}"]["median"] for other in ("neither", "MPI_Allreduce")]
        rows[name] = [
            f"{found['vectors sent']:.2f}",
            *(f"{value:.1f}" for value in most),
            *(f"{value:.2f}" for value in ratios),
        ]
    columns = (
        "models sent in a step",
        "memory beside the model, in models, by the transport that takes more: common pace",
        "own pace",
        *("step ÷ neither", "÷ local step and MPI_Allreduce"),
    )
    return markdown("", columns, rows)


if __name__ == "__main__":
    main()
