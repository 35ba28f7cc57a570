"""WAGMA-SGD, the wait-avoiding group model averaging of Li et al. (IEEE TPDS 2021)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import collectives
from collectives.settings import checked_weight
from wagma.optim.averager import Averager
from wagma.optim.construction import AveragerOptions, given
from wagma.optim.extras import Extra
from wagma.optim.flat import drop_nonfinite
from wagma.optim.overlap import Overlap
from wagma.optim.shards import Shards
from wagma.optim.vectors import for_collective

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI
    from typing_extensions import Unpack


class WAGMA(Averager):
    """Average the model within a changing group of ranks after every step of a local optimizer.

    Algorithm 2 of the paper: each rank applies its local optimizer to the gradient of its own
    batch, then averages the resulting model with this iteration's group, without waiting for
    stragglers, which take part with their last snapshots; every `sync_period` steps all ranks
    average. `Averager` describes what all methods share.

    A step that a `GradScaler` skips on some rank because of infinite gradients is a step there as
    well: that rank averages its unchanged model. Under the conserving rule a rank that has left
    `join` has weight 0 from the next average over all ranks on, so that no update is lost. With
    `wait="group"`, or if it was saved right after an average over all ranks, a `state_dict`
    continues the training exactly; otherwise training continues from each rank's own model, without
    the updates that only other ranks' averages contained. With `pace="own"`, `checkpoint` continues
    it with nothing lost.

    With `overlap`, which goes beyond the paper, `step` returns while its average is in progress,
    and the next gradient is computed meanwhile. The next step waits for the average, puts it into
    the model, and takes the local optimizer's step from there; its gradient is that of the model
    before its last average, one step staler. At most one call is outstanding. Other methods that
    need the average complete it first, and the average over all ranks every `sync_period` steps is
    always waited for. A closure computes its gradients with the average in the model, so it does
    not overlap. Change parameters only in `step` and its hooks: an in-place change elsewhere raises
    `RuntimeError`; a change of `.data` cannot be detected, and would be lost. `result` is usually
    the previous step's; `results` has it unless it was complete before, and the step's own result
    if all ranks averaged.

    Example:
        >>> averager = WAGMA(model, optimizer)
        >>> with averager:
        ...     for inputs, targets in batches:
        ...         optimizer.zero_grad()
        ...         loss(model(inputs), targets).backward()
        ...         optimizer.step()

    Attributes:
        collective: the `collectives.GroupAllreduce` that averages.
        overlap: whether the next gradient is computed while the model is averaged.
        work: what the next steps add to `total_steps` with `pace="own"`, at least 0; None: 1.

    Source: Li et al., Breaking (Global) Barriers in Parallel Stochastic Optimization with
    Wait-Avoiding Group Averaging, TPDS 2021, Algorithm 2.
    """

    _simulated_vectors = 4  # with overlap
    _uses_windows = True
    _survives = True
    _work: dict[str, float]
    _held_total: float | None = None
    _makes = collectives.GroupAllreduce
    _not_for_it = ("overlap", "average_state", "correction", "correction_every")
    collective: collectives.GroupAllreduce

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        group_size: int | None = None,
        sync_period: int = 10,
        groups: str = "changing",
        pace: str = "common",
        keep_average: bool = False,
        wait: str = "nobody",
        late: str | None = None,
        weights: str = "given",
        contraction: float = 0.9,
        overlap: bool = False,
        average_state: bool | int | str = False,
        correction: str | None = None,
        correction_every: int | str = 1,
        wire_dtype: str | torch.dtype | None = None,
        **options: Unpack[AveragerOptions],
    ):
        """Average beside a model's optimizers; collective.

        Args:
            model, optimizer: as for `Averager`.
            group_size: ranks per group, S, at most all P; None: √P, rounded up to a power of two.
            sync_period: steps from one average over all ranks to the next, τ, at least 1.
            groups: "changing" with every step, or "fixed", for comparison.
            pace: "common", or "own": ranks make any number of steps, and no step waits for another
                rank's. See `collectives.GroupAllreduce`.
            keep_average: whether this rank keeps the newest average over all ranks, for
                `last_average`, as for `collectives.GroupAllreduce`.
            wait: "nobody", or "group": each step waits for the group's members, and runs are
                reproducible bit for bit.
            late: how a late rank's model is merged, "paper" or "conserving"; None: conserving. See
                `collectives.GroupAllreduce`.
            weights: a model's weight: "given" to its last step, its rank's "work" since the last
                average over all ranks, or "wp": WP-SGD's for that work.
            contraction: of weights="wp": factor by which a step brings a model nearer the optimum.
            overlap: whether the next gradient, one step staler, is computed while the model is
                averaged. Needs memory for a model, and again for its buffers and frozen parameters.
            average_state: whether the local optimizer's state, such as momentum, is averaged with
                the model, for ranks with different data; N: in every N-th version and over all
                ranks, "all-ranks": only over all. The last two need late="conserving".
            correction: "control-variates": gradients are corrected towards the mean of all ranks',
                for ranks with different data; None: none. Needs late="conserving", weights="given".
            correction_every: versions in which the ranks' mean of gradients is averaged: 1: all,
                "all-ranks": those over all ranks, for less traffic. Needs late="conserving".
            wire_dtype: "float16" or "bfloat16", in which wider numbers are sent; None: their own.
            **options: see `AveragerOptions`.
        """
        self.overlap = overlap
        self._overlap: Any = None
        self.work: float | None = None
        super().__init__(model, optimizer, given(locals()), **options)
        self._rebuilt()

    def _rebuilt(self) -> None:
        self.flat.overlaps = self.overlap
        if self.overlap:
            more = [vector for extra in self._extras for vector in extra.memory]
            self._overlap = Overlap(self.flat, more, self.collective)
        self._renew_lease()

    def _check_settings(
        self,
        *,
        overlap: bool,
        average_state: bool | int | str,
        correction: str | None,
        correction_every: int | str,
        late: str | None,
        weights: str,
        **settings: Any,
    ) -> dict[str, Any]:
        if not isinstance(overlap, bool):
            raise TypeError(f"overlap must be True or False, not {overlap!r}")
        self._shards = Shards(average_state, correction, correction_every)
        self._shards.check_weights(weights)
        if correction is not None and late == "paper":
            raise ValueError(f"correction={correction!r} needs late='conserving'")
        return {"overlap": overlap, **self._shards.settings}

    def _make_extras(self, *, sync_period: int, wait: str, **settings: Any) -> list[Extra]:
        return self._shards.make(self.flat, sync_period, replaced=wait == "group")

    def _make_collective(self, comm: MPI.Intracomm, **options: Any) -> Any:
        options |= self._shards.periods(self.flat, self._extras)
        if options["pace"] == "own":
            options["leased"] = self._shards.leased(self.flat, self._extras)
        return super()._make_collective(comm, by_value=self.flat.by_value, **options)

    def _check_weight(self, weight: float) -> None:
        work = 1.0 if self.work is None else checked_weight(self.work, "work")
        if why_not := self.collective._pace_refuses(weight, work):
            raise ValueError(why_not)
        self._shards.check_weight(weight)
        if self._recording is not None and self.work is not None:
            self._recording.note(work=self.work)

    def _average(self, weight: float) -> None:
        """Average the model (Algorithm 2)."""
        more = {} if self.work in (None, 1) else {"work": self.work}
        if not self.overlap or self._next_waits_for_all():
            self._average_model(weight=weight, **more)
            return
        self._give()
        self._given = weight
        if not self._recovery.is_behind():
            self._begin_call()
            self._recovery.average_step(lambda: self._overlap.start(weight=weight, **more))

    # Ranks at their own pace

    @property
    def _at_own_pace(self) -> bool:
        return self.collective.pace == "own"

    @property
    def total_steps(self) -> float:
        """The steps that all ranks have made together, or the sum of their `work`.

        With `pace="own"` those published before the newest average over all ranks that this rank
        knows of, the same on all ranks for the same average. So a job can end by work done
        together, while no rank waits: ``while averager.total_steps < N``, inside `join`. With
        `pace="common"` this rank's steps, times the ranks.
        """
        return self.collective.total_calls

    @contextmanager
    def last_average(self) -> Iterator[tuple[int, float]]:
        """Hold the newest average over all ranks in the model, to evaluate or save it.

        Not collective: it needs no other rank, and all go on meanwhile. All ranks had this model,
        bit for bit, as their snapshots. At the end of the block the rank has its own model again.

        Returns:
            A block with the average's version, and `total_steps` as of then.

        Raises:
            RuntimeError: there was no average over all ranks yet; or as for `averaged`.
            ValueError: the averager was made without `keep_average`; or the optimizer has modes
                (schedule-free), and its state is not averaged (`average_state`).
            collectives.ClosedError: after `close`.
        """
        with self._holding(lambda: self.collective.last_average(self._vectors)) as kept:
            if kept is None:
                raise RuntimeError("there was no average over all ranks yet")
            self._held_total = kept[1]
            try:
                yield kept
            finally:
                self._held_total = None

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        if self._at_own_pace:
            state["total"] = self.total_steps if self._held_total is None else self._held_total
        return state

    def checkpoint(self) -> dict[str, Any]:
        """Return a `state_dict` with this rank's snapshot; collective, with `pace="own"`.

        All ranks first execute every version that any has started. If each rank saves it with its
        model, and as many ranks load both, the training continues where it was: models, snapshots
        and the total of all steps are the same, bit for bit, and no update is lost. What follows
        is not repeated exactly, as at their own pace nothing is: when ranks start versions depends
        on when they call. Memory: one more model, for the snapshot, and another meanwhile.

        Raises:
            RuntimeError: inside `averaged()`, or a part of the model is not averaged, because it is
                new or was replaced.
            ValueError: with `pace="common"`; on all ranks.
            collectives.ClosedError: after `close`.
        """
        self._check_usable()
        if not self._at_own_pace:
            raise ValueError("checkpoint() needs pace 'own', in which ranks have a snapshot apart")
        self.complete()
        self._check_model()
        vectors = self._give()
        own = self._save()
        try:
            self.collective.average(vectors)  # the total of all steps comes with it
            version = self.collective.snapshot(vectors)
            snapshot = [vector.clone() for vector in self._memory]
        finally:
            self._restore(own)
        return self.state_dict() | {"snapshot": snapshot, "version": version}

    def _go_on_from(self, averaging: dict[str, Any]) -> None:
        if not self._at_own_pace:
            super()._go_on_from(averaging)
            return
        vectors, total = self._vectors, averaging.get("total", 0.0)
        # Without a snapshot ranks have saved different versions, whose numbers choose groups only.
        if averaging.get("snapshot") is None or averaging["ranks"] != self.collective.size:
            self.collective.load(vectors, 0, total=total)
            return
        own = [vector.clone() for vector in self._memory]
        try:
            for vector, value in zip(self._memory, averaging["snapshot"], strict=True):
                vector.copy_(value)
            self.collective.load(vectors, averaging["version"], total=total)
        finally:
            for vector, value in zip(self._memory, own, strict=True):
                vector.copy_(value)
        self.collective.rebase(vectors)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` or `checkpoint`: see `Averager`; collective.

        Args:
            state_dict: this rank's.
        """
        super().load_state_dict(state_dict)
        self._renew_lease()

    def _changed(self, share: float = 0.0) -> None:
        super()._changed(share)
        self._renew_lease()

    def _renew_lease(self) -> None:
        """Tell the collective what this rank's part of the vectors is, where that has changed."""
        if not any(extra.renewed for extra in self._extras):
            return
        if self._at_own_pace and not self.closed:
            parts = [each for extra in self._extras for each in extra.part or extra.memory]
            self.collective.lease([*self.flat.vectors, *map(for_collective, parts)])
        for extra in self._extras:
            extra.renewed = False

    # Overlap

    def _next_waits_for_all(self) -> bool:
        """Return whether the next call averages over all ranks, and waits for them."""
        return (
            not self._at_own_pace
            and (self.collective.version + 1) % self.collective.sync_period == 0
        )

    def complete(self) -> None:
        """Wait for the average that `overlap` left outstanding, and put it into the model.

        The model then holds the average, as after a step without `overlap`. Methods that need it do
        this first; call it before you change parameters, or copy them to save them.

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
        self._take()

    def _take(self) -> None:
        """Put the outstanding average into the model, and go on from it."""
        result = self._recovery.average_step(self._overlap.take)
        if result is None:
            return
        self._note(result)
        self._end_call()
        share = self._given / result.weight if result.timely and result.weight > 0 else 1.0
        self._changed(share)

    def _left_out(self) -> None:
        """Leave out, too, gradients of the model that was not finite until its average came."""
        super()._left_out()
        if self.overlap:
            drop_nonfinite(tensor.value for tensor in self.flat.parameters)

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
                if self._overlap.changed():
                    self._note(self._overlap.drop())
                else:
                    self._take()
        finally:
            self._overlap = None  # with its copy of the model

    def _is_outstanding(self) -> bool:
        return self._overlap is not None and self._overlap.call is not None
