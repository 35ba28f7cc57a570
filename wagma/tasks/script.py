"""A user's script as a task: `wagma train --script my_task.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from wagma.job import UsageError
from wagma.tasks.contract import Task


def load(path: Path) -> Task:
    """Import a script and return its functions as a task.

    Its directory is put on the module search path, as Python does for a script, and the module has
    the file's name, so that it can import its neighbors and DataLoader workers can find it.

    Raises:
        UsageError: It cannot be read, or lacks a function. Its own exceptions pass through.
    """
    module = import_path(path)
    functions = {name: getattr(module, name, None) for name in ("model", "data", "loss")}
    missing = [f"{name}()" for name, function in functions.items() if not callable(function)]
    if missing:
        raise UsageError(
            f"{path} has no function {' and no '.join(missing)}: `wagma train --help` says what "
            "a script defines"
        )
    for name in ("metrics", "optimizer", "scheduler", "work", "log"):
        functions[name] = getattr(module, name, None)
        if functions[name] is not None and not callable(functions[name]):
            raise UsageError(f"{path}: {name} is not a function")
    return Task(path.name, **functions)


def import_path(path: Path) -> ModuleType:
    """Import a Python file by its path, and return the module."""
    name = path.stem
    if name in sys.modules:
        raise UsageError(f"{path} has the name of a Python module, {name}: give it another one")
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None:
        raise UsageError(f"{path} is not a Python file: its name does not end in .py")
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, str(path.parent.absolute()))
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module
