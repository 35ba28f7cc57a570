"""What Python runs first in every process that a test launches: it saves most of what torch takes.

Every torch optimizer imports torch._dynamo, to be left alone by it: two seconds, as much as most of
these processes take otherwise. Here it is loaded when anything else is asked of it. And the garbage
collector looks at nothing that torch makes while it is loaded: a quarter of that time.

Where the variable WITHOUT_PLOTS is set, there is no matplotlib, and nothing is said of that.
"""

import gc
import logging
import os
import sys
from importlib.machinery import PathFinder
from types import ModuleType

NAME = "torch._dynamo"


class Deferred(ModuleType):
    """torch._dynamo with what optimizers ask of it while nothing is compiled."""

    def graph_break(self, *_):
        """Do nothing, as it does outside of what is compiled."""

    def disable(self, function, *_, **__):
        """Return the function as it is."""
        return function

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)  # which only the import system asks for
        self.load()
        return getattr(self, name)

    def load(self):
        self.__class__ = ModuleType
        self.__spec__.loader.load(self)


class Finder:
    """Finds torch and torch._dynamo, and sees the latter's modules imported."""

    @staticmethod
    def find_spec(name, path, target=None):
        if name.startswith(f"{NAME}.") and isinstance(sys.modules[NAME], Deferred):
            sys.modules[NAME].load()
        if name not in ("torch", NAME):
            return None
        spec = PathFinder.find_spec(name, path)
        if name == "torch" and spec:
            spec.loader.exec_module = uncollected(spec.loader.exec_module)
            return spec
        spec.loader.load = spec.loader.exec_module
        spec.loader.create_module = lambda spec: Deferred(spec.name)
        spec.loader.exec_module = lambda module: None
        return spec


def uncollected(execute):
    """Return what executes a module, and whose objects are none of the garbage collector's."""

    def executed(module):
        gc.disable()
        try:
            execute(module)
        finally:
            gc.freeze()
            gc.enable()

    return executed


sys.meta_path.insert(0, Finder)
if "WITHOUT_PLOTS" in os.environ:
    sys.modules["matplotlib"] = None
    for name in ("wagma.plots", "wagma.wpsgd.figure"):
        logging.getLogger(name).setLevel(logging.ERROR)
