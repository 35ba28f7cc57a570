"""WP-SGD: linear models from nodes that consume different numbers of samples.

Cheng, Li and Zhang, *WP-SGD: Weighted parallel SGD for distributed unbalanced-workload training
system*, Journal of Parallel and Distributed Computing, 2020. `wagma svm` is the command for it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wagma.wpsgd.acceptance import check as check
    from wagma.wpsgd.probe import Contraction as Contraction
    from wagma.wpsgd.probe import fit_contraction as fit_contraction
    from wagma.wpsgd.rates import averages_help as averages_help
    from wagma.wpsgd.rates import beats_fastest as beats_fastest
    from wagma.wpsgd.rates import bound_ratio as bound_ratio
    from wagma.wpsgd.rates import contraction_rate as contraction_rate
    from wagma.wpsgd.rates import delay_contracts as delay_contracts
    from wagma.wpsgd.rates import weights as weights

_MODULES = {
    "check": "acceptance",
    "Contraction": "probe",
    "fit_contraction": "probe",
    "averages_help": "rates",
    "beats_fastest": "rates",
    "bound_ratio": "rates",
    "contraction_rate": "rates",
    "delay_contracts": "rates",
    "weights": "rates",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Load modules that need numpy on first use: `wagma.wpsgd.methods` does not need it."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
