"""Allreduce-SGD: synchronous data parallelism, the baseline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import collectives
from collectives.agreement import agreed
from collectives.settings import checked_weight
from wagma.optim.averager import Averager
from wagma.optim.construction import AveragerOptions, given
from wagma.optim.flat import drop_nonfinite
from wagma.optim.gradients import FlatGradients
from wagma.optim.tensors import ids_of

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI
    from typing_extensions import Unpack

Batch = TypeVar("Batch")


class Allreduce(Averager):
    """Average the gradients over all ranks at every step, before the local optimizer's step.

    All ranks wait for each other, take the same step, and have the same parameters, bit for bit; up
    to rounding, these are the parameters of one process that trains on all ranks' batches.
    `Averager` describes what all methods share.

    A parameter without a gradient on this rank gets the mean if any rank has a gradient for it, and
    is unchanged otherwise, so that equal models stay equal. Buffers differ between ranks, and are
    averaged in `averaged()` and `synchronize()`. Of several optimizers all gradients are averaged
    before the first one's step. A closure is called once, before that; the optimizer's step is
    taken without it, and one that evaluates it several times is refused. A rank whose gradients are
    not finite, whether or not a `GradScaler` finds that, is excluded from the mean, and uses the
    others'; if no rank's are finite, no rank takes a step.

    If an exception ends a rank's step after its average has begun, the others take that step. This
    rank's next one then raises RuntimeError, the others' RankFailedError, unless all load a state
    before it.

    With a `compute_limit` it is DropCompute: `within_limit` leaves out the micro-batches of a step
    that a rank has not begun in time, and the mean is over those that all ranks have computed.

    Attributes:
        computed: the number of micro-batches since the last step, or None if `within_limit` has not
            been used; a loop without it may set it.
        left_out: the number of micro-batches that this rank has left out.

    Source: Allreduce-SGD, a baseline of WAGMA-SGD (Li et al., TPDS 2021). DropCompute: Giladi et
    al., NeurIPS 2023; its published code divides by the number of all micro-batches instead.
    """

    averages_gradients = True
    _simulated_vectors = 4
    _uses_windows = True
    _survives = True
    _has_equal_models = True

    collective: collectives.GroupAllreduce
    # Whether the average of a step has begun, and the step is not complete.
    _is_incomplete = False

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        compute_limit: float | None = None,
        **options: Unpack[AveragerOptions],
    ):
        """Average beside a model's optimizers; collective.

        Args:
            model, optimizer: as for `Averager`; an optimizer that needs no closure.
            compute_limit: seconds of a step in which micro-batches begin, above 0; None: no limit.
            **options: see `AveragerOptions`.
        """
        self.compute_limit, self.left_out = compute_limit, 0
        self.computed: int | None = None
        self._clock = time.perf_counter
        super().__init__(model, optimizer, given(locals()), **options)

    def _check_settings(self, **settings: Any) -> dict[str, Any]:
        super()._check_settings()
        limit = self.compute_limit
        if limit is not None and checked_weight(limit, "compute_limit") == 0:
            raise ValueError("compute_limit is 0, not above 0")
        return settings

    def within_limit(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yield a step's micro-batches, except those that do not begin within `compute_limit`.

        The time is counted from the first one, which is always yielded. Compute the gradient of
        each one's mean loss; `step` divides their sum by their number, which also multiplies the
        rank's weight: a rank without micro-batches has weight 0.

        Args:
            batches: micro-batches, or what they are made from, such as their numbers.

        Returns:
            An iterator of those that begin in time.

        Example:
            >>> for batch in averager.within_limit(batches):
            ...     loss(model, batch).backward()
            >>> optimizer.step()
        """
        self.computed, begun_at = 0, self._clock()
        for number, batch in enumerate(batches):
            if number and self.compute_limit is not None:
                self.flat.wait_for_device()
                if self._clock() - begun_at >= self.compute_limit:
                    self.left_out += len(batches) - number
                    return
            self.computed += 1
            yield batch

    def report(self) -> dict[str, Any]:
        """Return the number of micro-batches left out, if there is a limit."""
        return {} if self.compute_limit is None else {"left_out_of_rank": self.left_out}

    def _make_collective(
        self, comm: MPI.Intracomm, *, compute_limit: float | None, **options: Any
    ) -> collectives.GroupAllreduce:
        self._gradients = agreed(comm, lambda: FlatGradients(self.flat))
        return collectives.GroupAllreduce(
            comm,
            self._gradients.vectors,
            group_size=1,
            sync_period=1,
            wait="group",
            late="paper",  # a vector is averaged itself, not as a change of the last mean
            **options,
        )

    def _average_gradients(self, weight: float, finite: bool) -> bool:
        """Average the gradients over all ranks."""
        if not self._is_manual:  # where an update may need several averages
            self._check_complete()
        self.flat.check_places()
        self._gradients.fill(finite)
        computed, self.computed = self.computed, None
        if computed is not None:
            self._gradients.divide(max(computed, 1))
            weight *= computed
        if self._recovery.is_behind():
            return False
        self._is_incomplete = True
        vectors = self._gradients.vectors
        result = self._recovery.average_step(lambda: self.collective(vectors, weight=weight))
        if result is None:
            return False
        self._note(result)
        self._end_call()
        if result.weight > 0:
            # A rank whose gradients are all in the mean need not read which ones are.
            present: Iterable[Any] = self._gradients.own
            if not (result.timely and weight > 0 and all(present)):
                present = self._gradients.shares(self.collective)
            self._gradients.write_back(present)
            return True
        # `zero_grad` does not reset those of parameters in no group, which would never be finite.
        members = ids_of(self.optimizers.param_groups)
        others = (tensor.value for tensor in self.flat.parameters)
        drop_nonfinite(each for each in others if id(each) not in members)
        return False

    def _average(self, weight: float) -> None:
        """Note that the step is complete."""
        self._is_incomplete = False

    def _check_complete(self) -> None:
        """Raise, on all ranks, if an exception ended the last step, which the others have taken."""
        if not self._is_incomplete or self.collective.native.broken:
            return
        error = RuntimeError(
            f"an exception ended a step of rank {self.collective.rank} after its average had "
            "begun, so its parameters and optimizer state are not those of the others, which have "
            "taken that step: go on from a checkpoint"
        )
        self.collective.fail(error)
        raise error

    def _go_on_from(self, averaging: dict[str, Any]) -> None:
        super()._go_on_from(averaging)
        self._is_incomplete = False

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        return state | {"equal": state["equal"] and not self._is_incomplete}
