"""Arrays on CUDA devices, as described by `__cuda_array_interface__` (versions 2 and 3)."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import NamedTuple

__all__ = ["ArrayDescription", "current_stream", "described", "is_on_device"]

DTYPES = {
    "<f2": "float16",
    "<V2": "bfloat16",
    "|V2": "bfloat16",
    "<f4": "float32",
    "<f8": "float64",
}
# Bytes per element of each dtype that is averaged, on devices or on the host.
SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# What to do about an array that is not contiguous, as the end of a message.
TO_COPY = ": pass a copy, x.copy(), and assign the result back"
DEFAULT_STREAM = 1  # the legacy default stream


def is_on_device(vector) -> bool:
    """Return whether a vector, or list of arrays, is on a device."""
    first = vector[0] if isinstance(vector, (list, tuple)) and vector else vector
    try:
        return hasattr(first, "__cuda_array_interface__")
    except RuntimeError:  # raised by torch's tensors on a device that require grad
        return True


class ArrayDescription(NamedTuple):
    """An array on a device."""

    address: int
    dtype: str
    size: int
    stream: int | None


def described(vector, whole, name, stream, writes) -> tuple[list[ArrayDescription], int]:
    """Return a description of the arrays of a vector, and the stream on which they are ready.

    Args:
        whole, name: for messages: the name of a single array, and that of array {} of a list.
        stream: the stream given by the application, or None.
        writes: whether they are written to.
    """
    listed = isinstance(vector, (list, tuple))
    arrays = [
        _describe_array(array, name.format(index) if listed else whole, writes)
        for index, array in enumerate(vector if listed else [vector])
    ]
    _check_apart(arrays, name)
    if stream is not None:
        return arrays, _handle_of(stream)
    named = {array.stream for array in arrays} - {None}
    if len(named) > 1:
        raise ValueError("the arrays of the vector name different streams: pass stream=")
    return arrays, named.pop() if named else DEFAULT_STREAM


def current_stream(handle: int):
    """Return the object of CuPy's current stream if it has this handle, else None.

    CuPy destroys a stream with its object, and arrays name the stream by its handle only.
    """
    cupy = sys.modules.get("cupy")
    current = cupy.cuda.get_current_stream() if cupy is not None else None
    return current if current is not None and current.ptr == handle else None


def _describe_array(array, name, writes) -> ArrayDescription:
    """Return a description of an array; raise TypeError or ValueError if it is unsuitable."""
    try:
        interface = array.__cuda_array_interface__
        address, is_read_only = interface["data"]
        typestr, shape = interface["typestr"], tuple(interface["shape"])
    except AttributeError:
        raise TypeError(
            f"{name} is a {type(array).__name__}, which is not on a device: the collective was "
            "made with arrays that are"
        ) from None
    except RuntimeError as error:
        raise TypeError(f"{name} has no __cuda_array_interface__: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise TypeError(f"{name} has no valid __cuda_array_interface__: {problem}") from None
    dtype = DTYPES.get(typestr)
    if dtype is None:
        raise TypeError(
            f"{name} is of type {typestr}, not one of {', '.join(SIZES)} in this "
            "machine's byte order"
        )
    if len(shape) != 1:
        raise ValueError(f"{name} has {len(shape)} dimensions, not one")
    if shape[0] == 0:
        raise ValueError(f"{name} is empty")
    if interface.get("strides") not in (None, (SIZES[dtype],)) or interface.get("mask") is not None:
        raise ValueError(f"{name} is not contiguous{TO_COPY}")
    if address % SIZES[dtype]:
        raise ValueError(f"{name} is not aligned")
    if is_read_only and writes:
        raise ValueError(f"{name} is read-only")
    return ArrayDescription(address, dtype, shape[0], interface.get("stream"))


def _check_apart(arrays, name):
    """Raise if two arrays share memory."""
    order = sorted(range(len(arrays)), key=lambda index: arrays[index].address)
    for first, second in pairwise(order):
        end = arrays[first].address + arrays[first].size * SIZES[arrays[first].dtype]
        if end > arrays[second].address:
            names = " and ".join(name.format(index) for index in sorted((first, second)))
            raise ValueError(f"{names} share memory, which would be averaged twice")


def _handle_of(stream) -> int:
    """Return the driver's handle of a stream of CuPy or torch, or of an integer."""
    for name in ("ptr", "cuda_stream", "native_handle"):
        stream = getattr(stream, name, stream)
    if not isinstance(stream, int) or isinstance(stream, bool) or stream < 0:
        raise TypeError(
            f"stream is a {type(stream).__name__}, neither a handle nor an object with ptr, "
            "cuda_stream or native_handle"
        )
    return stream
