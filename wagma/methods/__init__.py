"""The methods that a job can train by.

`METHODS` maps names on the command line to methods, `REFERENCES` to torch's own methods, for
comparisons. `DEFAULT` names the method that is used if none is given. Other packages declare
methods by entry points of the group "wagma.methods", each of which is a `Method`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.metadata import entry_points

from wagma.methods.declarations import DEFAULT, METHODS, REFERENCES
from wagma.methods.method import Choice, Method, Option

__all__ = ["DEFAULT", "METHODS", "REFERENCES", "Choice", "Method", "Option", "example", "named"]


def declared() -> Iterator[Method]:
    """Yield the methods that installed packages declare; warn of those that cannot be used."""
    taken = {*METHODS, *REFERENCES}
    for point in sorted(entry_points(group="wagma.methods")):
        try:
            method = point.load()
        except Exception as error:  # whatever a package's module raises
            problem = f"{type(error).__name__}: {error}"
        else:
            if not isinstance(method, Method):
                problem = f"it is a {type(method).__name__}, not a wagma.methods.Method"
            elif method.name in taken:
                problem = f"there is a method {method.name!r} already"
            else:
                taken.add(method.name)
                yield method
                continue
        warnings.warn(f"entry point {point.value!r} of wagma.methods: {problem}", stacklevel=2)


METHODS.update({method.name: method for method in declared()})


def named(name: str) -> Method:
    """Return a method or reference.

    Args:
        name: its name on the command line; after a colon, options may follow.

    Raises:
        KeyError: there is no method or reference of this name.
    """
    name = name.partition(":")[0]
    return METHODS.get(name) or REFERENCES[name]


def example(name: str) -> str | None:
    """Return how an option is written on the command line, None if no method has it.

    Args:
        name: the option's name, without a value.
    """
    for method in METHODS.values():
        option = method.option(name)
        if option is not None:
            return f"{method.name}:{option.usage}"
    return None
