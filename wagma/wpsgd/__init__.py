"""WP-SGD: linear models from nodes that consume different numbers of samples.

Cheng, Li and Zhang, *WP-SGD: Weighted parallel SGD for distributed unbalanced-workload training
system*, Journal of Parallel and Distributed Computing, 2020. `wagma svm` is the command for it.
"""

import importlib

_MODULES = {
    "check": "acceptance",
    "averages_help": "rates",
    "beats_fastest": "rates",
    "bound_ratio": "rates",
    "contraction_rate": "rates",
    "delay_contracts": "rates",
    "weights": "rates",
}
__all__ = list(_MODULES)


def __getattr__(name):
    """Load what needs numpy when it is asked for: `wagma.wpsgd.methods` does without."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
