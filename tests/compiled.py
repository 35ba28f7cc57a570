"""Compiled protocols whose ports are Python objects, made of what the .pxd files declare."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

from build_once import build_cython

FOLDER = Path(__file__).resolve().parents[1] / "collectives" / "protocols"
METHOD = re.compile(r"cdef (\w[\w ]*?) (\w+)\(\s*self(?:,\s*)?([^)]*?)\s*\) noexcept nogil")


def declared(module: str, name: str) -> list[tuple[str, str, str, str]]:
    """Return a protocol's methods: what they return, name, parameters, names of these."""
    text = (FOLDER / f"{module}.pxd").read_text()
    body = re.search(rf"^cdef class {name}\b.*?:\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    return [
        (returned, method, parameters, ", ".join(re.findall(r"(\w+)(?:,|$)", parameters)))
        for returned, method, parameters in METHOD.findall(body[1])
    ]


def of_python(*classes: tuple[str, str]) -> str:
    """Return the source of a subclass Python… whose methods are those of `port`, of Python.

    Args:
        classes: modules and names of its bases, the nearest one last.
    """
    module, base = classes[-1]
    lines = [
        f"from collectives.protocols.{module} cimport {base}",
        f"cdef class Python{base}({base}):",
        "    cdef object port",
        "    def __init__(self, port):",
        "        self.port = port",
    ]
    for returned, method, parameters, names in [each for of in classes for each in declared(*of)]:
        lines += [
            f"    cdef {returned} {method}(self, {parameters}) noexcept nogil:",
            "        with gil:",
            f"            {'' if returned == 'void' else 'return '}self.port.{method}({names})",
        ]
    return "\n".join([*lines, ""])


def to_python(module: str, name: str, attribute: str, *methods: str) -> str:
    """Return these methods of a class, of an attribute, so that Python can call them."""
    return "".join(
        f"    def {method}(self, {parameters}):\n"
        f"        {'' if returned == 'void' else 'return '}self.{attribute}.{method}({names})\n"
        for returned, method, parameters, names in declared(module, name)
        if method in methods
    )


@functools.cache
def built(name: str, source: str):
    """Return the module of this source, built where that has not been done."""
    # It depends on what is declared there.
    path = build_cython("rank", source, f"collectives/protocols/{name}.pyx", "-O0")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
