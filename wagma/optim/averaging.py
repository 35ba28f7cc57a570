"""What all methods of this package share: an optimizer that averages between ranks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import collectives
from collectives.agreement import raise_collectively
from collectives.collective import check_comm
from collectives.meeting import meet
from collectives.settings import checked_weight, difference, limits
from wagma.optim.flat import FlatModel, Tensor, agree, broadcast, survey
from wagma.optim.interfaces import Collective
from wagma.optim.vectors import DeviceVector
from wagma.optim.wrapper import Wrapper

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI

_made: weakref.WeakSet[Averaging] = weakref.WeakSet()


class _JoinBlocks(threading.local):
    """The `join` blocks that a thread is in, and what it has begun to join in the inner ones.

    It waits for other ranks only at the end of the outermost: these may need it in the steps of
    any other optimizer until then.
    """

    begun: ExitStack | None = None

    @contextmanager
    def enter(self) -> Iterator[ExitStack]:
        """Return what waits, in its end, for all that is begun in the blocks."""
        if self.begun is not None:
            yield self.begun
            return
        with ExitStack() as self.begun:
            try:
                yield self.begun
            finally:
                self.begun = None


_join_blocks = _JoinBlocks()


class Averaging(Wrapper):
    """An optimizer around the user's, whose steps average models or gradients between ranks.

    The model's parameters and floating-point buffers become parts of one vector for each dtype
    (`FlatModel` says which) and start from rank 0's values on every rank, integer buffers too. The
    parameter objects stay the same, so the wrapped optimizer and schedulers go on working; `close`
    gives them memory of their own again. All ranks make the same number of steps, unless they
    `join`; one that a `GradScaler` skips on some rank for its infinite gradients counts there too.

    Step hooks, here or on the wrapped optimizer, run around its step. A parameter that was frozen
    when the model was wrapped can be trained later. One that is new to the model cannot, nor is a
    new persistent floating-point buffer averaged: all methods but `step` that do something with the
    model raise RuntimeError for them. Where DataLoader workers are spawned, not forked, they import
    the main script: it must import `mpi4py.MPI`, if it does, inside `if __name__ == "__main__"` or
    a function.

    A method is a subclass with `_make_collective` and `_take_step`; a collective is what
    `interfaces.Collective` says.

    Attributes:
        optimizer: the wrapped optimizer, which holds the parameter groups and the state.
        collective: what averages.
        comm: the communicator of the ranks that train together, as given.
        flat: the `FlatModel` that is trained.
        result: what `collective` returned in the call that was completed last; None before the
            first.
        results: list of those of all calls completed since the last step began.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        arguments: dict[str, Any],
        *,
        comm: MPI.Intracomm | None = None,
        engine: str | None = None,
        transport: str | None = None,
        stall: float | None = None,
        abort: float | None = None,
        log_level: str | None = None,
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer: any `torch.optim.Optimizer` of the model's parameters.
            model: `torch.nn.Module`, its parameters and floating-point buffers on the CPU, or on
                one CUDA device, dense, of float16, bfloat16, float32 or float64, and of the same
                shapes on every rank.
            arguments: the method's own, by name; `_check_settings` and `_make_collective` get them.
            comm: mpi4py communicator, by default `MPI.COMM_WORLD`; it is duplicated for use.
            engine, transport, stall, abort, log_level: as for `collectives.GroupAllreduce`.

        Raises:
            TypeError, ValueError: a model that cannot be averaged (the message names the
                parameter), or models, methods, settings or kinds of devices that differ between
                ranks (it names the ranks); the same on every rank.
            collectives.CudaError: the model is on a device, and there is no CUDA driver.
        """
        from mpi4py import MPI  # here, because it initializes MPI

        if comm is None:
            comm = MPI.COMM_WORLD
        check_comm(comm)
        name = f"the constructor of {type(self).__name__}"
        meet(comm, name, *limits(stall, abort))
        own = error = None
        try:
            own = self._check_settings(optimizer, **arguments)
        except (TypeError, ValueError) as problem:
            error = problem
        raise_collectively(comm, error)
        raise_collectively(comm, difference(comm, {"algorithm": type(self).__name__, **own}))
        tensors = agree(comm, lambda: unwrapped(optimizer, survey(model, optimizer)))
        device = next(t.value.device.type for t in tensors if t.value.is_floating_point())
        raise_collectively(comm, difference(comm, {"the model's device": device}))
        broadcast(comm, tensors)
        self.comm = comm
        self.flat = FlatModel(model, tensors)
        options = {
            "engine": engine,
            "transport": transport,
            "stall": stall,
            "abort": abort,
            "log_level": log_level,
        }
        try:
            self.collective = self._make_collective(comm, **arguments, **options)
        except BaseException:
            self.flat.release()
            raise
        super().__init__(optimizer)
        self.result = None
        self.results = []
        self._inside_average = self._inside_join = self._has_joined = False
        _made.add(self)

    def __repr__(self) -> str:
        """Say what it is in a line; `repr(optimizer.optimizer)` lists the parameter groups."""
        count = self.collective.size
        parts = [type(self.optimizer).__name__, f"{count} rank{'s' * (count != 1)}"]
        parts += [f"{name}={value!r}" for name, value in self.settings.items()]
        parts += [f"step {self._steps}", "closed" if self.closed else "open"]
        return f"{type(self).__name__}({', '.join(parts)})"

    # What a method defines

    def _check_settings(self, optimizer: torch.optim.Optimizer, **settings: Any) -> dict[str, Any]:
        """Return the settings that must not differ between ranks and that no collective compares.

        Raises:
            TypeError, ValueError: one of them is wrong here, or the optimizer is none for the
                method.
        """
        return {}

    def _make_collective(self, comm: MPI.Intracomm, **settings: Any) -> Collective:
        """Make the collective that averages, for vectors like those of `flat`; collective."""
        raise NotImplementedError

    def _take_step(self, closure: Callable[[], Any] | None, weight: float) -> Any:
        """Do what the method does in one step, and return the wrapped optimizer's loss."""
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        """The method's settings by name, defaults resolved, for a record of what was run."""
        return {}

    @property
    def _steps(self) -> int:
        """How many steps this rank has made."""
        return self.collective.version

    @property
    def _model_vectors(self) -> list[np.ndarray | DeviceVector]:
        """The model as the collective's `average`, `synchronize`, `load` and `join` take it."""
        return self.flat.vectors

    # What a user calls

    @property
    def closed(self) -> bool:
        """Whether `close` was called: the wrapped optimizer may then be stepped on its own."""
        return self.collective.closed

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float = 1.0) -> Any:
        """Take one step of the method, which has one of the wrapped optimizer in it.

        Args:
            closure: function that evaluates the model and returns the loss, for the optimizers
                that want one.
            weight: how much this rank counts beside others of weight 1, such as its batch's size
                divided by the mean size; finite, at least 0.

        Returns:
            What the wrapped optimizer's step returned; None where a `GradScaler` skips it.

        Raises:
            RuntimeError: a parameter's memory was replaced after wrapping, this is inside
                `averaged()`, or a closure was passed by way of a `GradScaler`.
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
        return self._take_step(closure, weight)

    def complete(self) -> None:
        """Wait for what the last step has left outstanding: nothing, unless a method overlaps."""

    def synchronize(self) -> None:
        """Set every rank's model to the average over all ranks now; collective, not a step."""
        self._check_usable()
        self.complete()
        self.flat.check()
        self._average_now()
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
        outstanding = self._set_aside()
        self._inside_average = True
        try:
            self.collective.average(self._model_vectors)
            yield
        finally:
            self._inside_average = False
            self.flat.restore(own)
            self._put_back(outstanding)
            self._release()  # if it was closed inside

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks make different numbers of steps inside; collective.

        A rank that leaves the block takes part in what the others do until all have left it, so
        that nobody waits for it in vain and what it did is not lost. Afterwards all ranks have the
        same model, and the same number of steps. Of nested blocks, of several optimizers, that is
        so after the outermost; an optimizer cannot be used between its block's end and that.

        Example:
            >>> with generator.join(), discriminator.join():
            ...     for inputs, targets in batches:  # fewer on some ranks
            ...         ...
            ...         generator.step()
            ...         discriminator.step()
        """
        self._check_usable()
        if self._inside_join:
            yield
            return
        self._inside_join = True
        try:
            with _join_blocks.enter() as begun:
                yield
                self._check_usable()
                self.complete()
                self.flat.check()
                begun.enter_context(self._joined())
        finally:
            self._inside_join = False

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """Begin to take part in the others' steps, and at the end of the block wait for them."""
        self._has_joined = True
        try:
            with self._taking_part():
                yield
        finally:
            self._has_joined = False
        self.flat.mark_changed()

    def _average_now(self) -> None:
        """Set every rank's model to the average over all ranks."""
        self.collective.synchronize(self._model_vectors)

    def _go_on_from(self, version: int) -> None:
        """Let the next step have this version, and begin with the model as it is now."""
        self.collective.load(self._model_vectors, version)

    @contextmanager
    def _taking_part(self) -> Iterator[None]:
        """Make no more steps, but take part in the others'; wait for them in the block's end."""
        with self.collective.joining(self._model_vectors):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and the averaging's counter beside it.

        Its key "averaging" holds {"version": steps made}. Each rank's model and local state are its
        own: save them on every rank to go on without losing anything, or one rank's inside
        `averaged()`. It completes what a method has left outstanding: call it, as
        `model_state_dict` does, before you copy the model's state.

        Raises:
            RuntimeError: a part of the model is not averaged, as it is new or was replaced.
        """
        self.complete()
        self.flat.check()
        state = self.optimizer.state_dict()
        return {**state, "averaging": {"version": self.collective.version}}

    def model_state_dict(self) -> dict[str, Any]:
        """Return the model's `state_dict()` with a copy of each tensor, to save it or go on from.

        It is this rank's model, or the average inside `averaged()`, and later steps do not change
        it. What a method has left outstanding is completed first. Tied tensors stay tied; what is
        no tensor (a module's extra state) is not copied. Memory: one more model.

        Raises:
            RuntimeError: a part of the model is not averaged, as it is new or was replaced.
        """
        self.complete()
        self.flat.check()
        return self.flat.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, and go on from the model as it is now; collective.

        Load the model's state first. What a method has left outstanding is dropped.

        Args:
            state_dict: this rank's; one of the wrapped optimizer alone counts as of this version.

        Raises:
            collectives.DisagreementError: the ranks load different versions.
        """
        self._check_usable()
        self._drop()
        state = dict(state_dict)
        averaging = state.pop("averaging", {"version": self.collective.version})
        super().load_state_dict(state)
        self.flat.check()
        self._go_on_from(averaging["version"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer.

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

        The model keeps this rank's values, in memory of its own again. Closing twice does nothing.
        """
        try:
            self.collective.close()
        finally:
            self._release()

    def __enter__(self) -> Averaging:
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        try:
            return self.collective.__exit__(*exception)
        finally:
            try:
                self._release()
            except collectives.CollectiveError:  # an average that failed with the block
                if exception[0] is None:
                    raise

    # What methods are made of

    def _average_model(self, **weight: float) -> None:
        """Call the collective with the model, which becomes what that returns."""
        self.flat.check_places()
        self._note(self.collective(self.flat.vectors, **weight))
        self.flat.mark_changed()

    def _note(self, result: Any) -> None:
        self.result = result
        self.results.append(result)

    def _check_usable(self) -> None:
        if self.closed:
            raise collectives.ClosedError(f"this {type(self).__name__} optimizer is closed")
        if self._inside_average:
            raise RuntimeError("inside averaged() the model is the average, not this rank's own")
        if self._has_joined:
            raise RuntimeError(
                "this optimizer has left its join() block: it can be used again after the "
                "outermost one"
            )

    def _release(self) -> None:
        """Put what closing has completed into the model, whose memory is then its own again."""
        if self.closed and not self._inside_average:
            try:
                self._keep_last_average()
            finally:
                self.flat.release()

    # What a method that overlaps does with an average that is outstanding

    def _set_aside(self) -> Any:
        """Complete it, and return what `_put_back` needs once the model is as it was before."""
        self.complete()

    def _put_back(self, outstanding: Any) -> None:
        """Go on as before `_set_aside`."""

    def _drop(self) -> None:
        """Complete it, and leave the model as it is."""

    def _keep_last_average(self) -> None:
        """Put what closing has completed into the model, unless that was changed since."""


def weights_of(collective: Any) -> dict[str, Any]:
    """Return the settings by which a collective weighs models, as far as they have an effect."""
    weights = {"weights": collective.weights}
    if collective.weights == "wp":
        weights["contraction"] = collective.contraction
    return weights


def unwrapped(optimizer: torch.optim.Optimizer, tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors, unless they or the optimizer are in the hands of another one already."""
    if isinstance(optimizer, Wrapper):
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer is a {kind} optimizer already: pass the one that it wraps")
    mine = {id(tensor.value): tensor for tensor in tensors}
    for other in _made:
        shared = [mine[id(t.value)] for t in other.flat.averaged if id(t.value) in mine]
        if not other.closed and (shared or other.optimizer is optimizer):
            what = f"{shared[0].kind} {shared[0].name!r}" if shared else "optimizer"
            kind = type(other).__name__
            raise ValueError(f"{what} belongs to another {kind} optimizer, which is not closed")
    return tensors
