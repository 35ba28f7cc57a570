"""A user's script, which `make lint` checks as strictly as `mypy --strict`.

mypy must find each error that is ignored here: an `ignore` that is not needed is an error itself.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI
from typing_extensions import assert_type

import collectives
import wagma
from collectives import GroupAllreduce, Statistics, graphs, topology
from collectives.errors import CollectiveError
from collectives.result import Result
from collectives.typing import DeviceArray, Vector
from wagma import simulation
from wagma.methods.method import Method, Option
from wagma.optim import WAGMA, interfaces
from wagma.optim.averager import Averager
from wagma.optim.interfaces import Collective
from wagma.wpsgd import beats_fastest, rates

Array = npt.NDArray[np.float32]


def average(comm: MPI.Intracomm, x: Array, steps: int) -> Statistics:
    with GroupAllreduce(comm, x, sync_period=10, wire_dtype="float16") as allreduce:
        assert_type(allreduce, GroupAllreduce)
        for step in range(steps):
            try:
                result = allreduce(x, weight=1.0)
            except CollectiveError as error:
                raise SystemExit(f"step {step}: {error}") from None
            assert_type(result, Result)
            assert_type(result.timely, bool)
            assert_type(result.group, tuple[int, ...])
        call = allreduce.start([x])
        assert_type(call.test(), bool)
        assert_type(call.wait(), Result)
        assert_type(allreduce.version, int)
        allreduce.average(x, weight=0.5)
        allreduce.load(x, allreduce.version)
        return allreduce.statistics()


def all_collectives(comm: MPI.Intracomm, x: Vector) -> Iterator[Result]:
    mixing = graphs.mixing_matrix(graphs.edges_of("ring", comm.size), comm.size)
    with (
        collectives.PartialAllreduce(comm, x, trigger="majority") as partial,
        collectives.ReadyGroupAllreduce(comm, x, group_size=2, weights="dynamic") as ready,
        collectives.GeneratedGroupAllreduce(comm, x, groups="smart") as generated,
        collectives.TriggeredAverage(comm, x, sync_period=5) as triggered,
        collectives.NeighborAverage(comm, x, mixing=mixing) as neighbors,
        collectives.QueuedNeighborAverage(comm, x, graph="ring", max_gap=None) as queued,
        collectives.PushSum(comm, x, neighbors=2) as push_sum,
        collectives.PairwiseAverage(comm, x, seed=1) as pairs,
        collectives.ParameterServer(comm, x, mode="asp") as server,
    ):
        assert_type(partial(x), Result)
        assert_type(triggered(x, weight=2), Result)
        for formed in (ready, generated):
            yield formed(x)
            averages(formed)
        for peers in (neighbors, queued, push_sum, pairs, server):
            yield peers(x)
            averages(peers)
        assert_type(ready.rho, float | None)
        assert_type(push_sum.weight, float)
        collectives.join((ready, x), (generated, x), (partial, x), (push_sum, x))


def on_device(comm: MPI.Intracomm, x: DeviceArray, stream: torch.cuda.Stream) -> Any:
    with (
        GroupAllreduce(comm, x) as allreduce,
        collectives.PushSum(comm, [x]) as push_sum,
        collectives.TriggeredAverage(comm, x) as triggered,
        collectives.ReadyGroupAllreduce(comm, x) as ready,
    ):
        assert_type(allreduce(x, stream=stream), Result)
        assert_type(allreduce.start(x, weight=2.0, stream=stream.cuda_stream).wait(), Result)
        assert_type(ready(x, stream=stream), Result)
        allreduce.publish(x, stream=stream)
        allreduce.load(x, 0, stream=stream)
        push_sum.model([x], stream=stream)
        triggered.average(x, weight=None, stream=stream)
        collectives.join((ready, x), (push_sum, [x]), stream=[stream, None])
        with triggered.joining(x, stream=stream):
            return allreduce.on_host


def train(
    model: torch.nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, Any]:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = torch.nn.MSELoss()
    with WAGMA(model, sgd, sync_period=10, overlap=True) as averager:
        assert_type(averager, WAGMA)
        schedule = torch.optim.lr_scheduler.StepLR(sgd, 100)
        with averager.join():
            for inputs, targets in batches:
                sgd.zero_grad()
                loss_of(model(inputs), targets).backward()
                averager.weight = len(inputs)
                sgd.step()
                schedule.step()
        with averager.averaged():
            print(loss_of(model(batches[0][0]), batches[0][1]).item())
        print(settings(averager), synchronized(averager))
        return averager.state_dict()


def synchronized(averager: Averager) -> bool:
    averager.synchronize()
    return averager.closed


def settings(averager: interfaces.Averager) -> dict[str, Any]:
    return averager.settings


def averages(collective: Collective) -> int:
    return collective.version


def predict(steps: npt.NDArray[np.float64]) -> float:
    result = simulation.simulate(
        "wagma", steps, simulation.MACHINES["aries"], simulation.Settings(1 << 20)
    )
    assert_type(result, simulation.Result)
    return result.throughput


def own_method() -> Method:
    option = Option("pairs", "how many", 1, convert=int)
    return Method("mine", "models", averager="m.A", simulated="m.s", options=(option,))


def mistakes(comm: MPI.Intracomm, x: Array, model: torch.nn.Module) -> None:
    GroupAllreduce(comm, x, sync_perod=10)  # type: ignore[call-arg]
    GroupAllreduce(comm, "x")  # type: ignore[arg-type]
    GroupAllreduce(comm, x)(x, weight="1")  # type: ignore[arg-type]
    GroupAllreduce(comm, x).syncronize(x)  # type: ignore[attr-defined]
    WAGMA(model.parameters())  # type: ignore[arg-type]
    topology.groups("8", 2, 0)  # type: ignore[arg-type]
    collectives.join((x, x))  # type: ignore[arg-type]
    GroupAllreduce(comm, x).synchronize(x, strem=None)  # type: ignore[call-arg]
    collectives.no_such_collective  # type: ignore[attr-defined]  # noqa: B018


assert_type(wagma.__version__, str)
assert_type(topology.groups(8, 2, 0), list[tuple[int, ...]])
assert_type(rates.beats_fastest([0, 3], 0.5), bool)
assert_type(beats_fastest([0, 3], 0.5), bool)
