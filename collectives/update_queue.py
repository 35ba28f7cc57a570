"""The queue of updates that Hop's workers have, by itself."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from collectives.settings import checked_integer

__all__ = ["Update", "UpdateQueue"]


class Update(NamedTuple):
    """What is in a queue: an update, of any type, the iteration that it is of, and its sender."""

    update: Any
    iteration: int | None
    sender: int | None


class UpdateQueue:
    """Updates in the order in which they came, taken out by their tags: an iteration and a sender.

    With `max_gap` they are in max_gap + 1 queues, one for each iteration that they can be of, which
    are used again modulo that; an update that is older than the iteration asked for is then
    discarded, as those that come late under backup workers are.

    Threads may use it at a time. An update is kept as it is, and not copied: of an array on a CUDA
    device the stream of who takes it out has to wait for that of who put it in. This is for
    programs of one's own; `QueuedNeighborAverage` keeps its updates by the same rules, in the
    engine's memory.

    Args:
        max_gap: how many iterations a sender may be ahead, at least 1; None: any number.

    Source: Luo et al., Hop: Heterogeneity-aware Decentralized Training, 2019, sections 4.1 and 6.1.
    """

    def __init__(self, max_gap: int | None = None):
        gap = 0 if max_gap is None else checked_integer("max_gap", max_gap, 1)
        self._rotates = max_gap is not None
        # Of (number, Update), numbered in the order in which they came.
        self._queues: list[list[tuple[int, Update]]] = [[] for _ in range(gap + 1)]
        self._changed = threading.Condition()
        self._count = 0

    def enqueue(self, update, iteration: int | None = None, sender: int | None = None) -> None:
        """Put in an update with its tags.

        Raises:
            ValueError: the iteration is missing, where there is a queue for each.
        """
        if self._rotates and iteration is None:
            raise ValueError("iteration is None: with max_gap it says which queue an update is in")
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
        """Take the first `count` updates with these tags out, once there are so many.

        Args:
            count: how many, from 0 on.
            iteration, sender: None: of any.
            timeout: seconds to wait; None: for ever.

        Returns:
            The `Update`s, in the order in which they came.

        Raises:
            TimeoutError: there have not been as many for so long; none is taken out.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: len(self._matching(iteration, sender)) >= count, timeout
            ):
                raise TimeoutError(
                    f"{len(self._matching(iteration, sender))} updates of iteration {iteration} "
                    f"and sender {sender} after {timeout:g} s, not {count}"
                )
            taken = dict(self._matching(iteration, sender)[:count])
            self._keep(lambda number, update: number not in taken)
            return list(taken.values())

    def size(self, iteration: int | None = None, sender: int | None = None) -> int:
        """Return how many updates with these tags are there; None: with any."""
        with self._changed:
            return len(self._matching(iteration, sender))

    def _matching(self, iteration, sender):
        """Return those with these tags in their order; older ones in their queue are discarded."""
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

    def _keep(self, condition):
        for queue in self._queues:
            queue[:] = [entry for entry in queue if condition(*entry)]
