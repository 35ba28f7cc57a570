"""Copies of modules for vectors on devices, with bugs of which the environment plants one."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from build_once import build_cython

ROOT = Path(__file__).parent.parent
# The environment's: which bug of the module's, by its place; where the copy is.
PLANTED, COPY = "PLANTED_BUG", "PLANTED_COPY"


class Bug(NamedTuple):
    """Lines of the source, what the copy has in their place, and what the stand-in says of that."""

    lines: str
    instead: str
    words: str


UNORDERED = "nothing orders them"
UNSEEN = "the host touches pinned memory"
UNTOLD = "that has not seen it end"
MARK = "result = self.timeline.mark(self.stream)"
INTERRUPTED = """\
while self.port.copying or self.queue.protocol.calling and not self.port.is_here():
    pthread_mutex_unlock(&self.lock)
    sched_yield()
    pthread_mutex_lock(&self.lock)"""
LAUNCH = """\
self.queue.leave(mode, b"cuLaunchKernel", self.queue.kernels.all_finite(
    self.dtypes[i], flag, <Address>x, count, self.queue.stream))"""
OF_MODULES = {
    "handover": {
        "a vector that is taken before the application has come to it": Bug(
            'check(b"cuStreamWaitEvent", cu.StreamWaitEvent(self.out, self.ready, 0))',
            "pass",
            UNORDERED,
        ),
        "an application that does not wait for what it gets back": Bug(
            'return check(b"cuStreamWaitEvent", cu.StreamWaitEvent(self.stream, self.returned, 0))',
            "return 0",
            UNORDERED,
        ),
        "an event that says too early that the vector is back": Bug(
            'check(b"cuEventRecord", cu.EventRecord(self.returned, stream))',
            'check(b"cuEventRecord", cu.EventRecord(self.returned, self.out))',
            UNORDERED,
        ),
        "a point that says too early that the vector is there": Bug(
            'return check(b"cuStreamWriteValue32", self.timeline.mark(self.out))',
            'return check(b"cuStreamWriteValue32", self.timeline.mark(self.stream))',
            UNSEEN,
        ),
        "averaging before the vector is on the host": Bug(
            "return self.error != SUCCESS or self.timeline.reached(point)", "return True", UNSEEN
        ),
        "averaging when a number is there that comes before the vector": Bug(
            "return self.error != SUCCESS or self.timeline.reached(point)",
            "return self.timeline.reached(point - 1)",
            UNSEEN,
        ),
    },
    "mirror": {
        "a copy to the host that does not wait for the last one back": Bug(
            'check(b"cuStreamWaitEvent", cu.StreamWaitEvent(self.out, self.returned, 0))',
            "pass",
            UNORDERED,
        ),
        "an application that does not wait for a copy that was withdrawn": Bug(
            "cu.StreamWaitEvent(self.stream, self.taken, 0)",
            "pass",
            UNORDERED,
        ),
        "asking for a point that comes before the copy": Bug(
            "self.first_point = self.timeline.last - self.blocks + 1",
            "self.first_point = self.timeline.last - self.blocks",
            UNSEEN,
        ),
        "averaging the block after those that are there": Bug(
            "if not self._is_over(self.first_point + block):\n    return False",
            "if not self._is_over(self.first_point + block - 1):\n    return False",
            UNSEEN,
        ),
        "giving back the block after those that are averaged": Bug(
            "result = self._copy_back(end)",
            "result = self._copy_back(min(end + self.block, self.layout.size))",
            f"({UNORDERED}|{UNSEEN})",
        ),
        "giving back what is still averaged": Bug(
            "if block == self.blocks - 1 or self.error != SUCCESS:\n    self.fetching = False",
            "self.fetching = False\nself.return_until(self.layout.size)",
            UNORDERED,
        ),
        "a check of what is given back before it is there": Bug(
            "self._check_bounded(self.back)", "self._check_bounded(self.out)", UNORDERED
        ),
        "a host that writes to the device's memory itself": Bug(
            "self._return(self.back)",
            "memset(<void *>self.device[0], 0, self.layout.bytes[0])",
            "the host touches device memory",
        ),
    },
    "peer_vectors": {
        "a step before its block is there": Bug(
            "if self.arrives and step.user != NULL and not self.handover.has("
            "self.blocks.end(block)):\n    return False",
            "pass",
            UNSEEN,
        ),
        "giving back the block after those that are returned": Bug(
            "self.handover.return_until(self.blocks.end(block))",
            "self.handover.return_until(min(self.blocks.end(block + 1), self.layout.size))",
            f"({UNORDERED}|{UNSEEN})",
        ),
    },
    "in_place": {
        "an application that does not wait for a check that was withdrawn": Bug(
            "cu.StreamWaitEvent(self.stream, self.taken, 0)", "pass", UNORDERED
        ),
        "a vector that is used before it is checked": Bug(
            "return self._check_finite()", "return 0", UNORDERED
        ),
    },
    "device_queue": {
        "a ticket from before the pass": Bug(
            "self.pending = True\nreturn True",
            f"{MARK.removeprefix('result = ')}\nreturn True",
            UNSEEN,
        ),
        "a ticket for the passes of another stream": Bug(
            MARK, MARK.replace("self.stream", "NULL"), UNSEEN
        ),
        "a ticket that is given twice": Bug(
            "self.pending = True", "self.pending = not self.timeline.last", UNSEEN
        ),
        "tickets that are always over": Bug(
            "if self.timeline.reached(ticket) or self.error != SUCCESS:\n    return True",
            "return True",
            UNSEEN,
        ),
    },
    "device_space": {
        "a kernel in another stream": Bug(
            LAUNCH, LAUNCH.replace("self.queue.stream", "NULL"), UNORDERED
        ),
        "an answer that is not waited for": Bug(
            "while not self.over(ticket):\n    usleep(PAUSE)", "pass", UNSEEN
        ),
    },
    "shared": {
        "a part that is begun before its vectors are there": Bug(
            "self.entry_ticket = self.layout.space.begun()", "self.entry_ticket = 0", UNTOLD
        ),
        "a block that is published before it is there": Bug(
            "self.copies[self.copied % AHEAD] = self.layout.space.begun()",
            "self.copies[self.copied % AHEAD] = 0",
            UNTOLD,
        ),
        "a block that ends before it is averaged": Bug(
            "averaging.ticket = self.layout.space.begun()", "averaging.ticket = 0", UNTOLD
        ),
    },
    "shared_memory": {
        "memory that is freed as long as others have mapped it": Bug(
            "self.mapped = []", "pass", "device memory is freed that another process has mapped"
        ),
    },
    "ports": {
        "vectors that are open to others before they are there": Bug(
            "return self.space.over(self.space.begun())", "return True", UNTOLD
        ),
    },
    "formed_groups": {
        "averaging blocks that are not on the host": Bug(
            "self.group_reduction.staged = self.reduction.staged", "pass", UNSEEN
        ),
    },
    "group_averages": {
        "giving back the blocks of a group before the last": Bug(
            "self.group_reduction.more = group.next == NULL or not group.next.returns",
            "self.group_reduction.more = False",
            f"({UNORDERED}|{UNSEEN})",
        ),
        "going on without the application before its vector is there": Bug(
            INTERRUPTED, INTERRUPTED.replace("calling", "leaving"), UNSEEN
        ),
    },
}
PACKAGES = {
    "shared": "exchange",
    "shared_memory": "exchange",
    "ports": "engine",
    "formed_groups": "engine",
    "group_averages": "engine",
    "peer_vectors": "engine",
}
HEAD = f"""
import os
from libc.string cimport memset
cdef int planted = int(os.environ["{PLANTED}"])
"""


def planted_source(source: str, module: str) -> str:
    """Return the copy's source; ValueError where a bug's lines are not there, once."""
    for number, bug in enumerate(OF_MODULES[module].values()):
        found = [indent for indent in range(4, 21, 4) if block(bug.lines, indent) in source]
        if len(found) != 1 or source.count(block(bug.lines, found[0])) != 1:
            raise ValueError(f"{module}.pyx does not have, once: {bug.lines}")
        (indent,) = found
        choice = (
            f"if planted == {number}:\n{textwrap.indent(bug.instead, '    ')}\n"
            f"else:\n{textwrap.indent(bug.lines, '    ')}"
        )
        source = source.replace(block(bug.lines, indent), block(choice, indent))
    first = re.search(r"^(import|from) ", source, re.MULTILINE).start()
    return source[:first] + HEAD + source[first:]


def block(lines: str, indent: int) -> str:
    return "\n" + textwrap.indent(lines, " " * indent) + "\n"


@functools.cache
def build(module: str) -> str:
    """Build the copy where that has not been done, and return its path; skip where it cannot be."""
    folder = PACKAGES.get(module, "memory")
    path = f"collectives/{folder}/{module}.pyx"
    source = planted_source((ROOT / path).read_text(), module)
    options = [] if folder == "memory" else mpi_headers()
    return build_cython("stand-in", source, path, "-O0", *options)


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
    package = importlib.import_module(f"collectives.{PACKAGES.get(module, 'memory')}")
    name = f"{package.__name__}.{module}"
    spec = importlib.util.spec_from_file_location(name, os.environ[COPY])
    sys.modules[name] = importlib.util.module_from_spec(spec)
    setattr(package, module, sys.modules[name])
    spec.loader.exec_module(sys.modules[name])
