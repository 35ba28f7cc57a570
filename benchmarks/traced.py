"""Durations of the engine's calls of the CUDA driver and of MPI, by thread.

An interposed library, traced.c, is compiled for each: the driver's is named by WAGMA_CUDA_LIBRARY,
so that calls by torch or CuPy themselves are not counted; MPI's is preloaded.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("traced.c")
# The MPI functions that the engine calls while it averages.
MPI_FUNCTIONS = (
    *("MPI_Iallgather", "MPI_Ialltoall", "MPI_Improbe", "MPI_Imrecv", "MPI_Iprobe", "MPI_Irecv"),
    *("MPI_Isend", "MPI_Recv", "MPI_Recv_init", "MPI_Request_free", "MPI_Start", "MPI_Test"),
    *("MPI_Testall", "MPI_Testsome"),
)
# The driver functions that a rank uses to try MPI, beside the engine's.
PLAIN = (
    *("cuDeviceGetCount", "cuDriverGetVersion", "cuEventQuery", "cuLaunchHostFunc"),
    "cuStreamCreate",
)
# The driver functions that may wait for a device.
WAITING = (
    *("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cuMemAlloc_v2"),
    *("cuMemFree_v2", "cuMemHostAlloc", "cuMemFreeHost", "cuIpcOpenMemHandle_v2"),
    "cuIpcCloseMemHandle",
)
KINDS = "CUDA", "MPI"
THREADS = "main", "progress"


def environment(folder: Path) -> dict[str, str]:
    """Compile both libraries into a folder; return the variables with which they are used.

    Raises:
        RuntimeError: there is no C compiler, or no driver.
    """
    from collectives.memory import driver

    cuda = os.environ.get("WAGMA_CUDA_LIBRARY") or "libcuda.so.1"
    try:
        loaded = ctypes.CDLL(cuda)
    except OSError as error:
        raise RuntimeError(f"no CUDA driver: {error}") from None
    optional = [*driver.OPTIONAL, *driver.OF_KERNELS, *driver.OF_IPC, *PLAIN]
    names = [name for name in (*driver.NAMES, *optional) if hasattr(loaded, name)]
    ours = build(folder, "CUDA", names)
    return {
        "TRACED_CUDA": cuda,
        "TRACED_MPI": mpi_library(),
        "TRACED_CUDA_NAMES": " ".join(names),
        "TRACED_CUDA_LIBRARY": ours,
        "TRACED_MPI_LIBRARY": (preloaded := build(folder, "MPI", MPI_FUNCTIONS)),
        "WAGMA_CUDA_LIBRARY": ours,
        "LD_PRELOAD": " ".join(filter(None, [preloaded, os.environ.get("LD_PRELOAD")])),
    }


def mpi_library() -> str:
    """Return the path of a library linked with MPI, whose functions it resolves: mpi4py's."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return MPI.__file__


def build(folder: Path, kind: str, names) -> str:
    """Compile the library for functions with these names; return its path."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise RuntimeError("no C compiler (CC, cc) for what counts calls")
    target = folder / f"traced-{kind}.so"
    functions = " ".join(f"F({name})" for name in names)
    subprocess.run(
        [
            *(compiler, "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w"),
            *(f"-DFUNCTIONS={functions}", f'-DVARIABLE="TRACED_{kind}"'),
            *(SOURCE, "-o", target, "-ldl"),
        ],
        check=True,
    )
    return str(target)


class Times(ctypes.Structure):
    """As in traced.c."""

    _fields_ = [(name, ctypes.c_longlong) for name in ("calls", "longest")]


class Traced:
    """The calls counted in this process since the last `reset`.

    Raises:
        RuntimeError: the process was not started with `environment`.
    """

    def __init__(self):
        self._of = {}
        for kind, names in zip(KINDS, (self._driver_names(), MPI_FUNCTIONS), strict=True):
            library = ctypes.CDLL(os.environ[f"TRACED_{kind}_LIBRARY"])
            library.traced_times.restype = ctypes.POINTER(Times * len(names) * len(THREADS))
            self._of[kind] = names, library.traced_times().contents

    @staticmethod
    def _driver_names():
        try:
            return os.environ["TRACED_CUDA_NAMES"].split()
        except KeyError:
            raise RuntimeError("calls are counted under gpu.py --all alone") from None

    def reset(self):
        for _, times in self._of.values():
            ctypes.memset(times, 0, ctypes.sizeof(times))

    def read(self, kind: str, thread: str) -> dict[str, Times]:
        """Return the calls of a kind on a thread, by function."""
        names, times = self._of[kind]
        found = dict(zip(names, times[THREADS.index(thread)], strict=True))
        return {name: each for name, each in found.items() if each.calls}

    def longest(self, kind: str, thread: str = "progress"):
        """Return the longest call of a kind on a thread, None if there was none."""
        found = self.read(kind, thread)
        if not found:
            return None
        name = max(found, key=lambda each: found[each].longest)
        calls = sum(each.calls for each in found.values())
        return {"function": name, "seconds": found[name].longest / 1e9, "calls": calls}

    def waits(self) -> dict[str, int]:
        """Return the numbers of calls of driver functions that may wait for a device."""
        found = {}
        for thread in THREADS:
            for name, times in self.read("CUDA", thread).items():
                if name in WAITING:
                    found[name] = found.get(name, 0) + times.calls
        return found
