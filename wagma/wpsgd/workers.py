"""A node's workers as threads, which pull, compute and push without the GIL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import numpy as np

from wagma.wpsgd.steps import Steps

LOOK = 2e-4  # seconds between checks whether to stop


class Workers:
    """A thread for each of a node's workers.

    Args:
        steps: the node.
        factor: factor by which a worker's samples take longer.
        sample_seconds: least seconds per sample of the node, times the factor; a worker takes as
            many times as long as there are workers.

    Source: WP-SGD, Algorithm 3.
    """

    def __init__(self, steps: Steps, factor: float = 1.0, sample_seconds: float = 0.0) -> None:
        self._steps, self._pace = steps, (factor, sample_seconds * steps.workers)
        self._pool = ThreadPoolExecutor(steps.workers, "wagma-worker")

    def consume(self, rows: np.ndarray, stop: Callable[[], bool] = lambda: False) -> int:
        """Consume the samples of the first of these rows, and return how many.

        They are all rows unless `stop`, which the caller's thread calls repeatedly, returns True.
        On return all consumed samples are applied or abandoned and no thread is running, also after
        an exception of `stop` or of a worker.

        Args:
            rows: int64 array.
            stop: function that returns whether to draw no more.
        """
        steps = self._steps
        before = steps.consumed
        steps.begin(rows)
        working = []
        try:
            for worker in range(steps.workers):
                working.append(self._pool.submit(steps.work, worker, *self._pace))
            while True:
                done, others = wait(working, LOOK, FIRST_EXCEPTION)
                if not others or any(each.exception() for each in done) or stop():
                    break
        finally:
            steps.stop()
            wait(working)
        for each in working:
            each.result()
        return steps.consumed - before

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
