"""The queue of updates of Hop's workers, by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from collectives.settings import checked_integer

__all__ = ["Update", "UpdateQueue"]


class Update(NamedTuple):
    """An entry of a queue.

    Attributes:
        update: an object of any type.
        iteration, sender: its tags: the number of its iteration, and its source rank; None: no
            such tag.
    """

    update: Any
    iteration: int | None
    sender: int | None


class UpdateQueue:
    """Updates in the order of their arrival, taken out by their tags: an iteration and a sender.

    With `max_gap` there are max_gap + 1 queues, one for each possible iteration modulo that number;
    an update older than the iteration asked for is discarded, like late ones with backup workers.

    Several threads may use it at the same time. Updates are stored by reference: for an array on a
    CUDA device the receiver's stream has to wait for the sender's.

    The class is for programs of your own. `QueuedNeighborAverage` follows the same rules without
    it: updates arrive while Python computes, so the engine queues them, in memory that it allocates
    once.

    Args:
        max_gap: number of iterations that a sender may be ahead, at least 1; None: any number.

    Source: Luo et al., Hop: Heterogeneity-aware Decentralized Training, 2019, sections 4.1 and 6.1.
    """

    def __init__(self, max_gap: int | None = None):
        gap = 0 if max_gap is None else checked_integer("max_gap", max_gap, 1)
        self._rotates = max_gap is not None
        # Lists of (number, Update), numbered in the order of their arrival.
        self._queues: list[list[tuple[int, Update]]] = [[] for _ in range(gap + 1)]
        self._changed = threading.Condition()
        self._count = 0

    def enqueue(self, update: Any, iteration: int | None = None, sender: int | None = None) -> None:
        """Put in an update with its tags.

        Args:
            update: an object of any type.
            iteration, sender: its tags: the number of its iteration, and its source rank; None: no
                such tag.

        Raises:
            ValueError: the iteration is missing, if `max_gap` is given.
        """
        if self._rotates and iteration is None:
            raise ValueError("iteration is None, but with max_gap it selects the queue")
        with self._changed:
            self._count += 1
            queue = self._queues[(iteration or 0) % len(self._queues)]
            queue.append((self._count, Update(update, iteration, sender)))
            self._changed.notify_all()

    def dequeue(
        self,
        count: int,
        iteration: int | None = None,
        sender: int | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Update]:
        """Wait for `count` updates with these tags, and take the first ones out.

        Args:
            count: number of updates, at least 0.
            iteration, sender: tags to match; None: any.
            timeout: seconds to wait; None: no limit.

        Returns:
            The `Update`s, in the order of their arrival.

        Raises:
            TypeError, ValueError: `count` is not an integer, or is negative.
            TimeoutError: fewer updates have arrived in this time; none is taken out.
        """
        count = checked_integer("count", count, 0)
        with self._changed:
            if not self._changed.wait_for(
                lambda: len(self._matching(iteration, sender)) >= count, timeout
            ):
                raise TimeoutError(
                    f"after {timeout:g} s there are {len(self._matching(iteration, sender))} "
                    f"updates with iteration {iteration} and sender {sender}, not {count}"
                )
            taken = dict(self._matching(iteration, sender)[:count])
            self._keep(lambda number, update: number not in taken)
            return list(taken.values())

    def size(self, iteration: int | None = None, sender: int | None = None) -> int:
        """Return the number of updates with the tags `iteration` and `sender`; None: any."""
        with self._changed:
            return len(self._matching(iteration, sender))

    def _matching(self, iteration: int | None, sender: int | None) -> list[tuple[int, Update]]:
        """Return the matching updates in their order; older ones in their queue are discarded."""
        if self._rotates and iteration is not None:
            slot = iteration % len(self._queues)
            self._keep(
                lambda _, update: (
                    update.iteration >= iteration or update.iteration % len(self._queues) != slot
                )
            )
        return sorted(
            (number, update)
            for queue in self._queues
            for number, update in queue
            if iteration in (None, update.iteration) and sender in (None, update.sender)
        )

    def _keep(self, condition: Callable[[int, Any], bool]) -> None:
        for queue in self._queues:
            queue[:] = [entry for entry in queue if condition(*entry)]
