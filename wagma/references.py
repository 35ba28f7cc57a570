"""torch's own methods with the interface that a `Trainer` needs: outside references.

Only `wagma compare` offers them. They communicate by gloo, or by nccl if each rank has its own GPU,
and have torch's properties: all ranks wait for stragglers, a rank that ends early ends the others'
averages, and none of the guarantees of `Averager` holds.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import distributed
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from collectives import ClosedError
from wagma.devices import Moment, device_of
from wagma.evaluation import copy_of, mean_over_ranks

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


class Outcome(NamedTuple):
    """The result of a step, like a collective's `Result`."""

    version: int
    synchronized: bool
    group: tuple[int, ...]
    timely: bool = True

    @property
    def source(self) -> int:
        """The version of the model."""
        return self.version


class Counts(NamedTuple):
    """The known part of `collectives.statistics.Statistics`; waiting includes the exchange."""

    waiting: float
    communicating: float = 0.0
    bytes_sent: int | None = None
    staleness: tuple[int, ...] = ()
    left_out: int = 0


class Reference:
    """A method of torch that averages over all ranks, on its own process group.

    Attributes:
        module: the module to compute the loss with.
        result, results: of the last step, as of an `Averager`.
        settings: the method's settings by name.
    """

    period = 1

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: MPI.Comm):
        """Make the ranks' process group, and hear of the optimizer's steps; collective."""
        self.model, self.module, self.comm = model, model, comm
        self.steps, self.seconds = 0, 0.0
        self.result, self.results, self.settings = None, [], {}
        self.collective = self  # it keeps the statistics itself
        self.device = device_of(model)
        self.backend = backend_for(self.device, comm)
        start_group(comm, self.backend)
        self.hook = optimizer.register_step_post_hook(self.after_step)

    def backward(self, loss: torch.Tensor) -> float:
        """Compute the gradients, and return the seconds spent waiting for other ranks."""
        loss.backward()
        return 0.0

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Do the method's part of a step after the optimizer's."""
        self.average(optimizer)
        synchronized = (self.steps + 1) % self.period == 0
        group = tuple(range(self.comm.size)) if synchronized else (self.comm.rank,)
        self.result = Outcome(self.steps, synchronized, group)
        self.results = [self.result]
        self.steps += 1

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        """Average after the optimizer's step, if the method does so."""

    def complete(self) -> None:
        """Do nothing: no average is ever outstanding."""

    def statistics(self) -> Counts:
        """Return the known statistics of the steps so far."""
        return Counts(self.seconds)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the average over all ranks in the model; collective."""
        own = copy_of(self.model)
        self.model.load_state_dict(mean_over_ranks(own, self.comm))
        try:
            yield
        finally:
            self.model.load_state_dict(own)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Do nothing: all ranks make equally many steps, by `any_goes_on`."""
        yield

    def any_goes_on(self, own: bool) -> bool:
        """Return whether any rank continues; ranks exchange that after each average."""
        if self.steps % self.period:
            return True
        here = self.device if self.backend == "nccl" else torch.device("cpu")
        began = Moment(here)
        votes = torch.tensor(float(own), device=here)
        with closed_by_others():
            distributed.all_reduce(votes)
        self.seconds += began.elapsed()
        return bool(votes > 0)

    def fail(self, error: Exception) -> None:
        """Do nothing: torch has no way to tell other ranks."""

    def close(self) -> None:
        """Leave the process group; ranks that still wait in it raise ClosedError."""
        self.module = None
        self.hook.remove()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        gc.collect()  # connections are closed with the last reference to them


class DDP(Reference):
    """Gradients averaged while they are computed: torch.nn.parallel.DistributedDataParallel."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, comm: MPI.Comm):
        super().__init__(model, optimizer, comm)
        # Each rank keeps its own buffers, as with `Allreduce`: a broadcast of rank 0's would wait,
        # and that time would not be counted as waiting.
        with warnings.catch_warnings():  # newer torch has renamed the argument
            warnings.simplefilter("ignore", FutureWarning)
            self.module = DistributedDataParallel(model, broadcast_buffers=False)
        self.last_gradient = Moment(self.device)
        for parameter in model.parameters():
            if parameter.requires_grad:
                # No communication hook: its callbacks, in gloo's threads, may outlive Python.
                parameter.register_post_accumulate_grad_hook(self.note_time)

    def note_time(self, _: torch.Tensor) -> None:
        """Note the time at which a gradient is ready."""
        self.last_gradient.note()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a block for the passes of a micro-batch after which gradients are not averaged."""
        return self.module.no_sync()

    def backward(self, loss: torch.Tensor) -> float:
        with closed_by_others():
            loss.backward()
        waited = self.last_gradient.elapsed()
        self.seconds += waited
        return waited


class PostLocalSGD(Reference):
    """Models averaged every period by torch's PeriodicModelAverager, without warm-up.

    After each step of the optimizer, as torch.distributed.optim.PostLocalSGDOptimizer does.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        comm: MPI.Comm,
        sync_period: int,
    ):
        super().__init__(model, optimizer, comm)
        self.settings, self.period = {"sync_period": sync_period}, sync_period
        # It averages after steps warmup_steps, warmup_steps + period, …, counted from 0.
        self.periodic = PeriodicModelAverager(sync_period, warmup_steps=sync_period - 1)
        self.done = Moment(self.device)

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the models if a period ends."""
        self.done.note()
        with closed_by_others():
            self.periodic.average_parameters(optimizer.param_groups)
        self.seconds += self.done.elapsed()

    def close(self) -> None:
        self.periodic = None  # it holds the process group
        super().close()


def backend_for(device: torch.device, comm: MPI.Comm) -> str:
    """Return the backend of torch's process group, the same on every rank; collective.

    nccl cannot have two ranks on one GPU; gloo can.
    """
    gpu = None
    if device.type == "cuda" and distributed.is_nccl_available():
        gpu = MPI.Get_processor_name(), str(torch.cuda.get_device_properties(device).uuid)
    gpus = comm.allgather(gpu)
    return "gloo" if None in gpus or len(set(gpus)) < len(gpus) else "nccl"


def start_group(comm: MPI.Comm, backend: str) -> None:
    """Make torch's process group of the ranks of an MPI communicator; collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    alone = all(comm.allgather(node.size == comm.size))
    node.Free()
    if alone:  # else gloo takes the network interface of the host's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host = comm.bcast(LOOPBACK if alone else socket.getfqdn())
    store = None
    if comm.rank == 0:
        store = distributed.TCPStore(host, 0, comm.size, is_master=True, wait_for_workers=False)
    port = comm.bcast(store and store.port)
    store = store or distributed.TCPStore(host, port, comm.size, is_master=False)
    distributed.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)
    log.info("torch.distributed communicates by %s", backend)
    comm.Barrier()  # rank 0 has the store, and may leave soon


@contextmanager
def closed_by_others() -> Iterator[None]:
    """Raise ClosedError if gloo or nccl reports that another rank has left."""
    try:
        yield
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, distributed.DistBackendError):
            raise
        raise ClosedError(f"another rank has left the process group: {error}") from error
