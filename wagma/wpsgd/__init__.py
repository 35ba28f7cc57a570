"""WP-SGD: linear models from nodes that consume different numbers of samples.

Cheng, Li and Zhang, *WP-SGD: Weighted parallel SGD for distributed unbalanced-workload training
system*, Journal of Parallel and Distributed Computing, 2020. `wagma svm` is the command for it.
"""

from wagma.wpsgd.rates import (
    averages_help,
    beats_fastest,
    contraction_rate,
    delay_contracts,
    weights,
)

__all__ = ["averages_help", "beats_fastest", "contraction_rate", "delay_contracts", "weights"]
