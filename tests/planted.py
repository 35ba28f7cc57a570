"""Copies of modules for vectors on devices, with bugs of which the environment plants one."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from build_once import build_cython
from edits import Edit, Instead, Replace, Return, choices, drop

ROOT = Path(__file__).parent.parent
# The environment's: which bug of the module's, by its place; where the copy is.
PLANTED, COPY = "PLANTED_BUG", "PLANTED_COPY"


class Bug(NamedTuple):
    """An edit of the source, and what the stand-in says of that."""

    edit: Edit
    words: str


UNORDERED = "nothing orders them"
UNSEEN = "the host touches pinned memory"
UNTOLD = "that has not seen it end"
OF_MODULES = {
    "handover": {
        "a vector that is taken before the application has come to it": Bug(
            drop("Handover.fetch", "cu.StreamWaitEvent"), UNORDERED
        ),
        "an application that does not wait for what it gets back": Bug(
            drop("Handover._return", "cu.StreamWaitEvent"), UNORDERED
        ),
        "an event that says too early that the vector is back": Bug(
            Replace("Handover._return", "stream", "self.out", "cu.EventRecord"), UNORDERED
        ),
        "a point that says too early that the vector is there": Bug(
            Replace("Handover._mark", "self.out", "self.stream"), UNSEEN
        ),
        "averaging before the vector is on the host": Bug(
            Return("Handover._is_over", "True"), UNSEEN
        ),
        "averaging when a number is there that comes before the vector": Bug(
            Return("Handover._is_over", "self.timeline.reached(point - 1)"), UNSEEN
        ),
    },
    "mirror": {
        "a copy to the host that does not wait for the last one back": Bug(
            drop("Mirror._begin", "cu.StreamWaitEvent"), UNORDERED
        ),
        "an application that does not wait for a copy that was withdrawn": Bug(
            drop("Mirror.withdraw", "cu.StreamWaitEvent"), UNORDERED
        ),
        "asking for a point that comes before the copy": Bug(
            Replace("Mirror._begin", "self.timeline.last", "self.timeline.last - 1"), UNSEEN
        ),
        "averaging the block after those that are there": Bug(
            Replace("Mirror.has", "block", "block - 1", "self._is_over"), UNSEEN
        ),
        "giving back the block after those that are averaged": Bug(
            Replace(
                "Mirror._return_final",
                "end",
                "min(end + self.block, self.layout.size)",
                "self._copy_back",
            ),
            f"({UNORDERED}|{UNSEEN})",
        ),
        "giving back what is still averaged": Bug(
            Instead(
                "Mirror.has",
                "self.error",
                "self.fetching = False\nself.return_until(self.layout.size)",
            ),
            UNORDERED,
        ),
        "a check of what is given back before it is there": Bug(
            Replace("Mirror.give_back", "self.back", "self.out", "self._check_bounded"), UNORDERED
        ),
        "a host that writes to the device's memory itself": Bug(
            Instead(
                "Mirror.give_back",
                "self._return",
                "memset(<void *>self.device[0], 0, self.layout.bytes[0])",
            ),
            "the host touches device memory",
        ),
    },
    "peer_vectors": {
        "a step before its block is there": Bug(
            drop("PeerVectors._may_do", "self.handover.has"), UNSEEN
        ),
        "giving back the block after those that are returned": Bug(
            Replace(
                "PeerVectors._do",
                "self.blocks.end(block)",
                "min(self.blocks.end(block + 1), self.layout.size)",
                "self.handover.return_until",
            ),
            f"({UNORDERED}|{UNSEEN})",
        ),
    },
    "in_place": {
        "an application that does not wait for a check that was withdrawn": Bug(
            drop("InPlace.withdraw", "cu.StreamWaitEvent"), UNORDERED
        ),
        "a vector that is used before it is checked": Bug(Return("InPlace._begin", "0"), UNORDERED),
    },
    "device_queue": {
        "a ticket from before the pass": Bug(
            Instead("DeviceQueue.enter", "self.pending", "self.timeline.mark(self.stream)"), UNSEEN
        ),
        "a ticket for the passes of another stream": Bug(
            Replace("DeviceQueue.begun", "self.stream", "NULL"), UNSEEN
        ),
        "a ticket that is given twice": Bug(
            Replace("DeviceQueue.enter", "True", "not self.timeline.last", "self.pending"), UNSEEN
        ),
        "tickets that are always over": Bug(Return("DeviceQueue.over", "True"), UNSEEN),
    },
    "device_space": {
        "a kernel in another stream": Bug(
            Replace("DeviceSpace.begin_all_finite", "self.queue.stream", "NULL"), UNORDERED
        ),
        "an answer that is not waited for": Bug(drop("DeviceSpace._answer", "self.over"), UNSEEN),
    },
    "shared": {
        "a part that is begun before its vectors are there": Bug(
            Return("SharedBlocks.begun", "0"), UNTOLD
        ),
        "a block that is published before it is there": Bug(
            Replace("SharedBlocks.contribute_block", "self.layout.space.begun()", "0"), UNTOLD
        ),
        "a block that ends before it is averaged": Bug(
            Replace("SharedBlocks.average", "self.layout.space.begun()", "0"), UNTOLD
        ),
    },
    "memory": {
        "memory that is freed as long as others have mapped it": Bug(
            drop("SharedMemory.unmap", "self.mapped"),
            "device memory is freed that another process has mapped",
        ),
    },
    "ports": {
        "vectors that are open to others before they are there": Bug(
            Return("VersionsPort.is_quiet", "True"), UNTOLD
        ),
    },
    "formed_groups": {
        "averaging blocks that are not on the host": Bug(
            drop("FormedGroups.__init__", "self.group_reduction.arrival"), UNSEEN
        ),
        "going on without the application before its vector is there": Bug(
            Replace(
                "FormedGroups._forget_user",
                "self.queue.protocol.calling",
                "self.queue.protocol.leaving",
                "self.port.is_here",
            ),
            UNSEEN,
        ),
    },
    "group_port": {
        "giving back the blocks of a group before the last": Bug(
            Instead(
                "GroupsPort.begin_average",
                "self.reduction.arrival.more",
                "self.reduction.arrival.more = False",
            ),
            f"({UNORDERED}|{UNSEEN})",
        ),
    },
}
PACKAGES = {
    "shared": "exchange/shared",
    "memory": "exchange/shared",
    "ports": "engine",
    "formed_groups": "engine",
    "group_port": "engine",
    "peer_vectors": "engine",
}
HEAD = f"""
import os
from libc.string cimport memset
cdef int planted = int(os.environ["{PLANTED}"])
"""


def planted_source(source: str, module: str) -> str:
    """Return the copy's source; ValueError where a bug's place is gone."""
    edits = [bug.edit for bug in OF_MODULES[module].values()]
    source = choices(source, edits, "planted")
    first = re.search(r"^(import|from) ", source, re.MULTILINE).start()
    return source[:first] + HEAD + source[first:]


def source_of(module: str) -> Path:
    return ROOT / "collectives" / PACKAGES.get(module, "memory") / f"{module}.pyx"


@functools.cache
def build(module: str) -> str:
    """Build the copy where that has not been done, and return its path; skip where it cannot be."""
    path = source_of(module)
    source = planted_source(path.read_text(), module)
    options = mpi_headers() if module in PACKAGES else []
    return build_cython("stand-in", source, str(path.relative_to(ROOT)), "-O0", *options)


def mpi_headers() -> list[str]:
    """Return the compiler's options for modules that call MPI, as setup.py has left them."""
    return ast.literal_eval((ROOT / "build" / "mpi-flags").read_text())["extra_compile_args"]


def environment(bug: str | None, module: str) -> dict[str, str]:
    """Return what makes a process that calls `load` have a bug, or the copy without any."""
    number = -1 if bug is None else list(OF_MODULES[module]).index(bug)
    return {PLANTED: str(number), COPY: build(module)}


def cases(modules: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return all bugs of these modules, with the module's name first."""
    return [(module, bug) for module in modules for bug in OF_MODULES[module]]


def check_found(ended, module: str, bug: str):
    """Fail unless a process, or a job, ended because the stand-in has seen the bug.

    Args:
        ended: what has `returncode` and `stderr`.
    """
    words = OF_MODULES[module][bug].words
    assert ended.returncode != 0, ended
    assert re.search(rf"^stand-in\[\d+\]: .*{words}", ended.stderr, re.M), ended


def load(module: str):
    """Take the copy for the module, before anything else has imported that."""
    folder = PACKAGES.get(module, "memory")
    package = importlib.import_module(f"collectives.{folder.replace('/', '.')}")
    name = f"{package.__name__}.{module}"
    spec = importlib.util.spec_from_file_location(name, os.environ[COPY])
    sys.modules[name] = importlib.util.module_from_spec(spec)
    setattr(package, module, sys.modules[name])
    spec.loader.exec_module(sys.modules[name])
