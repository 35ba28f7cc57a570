"""WAGMA-SGD for PyTorch, on wait-avoiding collectives over MPI.

``wagma.WAGMA`` wraps any torch optimizer; the command ``wagma`` trains an example. Importing the
package loads neither torch nor MPI: what needs them is loaded when it is first asked for.
"""

__version__ = "0.1.0"
__all__ = ["WAGMA", "__version__"]


def __getattr__(name: str):
    if name == "WAGMA":
        from wagma.optim import WAGMA

        return WAGMA
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
