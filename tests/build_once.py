"""What tests compile: built where that has not been done, and found by its contents afterwards."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent  # one for all trees of links
MEMORY = ROOT / "collectives" / "memory"
# Those of setup.py for modules that are not Python's.
DIRECTIVES = ("-X", "boundscheck=False,wraparound=False,cdivision=True")


def build_once(kind: str, name: str, content: str, build: Callable[[Path], None]) -> str:
    """Return the path of a file that `build` makes of these contents, under build/.

    Of several processes that ask for it at the same time one builds it, and the others wait.

    Args:
        kind: the folder in build/.
        name: the file's.
        content: all that it depends on.
        build: function of the path at which it makes the file, in a folder of its own.
    """
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    target = ROOT / "build" / kind / digest / name
    if target.exists():
        return str(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                build(Path(folder) / name)
                os.replace(Path(folder) / name, target)
    return str(target)


def build_cython(kind: str, source: str, path: str, *options: str) -> str:
    """Return the path of an extension compiled of Cython's `source`; skip where it cannot be.

    Args:
        kind: see `build_once`.
        path: the module's, such as package/module.pyx; one of the project has its .pxd there.
        options: the C compiler's.
    """
    folders = {MEMORY, (ROOT / path).parent}
    files = sorted(file for folder in folders for file in folder.glob("*.pxd"))
    declared = "".join(file.read_text() for file in files)

    def build(target):
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None or importlib.util.find_spec("Cython") is None:
            pytest.skip("no C compiler or no Cython to build an extension with")
        module = target.parent / path
        module.parent.mkdir(parents=True, exist_ok=True)
        for package in module.relative_to(target.parent).parents[:-1]:
            (target.parent / package / "__init__.py").touch()
        module.write_text(source)
        beside = (ROOT / path).with_suffix(".pxd")
        if beside.exists():
            shutil.copy(beside, module.parent)
        generated = target.with_suffix(".c")
        translate = [sys.executable, "-m", "cython", "-3", *DIRECTIVES, "-I", ROOT, "-o", generated]
        subprocess.run([*translate, module], check=True)
        folders = [MEMORY, MEMORY.parent / "protocols"]
        headers = [f"-I{sysconfig.get_paths()['include']}", *(f"-I{folder}" for folder in folders)]
        compile_it = [compiler, "-w", "-fPIC", "-shared", *options, *headers]
        subprocess.run([*compile_it, generated, "-o", target], check=True)

    # One for all Pythons that load it, such as those of other machines.
    content = repr([source, declared, options, DIRECTIVES, sysconfig.get_config_var("EXT_SUFFIX")])
    return build_once(kind, Path(path).with_suffix(".so").name, content, build)
