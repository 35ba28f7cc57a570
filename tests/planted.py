"""A copy of the mirror of vectors on devices, with bugs of which the environment plants one."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from build_once import build_cython

ROOT = Path(__file__).parent.parent
NAME = "collectives.memory.mirror"
SOURCE = ROOT / "collectives/memory/mirror.pyx"
# The environment's: which bug, by its place in BUGS; where the copy is.
PLANTED, COPY = "PLANTED_BUG", "PLANTED_COPY"


class Bug(NamedTuple):
    """Lines of the source, what the copy has in their place, and what the stand-in says of that."""

    lines: str
    instead: str
    words: str


UNORDERED = "nothing orders them"
UNSEEN = "the host touches pinned memory"
BUGS = {
    "a copy to the host that does not wait for the application": Bug(
        'check(b"cuStreamWaitEvent", cu.StreamWaitEvent(self.out, self.ready, 0))',
        "pass",
        UNORDERED,
    ),
    "a copy to the host that does not wait for the last one back": Bug(
        'check(b"cuStreamWaitEvent", cu.StreamWaitEvent(self.out, self.returned, 0))',
        "pass",
        UNORDERED,
    ),
    "an application that does not wait for the copy back": Bug(
        'check(b"cuStreamWaitEvent", cu.StreamWaitEvent(self.stream, self.returned, 0))',
        "pass",
        UNORDERED,
    ),
    "an application that does not wait for a copy that was withdrawn": Bug(
        "cu.StreamWaitEvent(self.stream, self.fetched[self.blocks - 1], 0)",
        "pass",
        UNORDERED,
    ),
    "averaging before the vector is on the host": Bug(
        "result = cu.EventQuery(event)",
        "result = SUCCESS",
        UNSEEN,
    ),
    "asking for an event that comes before the check": Bug(
        'check(b"cuEventRecord", cu.EventRecord(self.was_checked, self.out))',
        'check(b"cuEventRecord", cu.EventRecord(self.was_checked, self.stream))',
        UNSEEN,
    ),
    "asking for an event that comes before the copy": Bug(
        'check(b"cuEventRecord", cu.EventRecord(self.fetched[block], self.out))',
        'check(b"cuEventRecord", cu.EventRecord(self.fetched[block], self.stream))',
        UNSEEN,
    ),
    "averaging the block after those that are there": Bug(
        "self.here += 1",
        "self.here += 2",
        UNSEEN,
    ),
    "giving back the block after those that are averaged": Bug(
        "result = self._copy_back(end)",
        "result = self._copy_back(min(end + self.block, self.layout.size))",
        UNORDERED,
    ),
    "an event that says too early that the vector is back": Bug(
        'check(b"cuEventRecord", cu.EventRecord(self.returned, self.back))',
        'check(b"cuEventRecord", cu.EventRecord(self.returned, self.out))',
        UNORDERED,
    ),
    "giving back what is still averaged": Bug(
        "if self.here == self.blocks or self.error != SUCCESS:\n    self.fetching = False",
        "self.fetching = False\nself.return_until(self.layout.size)",
        UNORDERED,
    ),
    "a host that writes to the device's memory itself": Bug(
        'check(b"cuEventRecord", cu.EventRecord(self.returned, self.back))',
        "memset(<void *>self.device[0], 0, self.layout.bytes[0])",
        "the host touches device memory",
    ),
}
HEAD = f"""
import os
from libc.string cimport memset
cdef int planted = int(os.environ["{PLANTED}"])
"""


def planted_source(source: str) -> str:
    """Return the copy's source; ValueError where a bug's lines are not there, once."""
    for number, bug in enumerate(BUGS.values()):
        found = [indent for indent in range(4, 21, 4) if block(bug.lines, indent) in source]
        if len(found) != 1 or source.count(block(bug.lines, found[0])) != 1:
            raise ValueError(f"{SOURCE.name} does not have, once: {bug.lines}")
        (indent,) = found
        choice = (
            f"if planted == {number}:\n{textwrap.indent(bug.instead, '    ')}\n"
            f"else:\n{textwrap.indent(bug.lines, '    ')}"
        )
        source = source.replace(block(bug.lines, indent), block(choice, indent))
    first = source.index("\nimport ")
    return source[:first] + HEAD + source[first:]


def block(lines: str, indent: int) -> str:
    return "\n" + textwrap.indent(lines, " " * indent) + "\n"


@functools.cache
def build() -> str:
    """Build the copy where that has not been done, and return its path; skip where it cannot be."""
    source = planted_source(SOURCE.read_text())
    return build_cython("stand-in", source, f"{NAME.replace('.', '/')}.pyx", "-O0")


def environment(bug: str | None) -> dict[str, str]:
    """Return what makes a process that calls `load` have a bug, or the copy without any."""
    number = -1 if bug is None else list(BUGS).index(bug)
    return {PLANTED: str(number), COPY: build()}


def load():
    """Take the copy for the module, before anything else has imported that."""
    import collectives.memory

    spec = importlib.util.spec_from_file_location(NAME, os.environ[COPY])
    collectives.memory.mirror = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])
