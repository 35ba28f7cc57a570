"""Types in the signatures of the collectives, for type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, Union

import numpy as np

__all__ = ["Array", "DeviceArray", "Stream", "Vector"]


class DeviceArray(Protocol):
    """A 1-D array on a CUDA device, such as CuPy's or torch's: see `collectives.device`."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Its address, shape and dtype, by version 2 or 3 of the CUDA array interface."""
        ...


Array: TypeAlias = Union["np.ndarray[Any, np.dtype[Any]]", DeviceArray]
"""An array of one dimension, of float16, bfloat16, float32 or float64."""

Vector: TypeAlias = Array | Sequence[Array]
"""The argument that a collective averages: an array, or a list of arrays that form one vector."""

Stream: TypeAlias = Any
"""A stream of a CUDA device: an integer handle, or an object with `ptr`, `cuda_stream` or
`native_handle`."""
