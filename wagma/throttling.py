"""What holds a process back from outside: its cgroup's limit on processors, and its GPU's clock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["REASONS", "Cgroup", "Gpu", "Limited", "Throttling"]

EVERY = 0.5  # seconds between looks, each of which takes tens of microseconds
# Why a GPU lowers its clock, by NVML's bits; idleness and clocks that were set are no such reasons.
REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "another GPU's clock",
    0x20: "temperature",
    0x40: "temperature, by the hardware",
    0x80: "power brake",
}
# Of the two versions of cgroups: the name of the time for which processes were stopped, in seconds.
STOPPED = {"throttled_usec": 1e-6, "throttled_time": 1e-9}


class Limited(NamedTuple):
    """How a process has been limited since it was last looked at.

    Attributes:
        throttled: seconds in which its cgroup's processes were stopped, as they had used up what
            they may have of the processors; of all processors together.
        gpu: `REASONS` for which the GPU's clock was lower at the last look, as a sum of their bits.
    """

    throttled: float
    gpu: int


class Throttling:
    """Looks at what limits this process, at most every `EVERY` seconds.

    Args:
        cgroup: of this process.
        gpu: the one that it trains on.
        clock: function that returns the time, in seconds.
    """

    def __init__(
        self, cgroup: Cgroup, gpu: Gpu, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cgroup, self._gpu, self._clock = cgroup, gpu, clock
        self._before, self._reasons = cgroup.throttled(), gpu.reasons()
        self._next = clock() + EVERY

    def limited(self) -> Limited:
        """Return how the process was limited since the last call, as far as it was looked at."""
        if self._clock() < self._next:
            return Limited(0.0, self._reasons)
        before, self._before = self._before, self._cgroup.throttled()
        self._reasons = self._gpu.reasons()
        self._next = self._clock() + EVERY
        return Limited(max(0.0, self._before - before), self._reasons)


class Cgroup:
    """The cgroup of a process, of version 2 or 1, with those that it is in.

    Args:
        mounts: where cgroups are mounted.
        own: the file that names the process's.
    """

    def __init__(
        self, mounts: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
    ) -> None:
        self._files: list[Path] = []
        with contextlib.suppress(OSError):  # there may be none here
            for line in own.read_text(encoding="utf-8").splitlines():
                self._files += files_of(line, mounts)

    def throttled(self) -> float:
        """Return the seconds for which their processes have been stopped; 0 if not known."""
        seconds = 0.0
        for file in self._files:
            with contextlib.suppress(OSError, ValueError):
                for line in file.read_text(encoding="utf-8").splitlines():
                    name, _, value = line.partition(" ")
                    seconds += STOPPED.get(name, 0.0) * int(value)
        return seconds


def files_of(line: str, mounts: Path) -> Iterator[Path]:
    """Yield the statistics of a cgroup and those that it is in, as far as they can be read.

    Args:
        line: of /proc/self/cgroup. In a container its path may be one that only the host has.
        mounts: where cgroups are mounted.
    """
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    # Version 2, which has no controllers here, is mounted beside version 1 if both are in use.
    for root in (mounts / controllers, mounts / ("cpu" if controllers else "unified")):
        inside = root / path.lstrip("/")
        found = [
            place / "cpu.stat"
            for place in (inside, *inside.parents)
            if place.is_relative_to(root) and (place / "cpu.stat").is_file()
        ]
        if found:
            yield from found
            return


class Gpu:
    """A GPU's clock, as NVML sees it; nothing is known without the package ``nvidia-ml-py``.

    Args:
        device: where the process trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        if device.type != "cuda":
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            import torch

            name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(name.encode())
            self._nvml = pynvml
            self.reasons()
        except Exception:  # another vendor's, another version, no permission: it is evidence only
            self._nvml = None

    def reasons(self) -> int:
        """Return why the clock is lower now, a sum of bits of `REASONS`; 0: it is not."""
        if self._nvml is None:
            return 0
        try:
            bits = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        except self._nvml.NVMLError:  # not supported by this GPU
            self._nvml = None
            return 0
        return int(bits) & sum(REASONS)
