"""WAGMA-SGD, the wait-avoiding group model averaging of Li et al. (IEEE TPDS 2021)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import collectives
from collectives.agreement import raise_together
from collectives.settings import checked_weight, difference
from collectives.topology import default_group_size
from wagma.optim.flat import FlatModel, Tensor, agree, broadcast, survey
from wagma.optim.overlap import Overlap
from wagma.optim.wrapper import Wrapper

if TYPE_CHECKING:  # importing it initialises MPI
    from mpi4py import MPI

_made: weakref.WeakSet[WAGMA] = weakref.WeakSet()


class WAGMA(Wrapper):
    """Average the model with a changing group of ranks after every step of a local optimiser.

    Algorithm 2 of the paper: each rank applies its local optimiser to its own batch's gradient,
    then averages the resulting model in this iteration's group without waiting for ranks that
    are late, whose last models stand in for them; every `sync_period` steps all ranks average.

    The model's parameters and floating-point buffers become views of one vector for each dtype
    (`FlatModel` says which) and start from rank 0's values on every rank, integer buffers too. The
    parameter objects stay the same, so the wrapped optimiser and schedulers go on working. All
    ranks make the same number of steps, unless they `join`; one that a `GradScaler` skips on some
    rank for its infinite gradients counts there too: that rank averages the model that it has.

    Step hooks, here or on the wrapped optimiser, run around its step, before the average. A
    parameter that was frozen when the model was wrapped can be trained later; one that is new to
    the model cannot. Where DataLoader workers are spawned, not forked, they import the main script:
    it must import `mpi4py.MPI`, if it does, inside `if __name__ == "__main__"` or a function.

    With `overlap`, which goes beyond the paper, `step` returns while its average is under way, and
    the next gradient is computed meanwhile. The next step waits for the average, puts it into the
    model and takes the local optimiser's step from there: a gradient is then of the model as it
    was before its last average, one step staler. At most one call is outstanding; whatever else
    needs the average completes it, and the average over all ranks every `sync_period` steps is
    waited for as ever. In between, parameters change in `step` and its hooks only: an in-place
    change elsewhere raises, one of `.data`, which cannot be seen, would be lost.

    Example:
        >>> optimizer = WAGMA(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> with optimizer:
        ...     for inputs, targets in batches:
        ...         optimizer.zero_grad()
        ...         loss(model(inputs), targets).backward()
        ...         optimizer.step()

    Attributes:
        optimizer: the wrapped optimiser, which holds the parameter groups and the state.
        collective: the `collectives.GroupAllreduce` that averages.
        flat: the `FlatModel` that is averaged.
        overlap: whether the next gradient is computed while the model is averaged.
        result: what `collective` returned in the call that was completed last, which without
            `overlap` is that of the last step; None before the first.
        results: list of those of all calls completed since the last step began: with `overlap`
            the step before's, unless that was complete, and its own if all ranks averaged.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        group_size: int | None = None,
        sync_period: int = 10,
        comm: MPI.Intracomm | None = None,
        wait: str = "nobody",
        late: str | None = None,
        overlap: bool = False,
        **options: Any,
    ):
        """Wrap an optimiser and its model; collective.

        Args:
            optimizer: any `torch.optim.Optimizer` of the model's parameters.
            model: `torch.nn.Module` on the CPU, its parameters and floating-point buffers dense,
                of float16, bfloat16, float32 or float64, and of the same shapes on every rank.
            group_size: S, ranks per group, 1 to the number of ranks P; by default the paper's
                √P, rounded up to a power of two.
            sync_period: τ, steps from one average over all ranks to the next, at least 1.
            comm: mpi4py communicator, by default `MPI.COMM_WORLD`; it is duplicated for use.
            wait: "nobody", or "group" to wait in every step for the group's members, which makes
                runs repeatable bit for bit.
            late: how a late rank's model is merged, "paper" or "conserving"; by default
                `collectives.DEFAULT_LATE`.
            overlap: whether to compute the next gradient while the model is averaged; takes the
                memory of one more model, and of its buffers and frozen parameters once more.
            **options: further ones of `collectives.GroupAllreduce`: wire_dtype, engine,
                transport, stall, abort, log_level.

        Raises:
            TypeError, ValueError: a model that cannot be averaged (the message names the
                parameter), or models or settings that differ between ranks (it names the ranks);
                the same on every rank.
        """
        from mpi4py import MPI  # here, because it initialises MPI

        if comm is None:
            comm = MPI.COMM_WORLD
        if not isinstance(comm, MPI.Intracomm):
            raise TypeError(f"comm must be an mpi4py communicator, not {type(comm).__name__}")
        raise_together(comm, overlap_error(overlap))
        raise_together(comm, difference(comm, {"overlap": overlap}))
        tensors = agree(comm, lambda: unwrapped(optimizer, survey(model, optimizer)))
        broadcast(comm, tensors)
        super().__init__(optimizer)
        self.flat = FlatModel(tensors)
        self.collective = collectives.GroupAllreduce(
            comm,
            self.flat.vectors,
            group_size=default_group_size(comm.Get_size()) if group_size is None else group_size,
            sync_period=sync_period,
            wait=wait,
            late=late,
            **options,
        )
        self.overlap = overlap
        self._overlap = Overlap(self.flat, self.collective) if overlap else None
        self.result = None
        self.results = []
        self._inside_average = False
        _made.add(self)

    @property
    def closed(self) -> bool:
        """Whether `close` was called: the wrapped optimiser may then be stepped on its own."""
        return self.collective.closed

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float = 1.0) -> Any:
        """Take a step of the wrapped optimiser, then average the model (Algorithm 2).

        With `overlap` it first completes the step before, and only starts to average, except over
        all ranks. A closure's gradients are of the model with that average: nothing overlaps them.

        Args:
            closure: function that evaluates the model and returns the loss, for the optimisers
                that want one, some of them several times a step.
            weight: how much this rank's model counts beside others' of weight 1, such as its
                batch's size divided by the mean size; finite, at least 0.

        Returns:
            What the wrapped optimiser's step returned; None where a `GradScaler` skips it.

        Raises:
            RuntimeError: a parameter's memory was replaced after wrapping, or the parameter was
                changed while it was averaged, this is inside `averaged()`, or a closure was passed
                by way of a `GradScaler`.
            TypeError, ValueError: another weight, or a trainable parameter in a group that was
                not in the model when that was wrapped.
            collectives.RankFailedError: another rank has failed.
            collectives.ClosedError: after `close`.
        """
        weight = checked_weight(weight)
        self._check_usable()
        self.flat.check_members(self.param_groups)
        self.results = []
        self.complete()
        loss = self.local_step(closure)
        self.flat.check()
        if self.overlap and (self.collective.version + 1) % self.collective.sync_period:
            self._overlap.start(weight)
        else:
            self._note(self.collective(self.flat.vectors, weight=weight))
            self.flat.mark_changed()
        return loss

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

    def synchronize(self) -> None:
        """Set every rank's model to the average over all ranks now; collective, not a step."""
        self._check_usable()
        self.complete()
        self.flat.check()
        self.collective.synchronize(self.flat.vectors)
        self.flat.mark_changed()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the average over all ranks in the model, to evaluate or save it; collective.

        Afterwards each rank has its own model again, bit for bit, integer buffers included, and
        training goes on as if nothing had been. `step` and `synchronize` raise inside.
        """
        self._check_usable()
        self.flat.check()
        own = self.flat.save()
        call = self._overlap and self._overlap.call
        self.complete()
        self._inside_average = True
        try:
            self.collective.average(self.flat.vectors)
            yield
        finally:
            self._inside_average = False
            self.flat.restore(own)
            if self.overlap:
                self._overlap.resume(call)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks make different numbers of steps inside; collective.

        A rank that leaves the block takes part in the others' averages, those over all ranks too,
        until all have left it. It then has weight 0: under the conserving rule, from the next
        average over all ranks on, so that no update is lost. Afterwards all ranks have the average
        of the models of those that made the most steps, and the same number of steps.

        Example:
            >>> with optimizer.join():
            ...     for inputs, targets in batches:  # fewer on some ranks
            ...         ...
            ...         optimizer.step()
        """
        self._check_usable()
        yield
        self._check_usable()
        self.complete()
        self.flat.check()
        self.collective.join(self.flat.vectors)
        self.flat.mark_changed()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimiser's state, and the averaging's counter beside it.

        Its key "averaging" holds {"version": steps made}. Each rank's model and local state are its
        own: save them on every rank to go on exactly, or one rank's inside `averaged()`. It
        completes what `overlap` has left outstanding: call it before you copy the model's state.
        """
        self.complete()
        state = self.optimizer.state_dict()
        return {**state, "averaging": {"version": self.collective.version}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, and go on from the model as it is now; collective.

        Load the model's state first. With `wait="group"`, or saved right after an average over
        all ranks, training continues as if it had not stopped; else it does from each rank's own
        model, without what only others' averages had of it. An average that `overlap` has left
        outstanding is dropped.

        Args:
            state_dict: this rank's; one of the wrapped optimiser alone counts as of this version.

        Raises:
            collectives.DisagreementError: the ranks load different versions.
        """
        self._check_usable()
        if self._is_outstanding():
            self._note(self._overlap.drop())
        state = dict(state_dict)
        averaging = state.pop("averaging", {"version": self.collective.version})
        super().load_state_dict(state)
        self.flat.check()
        self.collective.load(self.flat.vectors, averaging["version"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimiser.

        Raises:
            ValueError: it has a parameter that was not in the model when that was wrapped, or
                that is not averaged because it was frozen and not finite then.
        """
        before = len(self.param_groups)
        self.optimizer.add_param_group(param_group)
        try:
            self.flat.check_members(self.param_groups)
        except ValueError:
            del self.param_groups[before:]
            raise

    def close(self) -> None:
        """Leave the collective, once every step that any rank began is done; collective.

        The model stays usable and keeps this rank's values, with the last average.
        """
        self.collective.close()
        self._keep_last_average()

    def __enter__(self) -> WAGMA:
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        suppressed = self.collective.__exit__(*exception)
        self._keep_last_average()
        return suppressed

    def _keep_last_average(self) -> None:
        """Put what closing has completed into the model, unless that was changed since."""
        if self._is_outstanding():
            keep = self._overlap.drop if self._overlap.changed() else self._overlap.take
            self._note(keep())

    def _is_outstanding(self) -> bool:
        return self.overlap and self._overlap.call is not None

    def _note(self, result: Any) -> None:
        self.result = result
        self.results.append(result)

    def _check_usable(self) -> None:
        if self.closed:
            raise collectives.ClosedError("this WAGMA optimizer is closed")
        if self._inside_average:
            raise RuntimeError("inside averaged() the model is the average, not this rank's own")


def overlap_error(overlap: bool) -> TypeError | None:
    """Return what is wrong with the argument, or None."""
    if isinstance(overlap, bool):
        return None
    return TypeError(f"overlap must be True or False, not {overlap!r}")


def unwrapped(optimizer: torch.optim.Optimizer, tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors, unless they or the optimiser are in the hands of a `WAGMA` already."""
    if isinstance(optimizer, Wrapper):
        raise TypeError("optimizer is a WAGMA optimizer already: pass the one that it wraps")
    mine = {id(tensor.value): tensor for tensor in tensors}
    for other in _made:
        shared = [mine[id(t.value)] for t in other.flat.averaged if id(t.value) in mine]
        if not other.closed and (shared or other.optimizer is optimizer):
            what = f"{shared[0].kind} {shared[0].name!r}" if shared else "optimizer"
            raise ValueError(f"{what} belongs to another WAGMA optimizer, which is not closed")
    return tensors
