"""Vectors on CUDA devices: how a collective takes them, and where they are averaged.

They are averaged either on the host, as copies in pinned memory, or on the device, where the ranks
of a node map each other's memory or MPI sends from it: see `choose_path`. Arrays are recognized by
`__cuda_array_interface__`, which CuPy's and torch's have; neither library is imported, and the
driver is loaded only if such an array is given.

A collective constructed with `like` on a device takes arrays on that device instead of numpy
arrays: 1-D, contiguous, of float16, bfloat16 (typestr <V2), float32 or float64. All arrays of a
vector are there, and lengths and dtypes are the same on all ranks. Each method that takes a vector
then has an argument `stream`: an integer handle, or an object with `ptr`, `cuda_stream` or
`native_handle`. The method reads the vector after the work queued in that stream, and work queued
after the method has returned sees its result. The default is the stream that the arrays' interface
names, else the legacy default stream.

In addition to the errors for numpy arrays, the methods raise:
    TypeError: arrays on the host, on several devices, or on another device than `like`; an invalid
        stream.
    CudaError: a function of the driver has failed; all ranks are told.
    RuntimeError: the stream is being captured into a graph.
The constructor raises CudaError if there is no driver, on all ranks, and ValueError if only some
ranks have arrays on devices.
"""

from __future__ import annotations

import contextlib
import traceback

from collectives import cuda_aware, cuda_blocks, process
from collectives.agreement import raise_collectively
from collectives.device_arrays import current_stream, described, is_on_device
from collectives.errors import CudaError
from collectives.memory.layout import NotCopied

__all__ = ["adopt", "is_on_device"]

# A vector is copied in blocks, so that the first ones are averaged while the others are copied.
# They have BLOCK bytes, or more if there would be more than MOST_BLOCKS: all copies are queued at
# once, and a launch queue holds about a thousand operations.
BLOCK = 4 * 1024 * 1024
MOST_BLOCKS = 128
# The answer of `cuda_aware.ask` for this job's MPI; None until it is known.
_answer = None


def adopt(collective, like):
    """Let a collective that is constructed with arrays on a device take such arrays.

    Returns:
        The initial vector, copied to the host, and the error, or None.
    """
    try:
        copies = Copies(like)
    except (ImportError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        return like, error
    collective._copies = copies
    return copies.arrays, None


def fetched(collective, vector, stream, changes=True):
    """Return a context manager whose value is the vector as the engine takes it.

    Args:
        changes: whether the block may change the vector.
    """
    if collective._copies is None and stream is None:
        return NotCopied(vector)
    return _copies_of(collective).of(collective, vector, stream, changes)


def begin(collective, name, vector, weight, stream):
    """Begin the engine's call `name` with a vector on a device: see `Copies.begin`."""
    return _copies_of(collective).begin(name, collective, vector, weight, stream)


def call(collective, vector, stream):
    """Call a collective, which has `_call` and `_takes_blocks`, with a vector on a device."""
    return _copies_of(collective).call(collective, vector, stream)


def _copies_of(collective):
    if collective._copies is None:
        raise TypeError("stream is given, but the collective was made with numpy arrays")
    return collective._copies


def release(collective):
    """Release the memory and streams of a collective that is closed."""
    if collective._copies is not None:
        collective._copies.close()


def discard(collective, error):
    """Release the memory and streams of a collective whose construction has failed.

    The traceback's frames may refer to the error: this cycle would keep the vectors until the next
    garbage collection.
    """
    traceback.clear_frames(error.__traceback__)
    copies, collective._copies = collective._copies, None
    if copies is not None:
        with contextlib.suppress(CudaError):
            copies.close()
        copies.make_space = None


class NotMapped(CudaError):
    """The ranks of the node could not map each other's device memory; the same on all ranks."""


class Copies:
    """The vectors that the engine averages in place of a collective's device vectors.

    Attributes:
        arrays: the host's copy, a numpy array or list of them like the vectors, or a `DeviceVector`
            if the device averages them; None once closed.
        make_space: function that makes a `DeviceSpace`; None: the host averages copies.
        maps, by_messages: whether device memory is shared with other ranks of the node, and sent by
            MPI.
    """

    make_space = None
    maps = by_messages = False

    def __init__(self, like):
        from collectives.memory.layout import Layout
        from collectives.memory.mirror import Mirror

        self._single = not isinstance(like, (list, tuple))
        arrays, stream = described(like, "like", "like[{}]", None, True)
        self._shape = [(array.dtype, array.size) for array in arrays]
        dtypes, sizes = zip(*self._shape)
        if "bfloat16" in dtypes:
            import ml_dtypes  # noqa: F401 - makes bfloat16 known to numpy

        addresses = [array.address for array in arrays]
        self._layout = Layout(dtypes, sizes, self._single)
        self._handover = Mirror(self._layout, addresses, copied_block(self._layout.size))
        self._guard = process.native().Guard()
        self.arrays = self._handover.arrays[0] if self._single else self._handover.arrays
        self._initial = addresses, stream, like
        try:
            self._take_initial()
        except BaseException:
            self.close()
            raise

    def _take_initial(self):
        addresses, stream, like = self._initial
        self._handover.point_to(addresses, stream)
        self._handover.fetch(like)
        self._handover.wait()

    def forget_initial(self):
        """Release the initial vector, which the engine has copied."""
        self._initial = None
        self._handover.forget()

    @property
    def ordinal(self) -> int:
        """The device's number."""
        return self._handover.ordinal

    @property
    def why_staged(self) -> str | None:
        """Why the device cannot average vectors; None if it can."""
        return self._handover.why_unchecked

    @property
    def size(self) -> int:
        """The vector's bytes."""
        return self._layout.size

    def use_in_place(self, block):
        """Let the device average, in blocks of `block` bytes; begin with the initial vector."""
        from collectives.memory.device_queue import DeviceQueue
        from collectives.memory.device_space import DeviceSpace
        from collectives.memory.in_place import InPlace

        queue = DeviceQueue(self._handover.ordinal)
        self.make_space = lambda dtypes, sent: DeviceSpace(dtypes, sent, queue, block)
        mirror, self._handover = self._handover, InPlace(self._layout, self._initial[0], queue)
        self._take_initial()
        self.arrays = self._handover.arrays
        mirror.close()

    def use_host(self):
        """Fall back to averaging on the host; begin with the initial vector."""
        from collectives.memory.mirror import Mirror

        in_place, self.make_space, self.maps = self._handover, None, False
        addresses, block = self._initial[0], copied_block(self._layout.size)
        self._handover = Mirror(self._layout, addresses, block)
        self._take_initial()
        self.arrays = self._handover.arrays[0] if self._single else self._handover.arrays
        in_place.close()

    def take(self, collective, vector, stream, returns):
        """Check a vector, which is the next to be copied; tell all ranks of an error in it."""
        collective.native.prepare_to_fetch(self._handover)
        with _telling(collective):
            name = "the vector" if self._single else "array {} of the vector"
            arrays, handle = described(vector, "the vector", name, stream, returns)
            self._check(vector, arrays)
            self._handover.point_to([array.address for array in arrays], handle)
            self._stream = stream if stream is not None else current_stream(handle)
            if self.make_space:
                self.arrays = self._handover.arrays

    def fetch(self, collective, vector):
        """Begin to copy the vector that was taken to the host."""
        with _telling(collective):
            # Both are used until the vector is back, even if the application drops them.
            self._handover.fetch((vector, self._stream))

    @contextlib.contextmanager
    def of(self, collective, vector, stream, returns):
        """Copy a vector to the host for a block, and the block's result back to the device."""
        if vector is self.arrays:  # a method calls another
            yield vector
            return
        with self._guard:
            self.take(collective, vector, stream, returns)
            self.fetch(collective, vector)
            try:
                with _telling(collective):
                    collective.native.wait_for(self._handover)
            except BaseException:
                self._handover.withdraw()
                raise
            end = self._handover.give_back if returns else self._handover.forget
            try:
                yield self.arrays
            except BaseException:
                # The application receives its vector as it is now.
                with contextlib.suppress(CudaError):
                    end()
                raise
            with _telling(collective):
                end()

    def begin(self, name, collective, vector, weight, stream):
        """Begin a call, which continues by itself once the device has checked the vector.

        Nothing is copied for a call that averages nothing.

        Args:
            name: "start"; or "call", which also waits for the result.
        """
        native = collective.native
        with self._guard:
            self.take(collective, vector, stream, True)
            call = native.pass_by(weight) if hasattr(native, "pass_by") else None
            if call is not None:
                return call if name == "start" else call.wait()
            return self._give(getattr(native, name), collective, vector, weight)

    def call(self, collective, vector, stream):
        """Make a call, which begins once the device has checked the vector.

        Nothing is copied for a call that averages nothing.
        """
        if not collective._takes_blocks:
            with self.of(collective, vector, stream, True) as arrays:
                return collective._call(arrays)
        native = collective.native
        with self._guard:
            self.take(collective, vector, stream, True)
            passed = native.pass_by() if hasattr(native, "pass_by") else None
            return passed or self._give(collective._call, collective, vector)

    def _give(self, call, collective, vector, *arguments):
        """Begin a call with the vector that was taken, while it is copied."""
        self._handover.return_in_blocks()
        self.fetch(collective, vector)
        try:
            return call(self.arrays, *arguments, self._handover)
        except BaseException:
            self._handover.withdraw()
            raise

    @property
    def on_host(self):
        """The host's copy; waits until the vector fetched last is in it."""
        if self.arrays is not None:
            self._handover.wait()
        return self.arrays

    def close(self):
        """Wait until the device has all results, and release all memory."""
        self.arrays = None
        self._handover.close()

    def _check(self, vector, arrays):
        """Raise if the arrays are unlike those that the collective was constructed with."""
        if self._single != (not isinstance(vector, (list, tuple))):
            kind = "one array" if self._single else f"a list of {len(self._shape)} arrays"
            raise TypeError(f"the vector is a {type(vector).__name__}, not {kind}")
        if len(arrays) != len(self._shape):
            raise ValueError(
                f"the vector has {len(arrays)} arrays, the collective's have {len(self._shape)}"
            )
        for index, (array, (dtype, size)) in enumerate(zip(arrays, self._shape)):
            name = "the vector" if self._single else f"array {index} of the vector"
            if array.dtype != dtype:
                raise TypeError(f"{name} is of dtype {array.dtype}, the collective's of {dtype}")
            if array.size != size:
                raise ValueError(f"{name} has {array.size} elements, the collective's have {size}")


def copied_block(size: int) -> int:
    """Return the bytes of the blocks in which a vector of this size is copied."""
    return max(BLOCK, 64 * -(-size // (64 * MOST_BLOCKS)))


def choose_path(collective, comm, node, given) -> tuple[str, str]:
    """Decide where a collective's vectors are averaged, and how they are sent; collective.

    They are averaged on their devices if the collective can do so, there are kernels for all of
    them, and either all ranks are on one node and can use each other's device memory, or MPI takes
    device memory without waiting for other work of the devices.

    Returns:
        "host", "staged" or "direct", and the reason, a sentence; see `Collective`.

    Raises:
        CudaError: a device has too little memory for that, or fails; on all ranks.
    """
    copies = collective._copies
    if copies is None:
        return "host", "vectors are in host memory"
    from mpi4py import MPI

    from collectives.memory.device_kernels import most_members

    if not collective._on_devices:
        return "staged", f"{type(collective).__name__} averages on the host"
    if comm.size == 1:
        return "staged", "there is one rank"
    if comm.size > most_members():
        return "staged", f"there are more than {most_members()} ranks"
    why_not = [reason for reason in comm.allgather(copies.why_staged) if reason]
    if why_not:
        return "staged", why_not[0]
    unmapped = "transport is messages"
    if given["transport"] != "messages":
        unmapped = node.why_not_mapped(copies.ordinal)
    copies.maps = unmapped is None
    if comm.allreduce(copies.maps and node.elsewhere is None, MPI.LAND):
        reason = "the ranks of the node use each other's device memory"
    elif given["transport"] == "shared":
        return "staged", f"ranks share host memory only: {unmapped or node.elsewhere}"
    else:
        answer = _is_aware(comm)
        if not answer.aware:
            return "staged", answer.reason
        copies.by_messages, reason = True, answer.reason
    block = cuda_blocks.choose(comm, copies.size)
    error = None
    try:
        copies.use_in_place(block)
    except (CudaError, MemoryError) as caught:
        error = caught
    raise_collectively(comm, error)
    return "direct", reason


def _is_aware(comm):
    """Return the answer of `cuda_aware.ask`, which is called only once."""
    global _answer
    known = comm.allgather(_answer)
    if None in known:
        _answer = cuda_aware.ask(comm)
        return _answer
    return next((answer for answer in known if not answer.aware), known[0])


@contextlib.contextmanager
def _telling(collective):
    """Tell all ranks of an error in the block."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        collective.fail(error)
        raise
