"""The device that a rank's model is trained on: one of its node's GPUs, or the CPU.

Importing it loads torch.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from collectives.agreement import by_value, list_values
from wagma.job import UsageError
from wagma.tasks.contract import Task

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI


def accelerator() -> str | None:
    """Return the kind of device that torch finds here and models can be averaged on, or None."""
    if torch.version.cuda and torch.cuda.is_available():
        return "cuda"
    # A backend that is not part of torch may use memory that the CUDA driver knows.
    other = torch._C._get_privateuse1_backend_name()
    module = getattr(torch, other, None)
    return other if module is not None and module.is_available() else None


def why_none() -> str:
    """Return why there is no such device."""
    return "torch sees no GPU" if torch.version.cuda else "torch is built without CUDA"


def choose(asked: str, comm: MPI.Comm) -> torch.device:
    """Return the device of this rank's model, and make it torch's current one; collective.

    The ranks of a node are assigned its devices in turn: several may share one.

    Args:
        asked: "cpu", "cuda", or "auto": CUDA if torch finds a GPU, else the CPU.
        comm: The ranks that train together.

    Raises:
        UsageError: CUDA is requested but missing on some ranks, or it is found on some ranks only;
            the same on every rank.
    """
    if asked == "cpu":
        return torch.device("cpu")
    kind = accelerator()
    missing = comm.allgather(None if kind else why_none())
    lacking = by_value(missing)
    found = lacking.pop(None, [])
    if lacking and asked == "cuda":
        raise UsageError(f"argument --device: no CUDA: {list_values(lacking)}")
    if lacking and found:
        raise UsageError(
            f"argument --device: {list_values(lacking)}, and others see one: train on the CPU "
            "(--device cpu), or start ranks only on nodes with GPUs"
        )
    if kind is None:
        return torch.device("cpu")
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    place = node.rank
    node.Free()
    module = torch.get_device_module(kind)
    device = torch.device(kind, place % module.device_count())
    module.set_device(device)
    return device


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU if it has none."""
    return next((each.device for each in model.parameters()), torch.device("cpu"))


def name_of(device: torch.device) -> str:
    """Return "cuda:1, NVIDIA H100", or without the name if the backend has none."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name is None else f"{device}, {name(device)}"


def names_of(kind: str) -> str:
    """Return "4 × NVIDIA H100" for all devices of a kind that torch finds here."""
    module = torch.get_device_module(kind)
    name = getattr(module, "get_device_name", lambda index: kind)
    counts = Counter(name(index) for index in range(module.device_count()))
    return ", ".join(f"{count} × {each}" for each, count in counts.items())


def record(device: torch.device, comm: MPI.Comm, collective: Any) -> dict[str, Any]:
    """Return where the ranks are, for a run's configuration, complete on rank 0; collective."""
    from mpi4py import MPI

    return {
        "node_of_rank": comm.gather(MPI.Get_processor_name()),
        "device": device.type,
        "device_of_rank": comm.gather(name_of(device)),
        "path": getattr(collective, "path", None),  # torch's own methods have none
        "path_reason": getattr(collective, "path_reason", None),
    }


def on(task: Task, device: torch.device) -> Task:
    """Return the task with its model on the device, and batches moved there before their use.

    For the CPU it is the unchanged task.
    """
    if device.type == "cpu":
        return task

    def with_batch_there(function):
        return function and (lambda model, batch: function(model, moved(batch, device)))

    return task._replace(
        model=lambda: there(task.model(), device),
        loss=with_batch_there(task.loss),
        metrics=with_batch_there(task.metrics),
    )


def there(model: Any, device: torch.device) -> Any:
    """Return the model moved to the device; other values unchanged, for the caller to refuse."""
    return model.to(device) if isinstance(model, torch.nn.Module) else model


def moved(batch: Any, device: torch.device) -> Any:
    """Move a batch to a device: tensors, objects with `to`, and tuples, lists and dicts of these.

    The host does not wait for copies from pinned memory.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(each, device) for each in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(moved(each, device) for each in batch)
    if isinstance(batch, dict):
        changed = copy.copy(batch)
        changed.update((key, moved(each, device)) for key, each in batch.items())
        return changed
    return batch


class Moment:
    """A point in time to measure from: of the host, or of a device's queued work.

    Args:
        device: The device to measure, on torch's current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._at = self._now()

    def note(self) -> None:
        """Set the point to now: on a device, to the end of the work queued so far."""
        self._at = self._now()

    def elapsed(self) -> float:
        """Return the seconds since the point, on a device until the work queued so far is done."""
        now = self._now()
        if self._device.type == "cpu":
            return now - self._at
        now.synchronize()
        return self._at.elapsed_time(now) / 1000

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event


def wait_for(device: torch.device) -> None:
    """Wait until a device has completed the work queued on the current stream."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()
