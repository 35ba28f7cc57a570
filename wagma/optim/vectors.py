"""Vectors whose parts are tensors of one dtype, for torch and for a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from collectives import windows

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI

ALIGNMENT = 64  # bytes, at which torch and BLAS expect a tensor of its own to start
LEGACY_STREAM = 1  # the interface's number for torch's default stream, whose handle is 0


class DeviceVector:
    """A vector on a CUDA device, as a collective takes it.

    Its interface (`__cuda_array_interface__`, version 3) names torch's current stream on the
    device, which that of torch's tensors does not, and supports bfloat16, which theirs lacks.

    Args:
        values: 1-D tensor on the device.
    """

    def __init__(self, values: torch.Tensor):
        self.values = values

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        values = self.values
        size = values.itemsize
        return {
            "shape": (values.numel(),),
            "typestr": "<V2" if values.dtype is torch.bfloat16 else f"<f{size}",
            "data": (values.data_ptr(), False),
            "strides": None,
            "version": 3,
            "stream": current_stream(values.device) or LEGACY_STREAM,
        }


def let_wait(device: torch.device, stream: Any) -> None:
    """Make torch's current stream on a device wait for another; on the CPU do nothing."""
    if device.type != "cpu":
        current = torch.get_device_module(device).current_stream(device)
        if current != stream:
            current.wait_stream(stream)


def current_stream(device: torch.device) -> int:
    """Return the handle of torch's current stream on a device."""
    stream = torch.get_device_module(device).current_stream(device)
    # Backends that are not part of torch use torch.Stream, with the attribute `native_handle`.
    return stream.cuda_stream if hasattr(stream, "cuda_stream") else stream.native_handle


def zeros_in_windows(comm: MPI.Intracomm) -> Callable[..., torch.Tensor]:
    """Return a function as `torch.zeros`; its vectors on the CPU are `collectives.empty`'s.

    It is collective then, and the first bytes are at a multiple of 64.
    """

    def zeros(length: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.zeros(length, dtype=dtype, device=device)
        array = windows.new(comm, length, f"int{8 * dtype.itemsize}")
        return torch.from_numpy(array).view(dtype)

    return zeros


def new_vector(
    values: list[torch.Tensor],
    dtype: torch.dtype | None = None,
    zeros: Callable[..., torch.Tensor] = torch.zeros,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a vector of zeros for tensors of one dtype and device, and its part for each.

    A part has a storage of its own, so that saving or copying it does not include other parts. The
    vector has the given dtype, by default that of the tensors, and is what `zeros` returns.
    """
    dtype, device = dtype or values[0].dtype, values[0].device
    unit = ALIGNMENT // dtype.itemsize
    starts, length = [], 0
    for value in values:
        starts.append(length)
        length += -(-value.numel() // unit) * unit
    vector = zeros(length, dtype=dtype, device=device)
    parts = [
        with_storage(vector[start : start + value.numel()]).as_strided(
            value.shape, dense_stride(value)
        )
        for value, start in zip(values, starts, strict=True)
    ]
    return vector, parts


def with_storage(part: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage is a part of a vector."""
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(part))  # type: ignore[attr-defined]


def for_collective(vector: torch.Tensor) -> np.ndarray | DeviceVector:
    """Return an object that shares a vector's memory and that collectives accept."""
    if vector.device.type != "cpu":
        return DeviceVector(vector)
    if vector.dtype is not torch.bfloat16:
        return vector.numpy()
    import ml_dtypes  # numpy has bfloat16 from it

    return vector.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def dense_stride(value: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a dense copy, which keeps orders of dimensions like channels_last."""
    return torch.empty_like(value, device="meta").stride()
