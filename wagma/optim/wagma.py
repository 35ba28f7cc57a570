"""WAGMA-SGD, the wait-avoiding group model averaging of Li et al. (IEEE TPDS 2021)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

import collectives
from wagma.optim.averaging import Averaging, weights_of
from wagma.optim.overlap import Overlap

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI


class WAGMA(Averaging):
    """Average the model with a changing group of ranks after every step of a local optimizer.

    Algorithm 2 of the paper: each rank applies its local optimizer to its own batch's gradient,
    then averages the resulting model in this iteration's group without waiting for ranks that
    are late, whose last models stand in for them; every `sync_period` steps all ranks average.
    What holds for all methods is said in `Averaging`.

    A step that a `GradScaler` skips on some rank for its infinite gradients is one there too: that
    rank averages the model that it has. Under the conserving rule a rank that has left `join` has
    weight 0 from the next average over all ranks on, so that no update is lost. With
    `wait="group"`, or saved right after an average over all ranks, training continues from a
    `state_dict` as if it had not stopped; else it does from each rank's own model, without what
    only others' averages had of it.

    With `overlap`, which goes beyond the paper, `step` returns while its average is under way, and
    the next gradient is computed meanwhile. The next step waits for the average, puts it into the
    model and takes the local optimizer's step from there: a gradient is then of the model as it
    was before its last average, one step staler. At most one call is outstanding; whatever else
    needs the average completes it, and the average over all ranks every `sync_period` steps is
    waited for as ever. A closure's gradients are of the model with the average: nothing overlaps
    them. In between, parameters change in `step` and its hooks only: an in-place change elsewhere
    raises `RuntimeError`, one of `.data`, which cannot be seen, would be lost. `result` is then of
    the step before, usually, and `results` has that one unless it was complete, and the step's own
    if all ranks averaged.

    Example:
        >>> optimizer = WAGMA(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> with optimizer:
        ...     for inputs, targets in batches:
        ...         optimizer.zero_grad()
        ...         loss(model(inputs), targets).backward()
        ...         optimizer.step()

    Attributes:
        collective: the `collectives.GroupAllreduce` that averages.
        overlap: whether the next gradient is computed while the model is averaged.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        group_size: int | None = None,
        sync_period: int = 10,
        comm: MPI.Intracomm | None = None,
        groups: str = "changing",
        wait: str = "nobody",
        late: str | None = None,
        weights: str = "given",
        contraction: float = 0.9,
        overlap: bool = False,
        wire_dtype: str | torch.dtype | None = None,
        engine: str | None = None,
        transport: str | None = None,
        stall: float | None = None,
        abort: float | None = None,
        log_level: str | None = None,
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer, model, comm: as for `Averaging`.
            group_size: S, ranks per group, 1 to the number of ranks P; by default the paper's
                √P, rounded up to a power of two.
            sync_period: τ, steps from one average over all ranks to the next, at least 1.
            groups: "changing" with every step, or "fixed", for comparison.
            wait: "nobody", or "group" to wait in every step for the group's members, which makes
                runs repeatable bit for bit.
            late: how a late rank's model is merged, "paper" or "conserving"; by default
                `collectives.DEFAULT_LATE`.
            weights, contraction: as for `collectives.GroupAllreduce`: whether a model weighs what
                its step gave, or by the rank's work since the last average over all ranks.
            overlap: whether to compute the next gradient while the model is averaged; takes the
                memory of one more model, and of its buffers and frozen parameters once more.
            wire_dtype, engine, transport, stall, abort, log_level: as for
                `collectives.GroupAllreduce`.

        Raises:
            TypeError, ValueError: as `Averaging` does.
        """
        super().__init__(
            optimizer,
            model,
            {
                "group_size": group_size,
                "sync_period": sync_period,
                "groups": groups,
                "wait": wait,
                "late": late,
                "weights": weights,
                "contraction": contraction,
                "overlap": overlap,
                "wire_dtype": wire_dtype,
            },
            comm=comm,
            engine=engine,
            transport=transport,
            stall=stall,
            abort=abort,
            log_level=log_level,
        )
        self.overlap = overlap
        self._overlap = Overlap(self.flat, self.collective) if overlap else None

    def _check_settings(self, optimizer, *, overlap, **settings):
        if not isinstance(overlap, bool):
            raise TypeError(f"overlap must be True or False, not {overlap!r}")
        return {"overlap": overlap}

    def _make_collective(self, comm, *, overlap, **options):
        return collectives.GroupAllreduce(comm, self.flat.vectors, **options)

    @property
    def settings(self) -> dict[str, Any]:
        """S, τ, which groups, whom a step waits for, the late rule, weights, and overlap."""
        names = ("group_size", "sync_period", "groups", "wait", "late")
        values = {name: getattr(self.collective, name) for name in names}
        return {**values, **weights_of(self.collective), "overlap": self.overlap}

    def _take_step(self, closure: Callable[[], Any] | None, weight: float) -> Any:
        """Take a step of the wrapped optimizer, then average the model (Algorithm 2)."""
        loss = self._local_step(closure)
        if self.overlap and (self.collective.version + 1) % self.collective.sync_period:
            self.flat.check_places()
            self._overlap.start(weight)
        else:
            self._average_model(weight=weight)
        return loss

    # Overlap

    def complete(self) -> None:
        """Wait for the last step's average, where `overlap` has left it outstanding, and take it.

        The model holds that average then, as it would after a step without `overlap`. Whatever
        needs it does this first; do it before you change parameters, or copy them to save them.

        Raises:
            RuntimeError: a parameter was changed since the step.
            collectives.RankFailedError: another rank has failed.
        """
        if not self._is_outstanding():
            return
        changed = self._overlap.changed()
        if changed:
            raise RuntimeError(
                f"{changed.kind} {changed.name!r} was changed outside step() while its average is "
                "under way (overlap), which would undo the change: call complete() before it, or "
                "make it in a hook of the optimizer's step"
            )
        self._note(self._overlap.take())

    def _set_aside(self) -> Any:
        call = self._overlap and self._overlap.call
        self.complete()
        return call

    def _put_back(self, outstanding: Any) -> None:
        if self.overlap:
            self._overlap.resume(outstanding)

    def _drop(self) -> None:
        if self._is_outstanding():
            self._note(self._overlap.drop())

    def _keep_last_average(self) -> None:
        try:
            if self._is_outstanding():
                keep = self._overlap.drop if self._overlap.changed() else self._overlap.take
                self._note(keep())
        finally:
            self._overlap = None  # with its copy of the model

    def _is_outstanding(self) -> bool:
        return self._overlap is not None and self._overlap.call is not None
