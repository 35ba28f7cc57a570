"""What ranks tell each other of their steps where they average over all ranks anyway.

Before such an average all ranks agree that they have entered it, by integers that one allgather
collects. Sums over each rank's steps so far travel with these, 8 bytes each: it is no message more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wagma.report.records import COLUMNS, Recorded

__all__ = ["Exchange"]

LAST = 200  # averages over all ranks whose statistics are kept
# What is told: the number of steps, sums over the steps' fields, and when the last step ended.
# What is not told is counted as 0: page faults, and why GPUs lower their clocks.
SUMS = tuple(name for name in COLUMNS if name not in ("elapsed_s", "faults", "gpu_reasons"))
TOLD = ("steps", *SUMS, "elapsed_s")


class Exchange:
    """A rank's statistics, as all ranks exchange them; its construction is collective.

    Args:
        native: the engine's part of a collective.
        looked_at: the ranks whose statistics are kept on this rank; () to keep none.
    """

    def __init__(self, native: Any, looked_at: list[int]) -> None:
        self._native, self._looked_at = native, looked_at
        self._own = np.zeros(len(TOLD))
        self._known = 0
        self._told: deque[np.ndarray] = deque(maxlen=LAST + 1)
        native.tell_with_operations(len(TOLD))

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a step's record to what this rank tells."""
        self._own[0] += 1
        for place, name in enumerate(SUMS, 1):
            self._own[place] += record[name] or 0.0
        self._own[-1] = record["elapsed_s"]
        self._native.tell(self._own)

    def look(self) -> bool:
        """Keep what the ranks have told since the last call; return whether they have."""
        told = self._native.told(self._known)
        if told is None:
            return False
        self._known, numbers = told
        self._told.append(np.frombuffer(numbers).reshape(-1, len(TOLD))[self._looked_at])
        return True

    def recorded(self, path: Path, config: dict[str, Any]) -> tuple[Recorded, float] | None:
        """Return the ranks' mean steps from one average over all ranks to the next.

        Args:
            path, config: as of `Recorded`.

        Returns:
            Records with one "step" for the mean of each such period, and the median number of steps
            in a period; None if ranks have told nothing of two steps.
        """
        if not self._told:
            return None
        trained = np.flatnonzero(self._told[-1][:, 0])
        told = [each[trained] for each in self._told]
        ends = told[:1]
        for each in told[1:]:
            if (each[:, 0] > ends[-1][:, 0]).all():
                ends.append(each)
        if len(ends) < 2 or not len(trained):
            return None
        periods = np.diff(np.array(ends), axis=0)
        steps = periods[:, :, 0]
        means = {name: periods[:, :, place] / steps for place, name in enumerate(TOLD)}
        means["elapsed_s"] = np.cumsum(means["elapsed_s"], axis=0)
        nothing = np.zeros(steps.shape)
        columns = tuple(
            {name: means.get(name, nothing)[:, place] for name in COLUMNS}
            for place in range(len(trained))
        )
        ranks = tuple(self._looked_at[place] for place in trained)
        wall = float(means["elapsed_s"][-1].max())
        return Recorded(path, config, ranks, columns, wall, True), float(np.median(steps))
