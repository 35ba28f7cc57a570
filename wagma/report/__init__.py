"""Where the time of a run went: who is slow, what that costs, and what would help.

``wagma report`` is the command for it.
"""

from wagma.report.analysis import of
from wagma.report.findings import Cost, Imbalance, Rank, Remedy, Report, Straggler

__all__ = ["Cost", "Imbalance", "Rank", "Remedy", "Report", "Straggler", "of"]
