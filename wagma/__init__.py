"""WAGMA-SGD for PyTorch, on wait-avoiding collectives over MPI.

``wagma.WAGMA`` averages a model beside the torch optimizers that train it; the command ``wagma``
trains, compares and simulates.
Importing the package loads neither torch nor MPI; its attributes load them on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wagma.optim import WAGMA

__version__ = "0.2.0"
__all__ = ["WAGMA", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "WAGMA":
        from wagma.optim import WAGMA

        return WAGMA
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
