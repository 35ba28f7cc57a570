"""What an averager adds to a step beside its collective, and what a frozen base costs.

    mpiexec -n 4 python benchmarks/step_cost.py

A step of SGD on 161 parameters of 64 elements, in one process without others: the time that is
neither the collective's call nor the optimizer's own step, and its ratio to that step, medians over
500 steps. Then the memory
and the messages of a frozen base of 100 million weights with adapters of a million, 4 bytes each:
the bytes that a rank's resident memory grows by while the averager is made and makes 3 steps, and
those that it sends in a step, by messages.
"""

import statistics
import time

import psutil
import torch
from common import parser, ratio, report
from mpi4py import MPI
from torch import nn

from wagma import optim

METHODS = {
    "WAGMA": (optim.WAGMA, {}),
    "WAGMA, own pace": (optim.WAGMA, {"pace": "own"}),
    "LocalSGD": (optim.LocalSGD, {}),
    "Allreduce": (optim.Allreduce, {}),
    "DPSGD": (optim.DPSGD, {}),
}
MIB = 2**20


def time_steps(kind, settings, steps=500):
    """Return the seconds of a step beside the collective and the optimizer, and the optimizer's."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(161)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    averager = kind(model, optimizer, comm=MPI.COMM_SELF, **settings)
    inner = [0.0]

    def timed(call):
        def measured(*arguments, **options):
            began = time.perf_counter()
            result = call(*arguments, **options)
            inner[0] += time.perf_counter() - began
            return result

        return measured

    class Timed(type(averager.collective)):
        __call__ = timed(type(averager.collective).__call__)

    averager.collective.__class__ = Timed
    local = []
    optimizer.register_step_pre_hook(lambda *_: local.append(-time.perf_counter()))
    optimizer.register_step_post_hook(lambda *_: local.append(time.perf_counter()))
    times, own = [], []
    for _ in range(steps + 20):
        inner[0] = 0.0
        local.clear()
        began = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began - inner[0] - sum(local))
        own.append(sum(local))
    averager.close()
    return statistics.median(times[20:]), statistics.median(own[20:])


def wait(comm):
    """Wait for all ranks asleep: others measure."""
    arrived = comm.Ibarrier()
    while not arrived.Test():
        time.sleep(0.01)


def frozen_base(comm, kind, settings, millions, steps=3):
    """Return the MiB that memory grows by, and those sent in a step, of this rank."""
    base, adapters = nn.Linear(1, millions * 10**6, bias=False), nn.Linear(1, 10**6, bias=False)
    base.requires_grad_(False)
    model = nn.ModuleList([base, adapters])
    optimizer = torch.optim.SGD(adapters.parameters(), lr=0.1)
    adapters.weight.grad = torch.ones_like(adapters.weight)
    comm.Barrier()
    before = psutil.Process().memory_info().rss
    with kind(model, optimizer, comm=comm, transport="messages", **settings) as averager:
        for _ in range(steps):
            optimizer.step()
        sent = averager.statistics().bytes_sent / steps
        grown = psutil.Process().memory_info().rss - before
        comm.Barrier()
    return grown / MIB, sent / MIB


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--millions", type=int, default=100)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments = arguments.parse_args()
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    results, ratios = {}, {}
    for name, (kind, settings) in METHODS.items():
        if comm.rank == 0:
            rounds = [time_steps(kind, settings) for _ in range(arguments.rounds)]
            beside, own = zip(*rounds)
            results[name] = {"beside_us": 1e6 * statistics.median(beside)}
            ratios[f"{name}: beside the collective ÷ the optimizer's step"] = ratio(beside, own)
        wait(comm)
    for name, (kind, settings) in METHODS.items():
        grown, sent = frozen_base(comm, kind, settings, arguments.millions)
        of_all = comm.gather((grown, sent))
        if comm.rank == 0:
            results[name]["memory_mib"] = max(each[0] for each in of_all)
            results[name]["sent_mib"] = max(each[1] for each in of_all)
    if comm.rank:
        return
    for name, values in results.items():
        print(f"{name:16}", ", ".join(f"{key} {value:.1f}" for key, value in values.items()))
    report(arguments, "step-cost", comm.size, results, ratios=ratios)


if __name__ == "__main__":
    main()
