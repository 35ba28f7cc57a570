"""``wagma info``: the environment of a job: its MPI, its nodes, the engine, the versions.

It needs only MPI and numpy, and tells which other packages are not installed.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from importlib import metadata

import wagma
from wagma import progress

PACKAGES = ("mpi4py", "numpy", "torch", "scikit-learn", "pillow", "matplotlib", "rich", "cupy")
CUPY_NAMES = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
NOT_INSTALLED = "not installed"
THREAD_LEVELS = {
    "MULTIPLE": "several collectives may be open, and the program may make MPI calls",
    "SERIALIZED": "one collective, and no other MPI calls while it is open",
    "FUNNELED": "sufficient for WAGMA_ENGINE=none only",
    "SINGLE": "too low for any engine mode",
}


def version(package: str) -> str:
    """Return the version of an installed distribution, or "not installed"."""
    for name in CUPY_NAMES if package == "cupy" else (package,):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return NOT_INSTALLED


def versions(mpi: bool = True) -> dict[str, str]:
    """Return the versions of all packages that a run may depend on, and of the MPI library."""
    return {
        "wagma": wagma.__version__,
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        **({"mpi": mpi_library()} if mpi else {}),
    }


def mpi_library() -> str:
    """Return the first line of the MPI library's version."""
    from mpi4py import MPI

    from collectives.process import library_name

    return " ".join(library_name(MPI.Get_library_version()).split())


def thread_level() -> str:
    """Return the name of the thread level that MPI provides."""
    from mpi4py import MPI

    from collectives.settings import level_name

    return level_name(MPI.Query_thread())


def engine_mode() -> str:
    """Return the engine's mode, and the variable that sets it."""
    from collectives.settings import CHOICES, VARIABLES

    variable, default = VARIABLES["engine"]
    mode = os.environ.get(variable)
    if mode is None:
        return f"{default} (default)"
    if mode not in CHOICES["engine"]:
        return f"{mode!r} ({variable}), not one of {', '.join(CHOICES['engine'])}"
    return f"{mode} ({variable})"


def native_engine() -> str:
    """Return whether the compiled extension can be loaded, or why not."""
    from collectives import process

    try:
        process.native()
    except ImportError as error:
        return f"cannot be loaded: {error}"
    return "loaded"


def cuda_awareness(comm) -> str:
    """Return whether MPI accepts device memory, and the reason; collective.

    Args:
        comm: An mpi4py communicator.
    """
    from collectives import cuda_aware

    aware, reason = cuda_aware.ask(comm)
    said = os.environ.get(cuda_aware.VARIABLE, "")
    if said not in ("", "0", "1"):
        reason += f" ({cuda_aware.VARIABLE} is {said!r}, neither 0 nor 1)"
    return f"{'yes' if aware else 'no'}: {reason}"


def device_sharing(comm) -> str:
    """Return whether ranks of this node can use each other's device memory; collective.

    Args:
        comm: An mpi4py communicator.
    """
    from mpi4py import MPI

    from collectives import cuda_ipc

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    reason = cuda_ipc.why_not(node)
    node.Free()
    return "yes: all bytes arrive" if reason is None else f"no: {reason}"


def device() -> tuple[str, str]:
    """Return the default device and its description; loads torch."""
    try:
        from wagma import devices
    except ImportError:
        return "cpu", "torch is not installed"
    kind = devices.accelerator()
    return ("cpu", devices.why_none()) if kind is None else (kind, devices.names_of(kind))


def path_of(kind: str, aware: str, sharing: str) -> str:
    """Return how ranks average models on a kind of device, and the reason.

    Args:
        kind: "cpu" or "cuda".
        aware: The answer of `cuda_awareness`.
        sharing: That of `device_sharing`, if all ranks are on one node; else "no".
    """
    if kind == "cpu":
        return "host: models are in host memory"
    if sharing.startswith("yes"):
        return "direct: ranks use each other's device memory; peer-to-peer methods are staged"
    if aware.startswith("yes"):
        return "direct: MPI takes device memory; peer-to-peer methods are staged"
    return f"staged: through pinned host memory; {aware.removeprefix('no: ')}"


def nodes(homes: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the number of ranks on each node, in words.

    Args:
        homes: The lowest rank of each rank's node.
        hosts: Each rank's host name, by which nodes are named.
    """
    named: dict[int, list[str]] = {}
    for home, count in Counter(homes).items():
        named.setdefault(count, []).append(hosts[home])
    return "; ".join(
        f"{count} on {'each of ' if len(names) > 1 else ''}{', '.join(names)}"
        for count, names in named.items()
    )


def transport(comm, one_node: bool) -> str:
    """Return how a collective over all ranks averages, as seen from this rank; collective.

    Args:
        comm: An mpi4py communicator.
        one_node: Whether all ranks are on one node.
    """
    import numpy as np

    from collectives import GroupAllreduce

    if comm.size == 1:
        return "none: one rank"
    try:
        with GroupAllreduce(comm, np.zeros(1), group_size=1) as allreduce:
            shares = allreduce.transport == "shared"
    except (ImportError, RuntimeError, ValueError) as error:  # the same on all ranks
        return f"unavailable: {error}"
    if shares and not one_node:
        return "shared within nodes, messages between"
    return "shared" if shares else "messages"


def windows(comm) -> str:
    """Return whether ranks of this node can use each other's arrays, and which; collective.

    Args:
        comm: An mpi4py communicator.
    """
    from mpi4py import MPI

    from collectives import empty
    from collectives.memory import other_processes
    from collectives.memory import windows as native

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    offers = node.allgather(other_processes.offer())
    copies = all(node.allgather(all(map(other_processes.may_access, offers))))
    alone = node.size == 1
    node.Free()
    if alone:
        return "none: one rank on this node"
    if not native.has(empty(comm, 1).ctypes.data):
        return "no: this node's ranks cannot map each other's memory"
    return f"yes; copies between processes: {'permitted' if copies else 'not permitted'}"


def by_rank(values: Sequence[str]) -> str:
    """Return the ranks' common value, or each value with its ranks."""
    from collectives.agreement import by_value, list_values

    ranks = by_value(values)
    return values[0] if len(ranks) == 1 else list_values(ranks)


def gather(comm) -> list[tuple[str, str]]:
    """Return the table's rows on rank 0, and none elsewhere; collective.

    Only rank 0 looks for a GPU: that loads torch. The others sleep meanwhile.

    Args:
        comm: An mpi4py communicator.
    """
    from mpi4py import MPI

    from collectives.node import Node
    from wagma.job import from_rank_0

    node = Node(comm)
    node.free()
    level = thread_level()
    kind, details = from_rank_0(device, comm)
    aware = cuda_awareness(comm)
    sharing = device_sharing(comm)
    one_node = node.elsewhere is None
    answers = aware, sharing if one_node else "no"
    if comm.size == 1:
        answers = "no: there is one rank", "no"
    mine = {
        "MPI library": mpi_library(),
        "MPI standard": ".".join(map(str, MPI.Get_version())),
        "thread level": f"{level}: {THREAD_LEVELS[level]}",
        "engine mode": engine_mode(),
        "native engine": native_engine(),
        "transport": transport(comm, one_node=one_node),
        "windows": windows(comm),
        "device": f"{kind}: {details}",
        "path": path_of(kind, *answers),
        "CUDA-aware MPI": aware,
        "CUDA IPC": sharing,
        "wagma": wagma.__version__,
        "Python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }
    homes, hosts = comm.gather(node.ranks[0]), comm.gather(MPI.Get_processor_name())
    everyone = comm.gather(mine)
    if comm.rank != 0:
        return []
    rows = [(name, by_rank([each[name] for each in everyone])) for name in mine]
    return [
        *rows[:2],
        ("ranks", str(comm.size)),
        ("ranks per node", nodes(homes, hosts)),
        *rows[2:],
    ]


def show(rows: Sequence[tuple[str, str]]) -> None:
    """Print the table: with rich on a terminal, else as plain lines."""
    output = progress.terminal()
    if output is not None and version("rich") != NOT_INSTALLED:
        from rich.console import Console
        from rich.table import Table

        table = Table("", "wagma info", header_style="bold")
        table.columns[0].style = "cyan"
        for name, value in rows:
            table.add_row(name, value)
        Console(file=output, markup=False).print(table)
        return
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")


def info(comm) -> None:
    """Print the job's environment, on rank 0; collective.

    Args:
        comm: An mpi4py communicator.
    """
    rows = gather(comm)
    if rows:
        show(rows)
