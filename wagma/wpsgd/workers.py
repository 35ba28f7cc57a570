"""A node's workers as threads, which pull, compute and push without the GIL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import numpy as np

from wagma.wpsgd.steps import Steps

LOOK = 2e-4  # seconds between two looks for whether to stop


class Workers:
    """As many threads as a node has workers.

    Args:
        steps: the node.
        factor: how many times as long as it takes a worker's sample is made to take.
        sample_seconds: what a sample takes the node at least, times the factor; each of its
            workers, as often as there are workers.

    Source: WP-SGD, Algorithm 3.
    """

    def __init__(self, steps: Steps, factor: float = 1.0, sample_seconds: float = 0.0) -> None:
        self._steps, self._pace = steps, (factor, sample_seconds * steps.workers)
        self._pool = ThreadPoolExecutor(steps.workers, "wagma-worker")

    def consume(self, rows: np.ndarray, stop: Callable[[], bool] = lambda: False) -> int:
        """Consume the samples of these rows, and return how many: the first of them.

        They are fewer where `stop`, which is called again and again by the caller's thread, has
        said so. What was consumed is applied or abandoned when this returns, and no thread is at
        work, also after an exception, of `stop` or of a worker.

        Args:
            rows: int64 array.
            stop: whether to draw no more.
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
