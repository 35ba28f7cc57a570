"""Averages in groups of the ranks that are ready first, for numpy vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives import topology
from collectives.formed_groups import FormedGroupCollective, checked_idle_rank
from collectives.planned import Planned
from collectives.process import check_owner
from collectives.result import Result
from collectives.settings import checked_integer
from collectives.typing import Stream, Vector

if TYPE_CHECKING:  # importing mpi4py.MPI initializes it
    from mpi4py import MPI
    from typing_extensions import Unpack

    from collectives.options import CollectiveOptions

__all__ = ["ReadyGroupAllreduce", "dynamic_weights"]

WEIGHTS = ("constant", "dynamic", "dynamic-each")
MISSING = ("nearest", "initial")
# The faster of the sizes in the paper's tables, for 8 and 16 ranks.
USUAL_GROUP_SIZE = 3
# Elements mixed with the initial model at a time, which stay in cache.
CHUNK = 1 << 15
# Groups that the controller remembers: more than any job needs, in some MiB.
LONGEST_HISTORY = 2**20


class ReadyGroupAllreduce(FormedGroupCollective):
    """Averages vectors in groups of the ranks that are ready first.

    A call sends a ready signal to a controller, in the engine of one rank. It forms a group of the
    first `group_size` ranks that are ready; these average, and wait for no other rank. If the
    groups would divide the ranks into parts that never average with each other, the controller puts
    a rank of another part into a group, which may wait for that rank for a moment. If fewer than
    `group_size` ranks make calls, because others have closed or are in an operation such as
    `average`, these form a group; a single one continues alone at once. Ranks that wait for each
    other outside the collective make no calls either, which the controller cannot know: if a rank's
    next call takes 8 times as long as usual, and at least 1 s, or a call has waited for `stall`
    seconds, that rank counts as absent until its next call.

    Args:
        comm, like: those of `GroupAllreduce`.
        group_size: P', from 2 to the number of ranks; any in a job of one rank. None: 3, or all
            ranks if there are fewer.
        weights: "constant": all members have the same weight. "dynamic": the older an iteration,
            the smaller its weight, which the models of that iteration share. "dynamic-each": the
            older a model, the smaller its weight. See `dynamic_weights`. A call increments a rank's
            iteration, and then sets it to that of the newest member of its group.
        alpha: α of dynamic weights, from 0 to less than 1.
        missing: "nearest" or "initial", of dynamic weights. With "initial", `like` must be finite
            and the same on all ranks, and each rank keeps a copy of it.
        history: T, the number of recent groups in which the controller checks which ranks have met,
            at least ⌈(N−1)/(P'−1)⌉. None: that, or ⌈(N/P') (ln N + 3)⌉ if that is more.
        sync_every: number of a rank's calls from one average to the next, at least 1; the calls
            between return at once.
        controller_rank: the rank whose engine runs the controller. If its engine is "none", the
            others wait for its calls.
        controller_only: whether that rank only runs the controller: it makes no calls, is in no
            group, and its vector does not count in averages over all ranks, which it calls like the
            others. N is then one less. (`participates` tells which ranks make calls.)
        **options: see `CollectiveOptions`.

    Attributes:
        group_size, weights, alpha, missing, history, controller_rank, controller_only: as given or
            by default.

    Raises:
        TypeError, ValueError: an argument is invalid on some rank, or differs between ranks; on all
            ranks.

    Source: Miao et al., Heterogeneity-Aware Distributed Machine Learning Training via Partial
    Reduce, SIGMOD 2021, Algorithm 2 and sections 3.3 and 4. The default "nearest",
    "dynamic-each", and how the controller connects parts and leaves out late ranks, go beyond the
    paper.
    """

    group_size: int
    weights: str
    alpha: float
    missing: str
    history: int
    controller_rank: int
    controller_only: bool

    def __init__(
        self,
        comm: MPI.Intracomm,
        like: Vector,
        *,
        group_size: int | None = None,
        weights: str = "constant",
        alpha: float = 0.5,
        missing: str = "nearest",
        history: int | None = None,
        sync_every: int = 1,
        controller_rank: int = 0,
        controller_only: bool = False,
        **options: Unpack[CollectiveOptions],
    ):
        self._initial_model: Any = None

        def plan() -> Planned:
            from collectives.protocols.ready_controller import PartialReduceController
            from collectives.protocols.ready_groups import ReadyGroupProtocol

            rank_of_it = checked_integer("controller_rank", controller_rank, 0, comm.size - 1)
            idle = checked_idle_rank(controller_only, rank_of_it, comm.size)
            size = comm.size - (idle is not None)
            _check_choice("weights", weights, WEIGHTS)
            count = checked_group_size(group_size, size)
            _check_average(alpha, missing)
            dynamic = weights != "constant"
            described = {
                "group_size": count,
                "weights": weights,
                "alpha": float(alpha),
                "missing": missing,
                "history": checked_history(history, size, count),
                "controller_rank": rank_of_it,
                "controller_only": bool(controller_only),
            }
            vars(self).update(described)
            self._idle_rank = idle
            if weights == "dynamic" and missing == "initial":
                self._initial_model = _copies_of(self._like)
                described["like, the initial model,"] = _digest(self._initial_model)
            settings = count, self.history, dynamic, self.alpha, missing == "nearest"

            def make(port: Any, rank: int, size: int) -> Any:
                here = rank == self.controller_rank
                controller = None
                if here:
                    controller = PartialReduceController(
                        size, *settings, idle, weights == "dynamic-each"
                    )
                return ReadyGroupProtocol(port, rank, size, self.controller_rank, controller)

            return described, make

        super().__init__(comm, like, plan, sync_every=sync_every, **options)

    def _call(self, vector: Any, handover: Any = None) -> Result:
        result = super()._call(vector, handover)
        share = self._protocol.initial_share
        if share > 0 and result.weight > 0:
            _mix(vector, share, self._initial_model)
        return result

    @property
    def _on_devices(self) -> bool:  # type: ignore[override]
        return self._initial_model is None  # only the host can add it

    @property
    def _takes_blocks(self) -> bool:
        return super()._takes_blocks and self._initial_model is None

    def synchronize(self, vector: Vector, *, stream: Stream | None = None) -> None:
        super().synchronize(vector, stream=stream)
        self._protocol.fresh = True

    synchronize.__doc__ = FormedGroupCollective.synchronize.__doc__

    def averaging_matrix(self) -> np.ndarray | None:
        """The mean `topology.averaging_matrix` of all groups so far.

        Returns:
            float64 array of shape (N, N) on the controller's rank, for the ranks that make calls,
            in their order. None on other ranks, with dynamic weights, before the first group of
            several ranks, and in a job of more than 2,048 ranks.
        """
        check_owner(self.native.pid)
        controller = self._protocol.controller
        if controller is None or self.weights != "constant" or not len(controller.taken):
            return None
        while True:  # the engine may be updating them
            groups = controller.formed
            met, taken = np.array(controller.met), np.array(controller.taken)
            if controller.recording == groups:
                break
        if not groups:
            return None
        matrix = np.eye(self.size) + (met.reshape(self.size, -1) - np.diag(taken)) / groups
        there = np.arange(self.size) != self._idle_rank
        return matrix[np.ix_(there, there)]

    @property
    def rho(self) -> float | None:
        """ρ of all groups so far (`topology.rho`): the smaller, the faster updates have spread.

        None if there is no `averaging_matrix`. As in Theorem 1, it is defined for constant weights
        only.
        """
        matrix = self.averaging_matrix()
        return None if matrix is None else topology.rho(matrix)

    @property
    def initial_share(self) -> float:
        """The initial model's mean share in this rank's results, from 0 to less than 1."""
        return self._protocol.initial_total / max(self.version, 1)

    @property
    def _protocol(self) -> Any:
        return self.native.queue.protocol


def dynamic_weights(
    iterations: Iterable[int], alpha: float = 0.5, missing: str = "nearest", *, each: bool = False
) -> tuple[np.ndarray, float]:
    """Return the dynamic weights of Partial Reduce for models of these iterations.

    Let k be the newest iteration minus a model's own, plus one. The weight of the models of one k
    is (1 − α) α^(k−1) / (1 − α^(largest k)), which they share. So a single old model may weigh more
    than each of several new ones: iterations 5, 5, 5, 5, 4 have weights 1/6 and 1/3 for α = 0.5.

    Args:
        iterations: integers, one per model.
        alpha: α, from 0 to less than 1: the smaller, the lower the weight of old models.
        each: whether the weights are those of "dynamic-each" instead: α^(k−1) for each model,
            divided by their sum.
        missing: which model gets the weight of a k in between that no model has. "nearest": those
            whose k is nearest, of two the newer one. "initial": the initial model.

    Returns:
        The models' weights, a float64 array of shape (models,), and the initial model's weight;
        their sum is 1.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: Partial Reduce (Miao et al., 2021), equation 9 and section 3.3.3; `each` goes beyond it.
    """
    from collectives.protocols import ready_controller

    _check_average(alpha, missing)
    given = list(iterations)
    for iteration in given:
        checked_integer("an iteration", iteration, -(2**61), 2**61)
    if not given:
        raise ValueError("iterations is empty")
    weights = np.empty(len(given))
    initial = ready_controller.weights_of(
        np.array(given, np.int64), float(alpha), missing == "nearest", bool(each), weights
    )
    return weights, initial


def checked_group_size(group_size: int | None, size: int) -> int:
    """Return the group size for `size` ranks, as given or by default, or raise."""
    if group_size is None:
        return min(USUAL_GROUP_SIZE, size)
    return checked_integer("group_size", group_size, 2, size if size > 1 else None)


def checked_history(history: int | None, size: int, group_size: int) -> int:
    """Return the length of the history, as given or by default, or raise."""
    from collectives.protocols import ready_controller

    if history is None:
        return ready_controller.default_history(size, group_size)
    least = ready_controller.shortest_history(size, group_size)
    return checked_integer("history", history, max(least, 1), largest=max(LONGEST_HISTORY, least))


def _check_average(alpha: float, missing: str) -> None:
    """Raise for arguments from which dynamic weights cannot be computed."""
    if isinstance(alpha, bool) or not isinstance(alpha, (float, int, np.floating, np.integer)):
        raise TypeError(f"alpha is {alpha!r}, not a number")
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha is {alpha:g}, but must be at least 0 and less than 1")
    _check_choice("missing", missing, MISSING)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, not one of {', '.join(choices)}")


# The initial model


def _copies_of(like: Any) -> list[np.ndarray]:
    """Return copies of arrays, which must be finite; other checks reject what is not an array."""
    arrays = like if isinstance(like, (list, tuple)) else [like]
    copies = [np.array(array) for array in arrays if isinstance(array, np.ndarray)]
    for array in copies:
        if not np.isfinite(array.astype(np.float64)).all():
            raise ValueError("like is not finite: as the initial model it would enter all others")
    return copies


def _digest(arrays: list[np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def _mix(vector: Any, share: float, initial: list[np.ndarray]) -> None:
    """Replace a mean by (1 − share) · mean + share · initial, with the same bits on all ranks."""
    for array, first in zip(vector if isinstance(vector, (list, tuple)) else [vector], initial):
        real: Any = np.float64 if array.dtype.itemsize == 8 else np.float32
        for start in range(0, array.size, CHUNK):
            part = slice(start, start + CHUNK)
            mixed = array[part].astype(real)
            mixed *= real(1 - share)
            mixed += real(share) * first[part].astype(real)
            array[part] = mixed
