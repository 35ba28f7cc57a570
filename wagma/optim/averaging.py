"""The base class of all methods: an optimizer that averages between ranks."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

import collectives
from collectives import process
from collectives.agreement import agreed, counted, is_on_all_ranks, raise_collectively
from collectives.collective import check_comm
from collectives.meeting import meet
from collectives.process import load_mpi, place_of
from collectives.result import Result
from collectives.settings import (
    checked_weight,
    difference,
    limits,
    or_default,
    unknown_option,
)
from collectives.statistics import Statistics, total
from collectives.survival import rebuilding, why_not
from collectives.timeline import is_recording, span
from wagma.optim.extras import Extra
from wagma.optim.flat import Constant, FlatModel, Tensor, agree, broadcast, survey
from wagma.optim.interfaces import Collective
from wagma.optim.shards import Shards
from wagma.optim.survival import Recovery, Survival, average, equalize
from wagma.optim.vectors import DeviceVector, zeros_in_windows
from wagma.optim.wrapper import Wrapper

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI
    from typing_extensions import Self, Unpack

    from wagma.recording import Recording

log = logging.getLogger(__name__)
T = TypeVar("T")
Saved = tuple[list[torch.Tensor], list[Constant]]  # see Averaging._save

_made: weakref.WeakSet[Averaging] = weakref.WeakSet()


class _JoinBlocks(threading.local):
    """The `join` blocks that a thread is in, and the joins begun in the inner ones.

    The thread waits for other ranks only at the end of the outermost block; until then they may
    need this rank in the steps of any other optimizer.
    """

    begun: ExitStack | None = None

    @contextmanager
    def enter(self) -> Iterator[ExitStack]:
        """Yield an exit stack that waits, at the outermost block's end, for the joins begun."""
        if self.begun is not None:
            yield self.begun
            return
        with ExitStack() as self.begun:
            try:
                yield self.begun
            finally:
                self.begun = None


join_blocks = _JoinBlocks()


class Averaging(Wrapper):
    """A wrapper of an optimizer whose steps average models or gradients between ranks.

    The model's parameters and floating-point buffers become parts of one vector per dtype (see
    `FlatModel`), and start from rank 0's values on every rank, integer buffers as well. The
    parameter objects stay the same, so the wrapped optimizer and schedulers continue to work;
    `close` gives them memory of their own again. All ranks make the same number of steps, unless
    they `join`; a scheduler counts those of its own rank. A step that a `GradScaler` skips on some
    rank because of infinite gradients counts as well.

    Step hooks, of this optimizer or the wrapped one, run around the wrapped step. A parameter that
    was frozen when the model was wrapped can be trained later. A new parameter of the model cannot,
    and a new persistent floating-point buffer is not averaged: all methods except `step` that use
    the model raise RuntimeError for them. DataLoader workers that are spawned, not forked, import
    the main script: import `mpi4py.MPI` there only inside `if __name__ == "__main__"` or a
    function.

    Where models are averaged, an update that is not finite is left out, and the rank continues from
    a model of the others. The local optimizer's state of a parameter that is not finite by then,
    such as its momentum, is deleted, so that it begins anew; the first time a warning is logged.

    For ranks with different data some methods have two more options, off by default, whose vectors
    are averaged as parts of the model's:

    - ``average_state=True`` averages the local optimizer's state: its tensors of a parameter's
      shape, such as momentum, and its numbers, such as Adam's count of steps, which corrects the
      bias of moments that are averaged with it. The optimizer's tensors become views of vectors.
    - ``correction="control-variates"`` (SCAFFOLD, Karimireddy et al., ICML 2020, option II, without
      a server) corrects a rank's gradient g to g + c − cr: cr is the mean of its own gradients over
      its last τ steps, and c the mean of all ranks' cr. After a step ``.grad`` is the corrected
      gradient. Adam, AdamW, Adamax and RAdam with `average_state` use it in first moments only.
      All ranks have the same weight. A rank that leaves `join` takes its cr out of c; after the
      block, and after a checkpoint of another rank or another number of ranks, every cr is c.

    A method is a subclass with `_make_collective` and `_take_step`; `interfaces.Collective`
    describes a collective.

    Attributes:
        optimizer: the wrapped optimizer, with the parameter groups and the state.
        collective: the collective that averages.
        comm: the communicator of the ranks that train together, as given.
        flat: the `FlatModel` that is trained.
        result: the result of the `collective`'s call that was completed last; None before the
            first.
        results: list of the results of all calls completed since the last step began.
    """

    # How many vectors of the model's length a simulated rank has besides model and gradient.
    _simulated_vectors = 3
    # The options that the constructor takes.
    # Whether its collective averages vectors in windows where they are.
    _uses_windows = False
    # Whether it can go on without a rank; and whether all ranks then have the same model anyway.
    _survives = False
    _has_equal_models = False
    # What is averaged in addition to the model; `_check_settings` sets another choice.
    _shards = Shards(False, None)

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        arguments: dict[str, Any],
        *,
        comm: MPI.Intracomm | None = None,
        survive: bool | Callable[[Recovery], object] = False,
        **options: Unpack[collectives.CollectiveOptions],
    ):
        """Wrap an optimizer and its model; collective.

        Args:
            optimizer: any `torch.optim.Optimizer` of the model's parameters.
            model: `torch.nn.Module`, with dense parameters and floating-point buffers on the CPU or
                on one CUDA device, of float16, bfloat16, float32 or float64, and of the same shapes
                on every rank.
            arguments: the method's own, by name, for `_check_settings` and `_make_collective`.
            comm: mpi4py communicator, by default `MPI.COMM_WORLD`. It is duplicated, and `join`,
                `record` and checkpoints use it, too: free it after `close`.
            survive: whether the others go on if the process of a rank ends; or a function that is
                called with the `Recovery` each time they did. It needs Open MPI 5 under its own
                ``mpiexec --with-ft ulfm``, and a method that can.
            **options: see `collectives.CollectiveOptions`.

        Raises:
            TypeError, ValueError: the model cannot be averaged (the message names the parameter),
                the local optimizer's state cannot (`average_state`; it names the state), or models,
                methods, settings or kinds of devices differ between ranks (it names the ranks); the
                same on every rank.
            collectives.CudaError: the model is on a device, and there is no CUDA driver.
        """
        if comm is None:
            comm = load_mpi().COMM_WORLD  # here, because it initializes MPI
        check_comm(comm)
        name = f"the constructor of {type(self).__name__}"
        meet(comm, name, *limits(options))
        own: dict[str, Any] = {}
        error: Exception | None = None
        try:
            own = self._check_settings(optimizer, **arguments)
        except (TypeError, ValueError) as problem:
            error = problem
        error = error or unknown_option(type(self), collectives.CollectiveOptions, options)
        error = error or self._survival_error(comm, survive)
        raise_collectively(comm, error)
        common = {"algorithm": type(self).__name__, "survive": bool(survive), **own}
        raise_collectively(comm, difference(comm, common))
        tensors = agree(comm, lambda: unwrapped(optimizer, survey(model, optimizer)))
        device = next(t.value.device.type for t in tensors if t.value.is_floating_point())
        known = agreed(comm, lambda: self._shards.look_at(optimizer))
        raise_collectively(comm, difference(comm, {"the model's device": device, **known}))
        broadcast(comm, tensors)
        self.comm = comm
        zeros = self._make_zeros(options)
        self.flat = agreed(comm, lambda: FlatModel(model, tensors, zeros), lambda m: m.release())
        try:
            self._extras = agreed(comm, lambda: self._make_extras(**arguments))
            if survive:
                self._survival = Survival(
                    comm,
                    [] if self._has_equal_models else self._memory,
                    survive if callable(survive) else None,
                )
                self.comm = comm = self._survival.survivors.comm
            self._arguments, self._options = arguments, options
            self._past: list[Statistics] = []  # of the collectives before others have died
            self.collective: Any = None
            self.collective = self._make_collective(comm, **arguments, **options)
            self.collective._is_abandoned = bool(survive)
        except BaseException:
            self.flat.release()
            raise
        super().__init__(optimizer)
        self.result: Result | None = None
        self.results: list[Result] = []
        self._inside_average = self._inside_join = self._has_joined = False
        self._excluded = 0  # of this rank's vectors, up to the last call
        self._has_warned = False
        self._are_equal = False  # all ranks' models, since the last step
        self._recording: Recording | None = None
        self._recorded: list[Recording] = []  # without a summary yet
        _made.add(self)

    def __repr__(self) -> str:
        """Return a line of text; `repr(optimizer.optimizer)` lists the parameter groups."""
        count = self.collective.size
        parts = [type(self.optimizer).__name__, f"{count} rank{'s' * (count != 1)}"]
        parts += [f"{name}={value!r}" for name, value in self.settings.items()]
        parts += [f"step {self._steps}", "closed" if self.closed else "open"]
        return f"{type(self).__name__}({', '.join(parts)})"

    # What a method defines

    def _check_settings(self, optimizer: torch.optim.Optimizer, **settings: Any) -> dict[str, Any]:
        """Return the settings that must not differ between ranks and that no collective compares.

        Raises:
            TypeError, ValueError: a setting is invalid on this rank, or the method does not support
                the optimizer.
        """
        return {}

    def _survival_error(self, comm: MPI.Intracomm, survive: Any) -> Exception | None:
        """Return why the others could not go on without a rank, if that is asked for."""
        if not isinstance(survive, bool) and not callable(survive):
            return TypeError(f"survive must be True, False or a function, not {survive!r}")
        if not survive:
            return None
        name = type(self).__name__
        if not self._survives:
            return ValueError(
                f"survive: {name} cannot go on without a rank; WAGMA, LocalSGD with "
                "trigger='count' and Allreduce can"
            )
        if place_of(comm) is not process:
            return ValueError("survive: simulated ranks do not die")
        if any(other._survival is not None and not other.closed for other in _made):
            return ValueError(
                f"survive: another optimizer of this process is open with it, and ranks could not "
                f"agree which goes on first: close that one before {name} is made"
            )
        reason = why_not()
        return RuntimeError(f"survive: {reason}") if reason else None

    def _make_zeros(self, options: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
        """Return what makes averaged vectors: in windows if that is of use on all ranks."""
        if not self._uses_windows:
            return torch.zeros
        transport = or_default("transport", options.get("transport"))
        if all(self.comm.allgather(transport != "messages")):
            return zeros_in_windows(self.comm)
        return torch.zeros

    def _make_extras(self, **settings: Any) -> list[Extra]:
        """Return what is averaged in addition to the model."""
        return []

    def _make_collective(self, comm: MPI.Intracomm, **settings: Any) -> Collective:
        """Make the collective that averages, for vectors like `_vectors`; collective."""
        raise NotImplementedError

    def _take_step(self, closure: Callable[[], Any] | None, weight: float) -> Any:
        """Take one step of the method, and return the wrapped optimizer's loss."""
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        """The method's settings by name, with defaults resolved, for a record of the run."""
        return {}

    def statistics(self) -> Any:
        """Return this rank's `collectives.statistics.Statistics` so far.

        With `survive` they include those of the collectives before other ranks have died.
        """
        now = self.collective.statistics()
        return total([*self._past, now]) if self._past else now

    @property
    def _steps(self) -> int:
        """The number of steps of this rank."""
        return self.collective.version

    @property
    def _just_averaged(self) -> bool:
        """Whether the models of all ranks were averaged, and no step was made since."""
        last = self.result
        return self._are_equal or (
            last is not None and last.synchronized and last.version == self.collective.version - 1
        )

    @property
    def _vectors(self) -> list[np.ndarray | DeviceVector]:
        """The vectors for the collective: those of the model, and of what else is averaged."""
        return [*self.flat.vectors, *(each for extra in self._extras for each in extra.vectors)]

    @property
    def _memory(self) -> list[torch.Tensor]:
        """The same vectors as tensors."""
        return [*self.flat.memory, *(each for extra in self._extras for each in extra.memory)]

    # What a user calls

    @property
    def closed(self) -> bool:
        """Whether `close` was called; the wrapped optimizer may then be used by itself."""
        return self.collective.closed

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float = 1.0) -> Any:
        """Take one step of the method, including a step of the wrapped optimizer.

        Args:
            closure: function that evaluates the model and returns the loss, for optimizers that
                need one.
            weight: weight of this rank relative to 1, such as its batch size divided by the mean
                size; finite, at least 0.

        Returns:
            The return value of the wrapped optimizer's step; None if a `GradScaler` skips it.

        Raises:
            RuntimeError: a parameter's memory was replaced after wrapping, the call is inside
                `averaged()`, or a `GradScaler` passed a closure.
            TypeError, ValueError: the weight is invalid, or a group has a trainable parameter that
                was not in the model when it was wrapped.
            collectives.RankFailedError: another rank has failed.
            collectives.ClosedError: after `close`.
        """
        weight = checked_weight(weight)
        self._check_usable()
        self.flat.check_members(self.param_groups)
        self.results, self._are_equal = [], False
        if not is_recording():  # torch.compile loses what was set before a block
            return self._step(closure, weight)
        with span("step"):
            return self._step(closure, weight)

    def _step(self, closure: Callable[[], Any] | None, weight: float) -> Any:
        """Take a step, with what is left of the last one; note it where a loop records."""
        if self._recording is None:
            self.complete()
            return self._take_step(closure, weight)
        self._recording.step_begins()
        self.complete()
        loss = self._take_step(closure, weight)
        self._recording.step_ends(loss)
        return loss

    def timeline(self, directory: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Return a block in which every rank's timeline is recorded; collective.

        See `collectives.Collective.timeline`; `collectives.timeline.span` tells what the loop does.

        Args:
            directory: where the files go, for ``wagma timeline``.
        """
        return self.collective.timeline(directory)

    def complete(self) -> None:
        """Wait for what the last step left outstanding: nothing, unless the method overlaps."""

    def synchronize(self) -> None:
        """Set every rank's model to the average over all ranks now; collective, not a step.

        Raises:
            RuntimeError: inside `averaged()`, or after its own `join` block inside another one.
            collectives.ClosedError: after `close`.
        """
        self._check_usable()
        self.complete()
        self.flat.check()
        if self._survival is None:
            self._average_now()
        else:
            self._together(self._average_now, self._save())
        self._changed()
        self._are_equal = True

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the average over all ranks in the model, to evaluate or save it; collective.

        At the end of the block each rank has its own model again, bit for bit, including integer
        buffers, and the training is unaffected.

        Raises:
            RuntimeError: inside `averaged()`, or after its own `join` block inside another one.
            collectives.ClosedError: after `close`.
        """
        with self._holding(lambda vectors: self.collective.average(vectors), together=True):
            yield

    @contextmanager
    def _holding(self, get: Callable[[Any], Any], *, together: bool = False) -> Iterator[Any]:
        """Hold in the model what `get` overwrites its vectors by; yield what that returns.

        Args:
            get: takes the vectors.
            together: whether it is collective.
        """
        self._check_usable()
        self.flat.check()
        if self._survival is not None:
            self.complete()
        own = self._save()
        outstanding = self._set_aside()
        self._inside_average = True
        try:
            if together:
                got, own = self._together(lambda: get(self._vectors), own)
            else:
                got = get(self._vectors)
            self._extras_changed()
            yield got
        finally:
            self._inside_average = False
            self._restore(own)
            self._put_back(outstanding)
            self._release()  # if the optimizer was closed inside the block

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks make different numbers of steps inside the block; collective.

        A rank that leaves the block takes part in the others' operations until all ranks have left
        it, so that no rank waits for it and its updates are not lost. Then all ranks have the same
        model and the same number of steps. For nested blocks of several optimizers this holds after
        the outermost one; until then, an optimizer cannot be used once its own block has ended.

        Raises:
            RuntimeError: inside `averaged()`, or after its own `join` block inside another one.
            collectives.ClosedError: after `close`.

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
            with join_blocks.enter() as begun:
                yield
                self._check_usable()
                self.complete()
                self.flat.check()
                for extra in self._extras:
                    extra.leave()
                begun.enter_context(self._joined())
        finally:
            self._inside_join = False

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """Begin to take part in the others' steps; wait for the others at the end of the block."""
        self._has_joined = True
        try:
            if self._survival is None:
                with self._taking_part():
                    yield
            else:
                with self._taking_part_anyway(self._survival):
                    yield
        finally:
            self._has_joined = False
        for extra in self._extras:
            extra.joined()
        self._changed()
        self._are_equal = True

    def record(self, directory: str | Path, steps: int | None = None) -> Recording:
        """Return a block that records all steps inside it, as `wagma train` does; collective.

        Enter it before the first step, or when all ranks have made the same steps. Each rank writes
        a line for each step; when the optimizer is closed, rank 0 writes the summary. Then
        `wagma watch`, `wagma report` and `wagma.report.of` take the directory. A step takes some
        70 µs more.

        Args:
            directory: for the files; new, the same on all ranks.
            steps: number of steps that each rank will make, for the time that remains.

        Raises:
            RuntimeError: inside such a block.
            OSError: on entering it, the directory exists or cannot be made.

        Example:
            >>> with optimizer, optimizer.record("runs/mine") as run:
            ...     for inputs, targets in run.batches(loader):
            ...         ...
            ...         run.note(loss=loss.item())
            ...         optimizer.step()
        """
        from wagma.recording import Recording  # not at the top: it imports this module

        if self._recording is not None:
            raise RuntimeError(f"the steps are recorded in {self._recording.directory} already")
        return Recording(self, directory, steps)

    def _average_now(self) -> None:
        """Set every rank's model to the average over all ranks."""
        self.collective.synchronize(self._vectors)

    def _settle(self) -> None:
        """Bring in what is under way, and set every rank's model to the average; collective."""
        self.synchronize()

    def _go_on_from(self, averaging: dict[str, Any]) -> None:
        """Continue from the current model, with the version in `averaging`: see `state_dict`."""
        self.collective.load(self._vectors, averaging["version"])

    @contextmanager
    def _taking_part(self) -> Iterator[None]:
        """Make no more steps, and take part in the others'; wait at the end of the block."""
        with self.collective.joining(self._vectors):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and the averaging's counter.

        The key "averaging" holds "version", the steps made (with `trigger="solo"` the averages over
        all ranks); "ranks", their number; and "equal", whether all have the same model, because
        they have just averaged. Models and local states differ between ranks: save them on every
        rank to continue exactly, or one rank's inside `averaged()`. It completes outstanding
        averages, as `model_state_dict` does; call it before you copy the model's state.

        Raises:
            RuntimeError: a part of the model is not averaged, because it is new or was replaced.
        """
        self.complete()
        self.flat.check()
        state = self.optimizer.state_dict()
        averaging = {
            "version": self.collective.version,
            "ranks": self.collective.size,
            "equal": self._inside_average or self._just_averaged,
        }
        more = {type(extra).__name__: extra.state_dict() for extra in self._extras}
        if any(more.values()):
            averaging |= {"rank": self.collective.rank, "extras": more}
        return {**state, "averaging": averaging}

    def model_state_dict(self) -> dict[str, Any]:
        """Return the model's `state_dict()` with a copy of each tensor, to save or continue from.

        It is this rank's model, or the average inside `averaged()`; later steps do not change it.
        Outstanding averages are completed first. Tied tensors stay tied; values that are not
        tensors (a module's extra state) are not copied. Memory: one more model.

        Raises:
            RuntimeError: a part of the model is not averaged, because it is new or was replaced.
        """
        self.complete()
        self.flat.check()
        return self.flat.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, and continue from the model as it is now; collective.

        Load the model's state first. Outstanding averages are dropped. If another number of ranks
        saved it, and their models were not equal, rank 0 logs a warning of what is lost.

        Args:
            state_dict: this rank's; the state of a wrapped optimizer alone keeps the current
                version.

        Raises:
            RuntimeError: inside `averaged()`, or after its own `join` block inside another one.
            collectives.ClosedError: after `close`.
            collectives.DisagreementError: the ranks load different versions.
        """
        self._check_usable()
        self._drop()
        self._are_equal = False
        state = dict(state_dict)
        averaging = state.pop("averaging", {"version": self.collective.version})
        super().load_state_dict(state)
        self.flat.check()
        for extra in self._extras:
            extra.loaded(averaging.get("extras", {}).get(type(extra).__name__))
        if self.collective.rank == 0 and not averaging.get("equal"):
            warn_of_ranks(averaging.get("ranks", self.collective.size), self.collective.size)
        restarts = self._extras and not self._each_has_its_own(averaging)
        self._go_on_from(averaging)
        if self._survival is not None:
            self._survival.go_to(self.collective.version)
        if restarts:
            for extra in self._extras:
                extra.joined()
        if self._survival is not None:  # a rank may die before its next step
            self._survival.publish(self._published)

    def _each_has_its_own(self, averaging: dict[str, Any]) -> bool:
        """Return whether every rank is loading the state that it saved; collective.

        The collective must load vectors next, because it loads others here.
        """
        mine = averaging.get("rank") == self.collective.rank
        mine = mine and averaging["ranks"] == self.collective.size
        own = self._save()
        for vector in self._memory:
            vector.fill_(mine)
        try:
            self.collective.load(self._vectors, 0)
            self.collective.average(self._vectors)
            return bool(self._memory[0].eq(1).all())
        finally:
            self._restore(own)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer: `torch.optim.Optimizer.add_param_group`.

        Args:
            param_group: dict of the parameters, "params", and of options of this group.

        Raises:
            ValueError: it has a parameter that was not in the model when it was wrapped, or that is
                not averaged because it was frozen and not finite then.
        """
        before = len(self.param_groups)
        self.optimizer.add_param_group(param_group)
        try:
            self.flat.check_members(self.param_groups)
            for extra in self._extras:
                extra.check_group(self.param_groups[before])
        except (TypeError, ValueError):
            del self.param_groups[before:]
            raise

    def close(self) -> None:
        """Leave the collective when all steps that any rank began are complete; collective.

        The model keeps this rank's values, in memory of its own again. Closing twice has no effect.
        """
        try:
            self._leave()
        except BaseException:
            self._recorded.clear()  # other ranks may not come
            raise
        finally:
            self._release()
        self._finish_records()

    def _leave(self) -> None:
        """Close the collective; where ranks survive others, until all have."""
        if self._survival is None or self.closed:
            self.collective.close()
            return
        while not self._survival.survivors.agree(self._closes()):
            self._recover(partial(self._restore, self._save()), asked=True)

    def _closes(self) -> bool:
        """Close the collective, and return whether that has succeeded."""
        try:
            self.collective.close()
        except collectives.RankDiedError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            if exception[0] is None:
                self._leave()
            else:
                # If a rank has died, the job ends: others may wait for this one to go on with them.
                self.collective._is_abandoned = False
                self.collective.__exit__(*exception)
        finally:
            try:
                self._release()
            except collectives.CollectiveError:  # an average that failed with the block
                if exception[0] is None:
                    raise
        if exception[0] is not None:
            self._recorded.clear()
        self._finish_records()

    def _finish_records(self) -> None:
        """Write the summaries of what was recorded; collective, as closing is.

        After a failure there are none: the rank that failed does not come.
        """
        if self._recorded and self.collective.native.failure[0] >= 0:
            self._recorded.clear()
        while self._recorded:
            self._recorded.pop(0).finish()

    # Going on after the end of another rank's process

    _survival: Survival | None = None

    def _is_behind(self) -> bool:
        """Begin a step's average; return whether the others have made it without this rank."""
        survival = self._survival
        if survival is None or survival.begin_step(self._published):
            return False
        rank, step = self.collective.rank, survival.steps - 1
        self._note(Result(step, False, step, (rank,), 1.0, False))
        return True

    @property
    def _published(self) -> list[torch.Tensor]:
        """The vectors of which the others need a copy if this rank dies."""
        return [] if self._has_equal_models else self._memory

    def _average_step(self, call: Callable[[], T]) -> T | None:
        """Return a call's result for the step that `_is_behind` has begun.

        After a recovery, which takes the place of the step's average, return None.
        """
        result, recovered = self._surviving(call, restore=self._restore_published)
        survival = self._survival
        if survival is not None:
            survival.done = survival.steps
            if recovered:
                size, step = self.collective.size, survival.steps - 1
                self._note(Result(step, True, step, tuple(range(size)), float(size), True))
        return result

    def _surviving(
        self, call: Callable[[], T], *, restore: Callable[[], None]
    ) -> tuple[T | None, bool]:
        """Return the result of a call; if ranks die meanwhile, go on without them instead.

        Args:
            call: calls the collective.
            restore: puts this rank's own values back into vectors that it has partly averaged.

        Returns:
            The result, None if there was a recovery; and whether there was one.
        """
        if self._survival is None or self._survival.lets_through:
            return call(), False
        from mpi4py import MPI

        try:
            return call(), False
        except (collectives.RankDiedError, MPI.Exception) as error:
            log.debug("rank %d: %s", self.collective.rank, error)
        self._recover(restore)
        return None, True

    def _together(self, call: Callable[[], T], own: Saved) -> tuple[T | None, Saved]:
        """Return the result of a call that averages the models of all ranks.

        After a recovery it is made again, unless another rank had completed it: then the average of
        the recovery takes its place, and the result is None.

        Args:
            call: calls the collective.
            own: the rank's model, from `_save`.

        Returns:
            The result, and the rank's own model, which a recovery replaces.
        """
        survival = self._survival
        if survival is None or survival.lets_through:
            return call(), own
        result, recovered = self._surviving(call, restore=partial(self._restore, own))
        while recovered:
            own = self._save()
            if survival.others_completed > survival.completed:
                break
            result, recovered = self._surviving(call, restore=partial(self._restore, own))
        survival.completed += 1
        return result, own

    def _carried_out(self, call: Callable[[], T]) -> T:
        """Return the result of a call in which all ranks communicate outside of steps; collective.

        If ranks die meanwhile, all that live go on without them, and then make it again, also those
        that had completed it. No rank may have joined.

        Args:
            call: uses this optimizer, and its `comm`.
        """
        survival = self._survival
        if survival is None or survival.lets_through or self.closed:
            return call()
        from mpi4py import MPI

        while True:
            own, got = self._save(), list[T]()
            error: Exception | None = None
            survival.lets_through = True
            try:
                got.append(call())
            except (collectives.RankDiedError, MPI.Exception) as problem:
                log.debug("rank %d: %s", self.collective.rank, problem)
                self.collective.abandon()
                survival.survivors.revoke()
            except Exception as problem:
                if not is_on_all_ranks(problem):
                    raise
                error = problem
            finally:
                survival.lets_through = False
            if survival.survivors.agree(bool(got or error)):
                if error is not None:
                    raise error
                return got[0]
            self._recover(partial(self._restore, own), asked=True)

    def _meet(self, where: str) -> None:
        """Wait for all ranks, or raise RankFailedError for one that has failed; collective."""
        meet(self.comm, where, *limits(self._options))

    def _heard(self, bits: int) -> int:
        """Return the bits that any rank says; collective, between steps, with `survive`.

        All that live hear the same, also if ranks die meanwhile.
        """
        survival = self._survival
        assert survival is not None
        while (heard := survival.survivors.hear(bits)) is None:
            self._recover(lambda: None, asked=True)
        return heard

    @torch.no_grad()
    def _restore_published(self) -> None:
        if self._survival is not None and self._published:
            for vector, own in zip(self._memory, self._survival.last.own, strict=True):
                vector.copy_(own)

    @contextmanager
    def _taking_part_anyway(self, survival: Survival) -> Iterator[None]:
        """Take part in the others' steps, also after recoveries, until all have joined."""
        from mpi4py import MPI

        own = self._save()
        begun = False
        while survival.joined <= survival.joins:
            try:
                with self._taking_part():
                    if not begun:
                        begun = True
                        yield
                break
            except (collectives.RankDiedError, MPI.Exception):
                self._recover(partial(self._restore, own))
                own = self._save()
        if not begun:
            yield
        survival.joins += 1
        survival.joined = survival.joins
        survival.go_to(self.collective.version)

    def _recover(self, restore: Callable[[], None], *, asked: bool = False) -> None:
        """Go on without the ranks that have died, from the average of all models; collective.

        Args:
            restore: see `_surviving`.
            asked: whether the ranks have just agreed to do so.
        """
        survival = self._survival
        assert survival is not None
        began = time.monotonic()
        try:
            recovery = self._go_on(survival, restore, asked)
        except BaseException as error:  # the others would wait for this rank forever
            process.print_cause(error, self.collective.rank)
            process.end_job(survival.survivors.comm, 1)
            raise
        recovery = replace(recovery, seconds=time.monotonic() - began)
        if not recovery.dead:  # an agreement can fail although all live, by an error that is late
            log.debug("went on with the same ranks: %s", recovery)
            return
        log.log(logging.INFO if self.comm.rank else logging.WARNING, "%s", recovery)
        if survival.told is not None:
            survival.told(recovery)

    def _go_on(self, survival: Survival, restore: Callable[[], None], asked: bool) -> Recovery:
        """Do what `_recover` says, except telling of it."""
        size = survival.survivors.comm.size
        self.collective.abandon()
        survival.survivors.revoke()
        if not asked:
            survival.survivors.agree(False)
        restore()  # only now: the others have written into this rank's vectors until then
        own = [vector.clone() for vector in self._memory]
        recovery = self._rebuild(survival, own, size)
        while not survival.survivors.agree(recovery is not None):
            recovery = self._rebuild(survival, own, size)
        assert recovery is not None
        survival.settle()
        survival.publish(self._published)
        return recovery

    def _rebuild(self, survival: Survival, own: list[torch.Tensor], size: int) -> Recovery | None:
        """Average the models of those that live, and make their collective; collective.

        Args:
            survival: of this optimizer.
            own: this rank's vectors.
            size: the number of ranks before.

        Returns:
            None if it has failed because a rank has died meanwhile.
        """
        from mpi4py import MPI

        self.collective.abandon()
        survival.survivors.shrink()
        comm = survival.survivors.comm
        try:
            with rebuilding(comm):
                return self._build_again(survival, own, size)
        except (collectives.RankDiedError, MPI.Exception) as error:
            log.debug("recovery on %d ranks: %s", comm.size, error)
            survival.survivors.revoke()
            return None

    def _build_again(self, survival: Survival, own: list[torch.Tensor], size: int) -> Recovery:
        """Do what `_rebuild` says, or raise what a collective or MPI raises."""
        comm = survival.survivors.comm
        facts, dead = survival.gather(getattr(self, "total_steps", 0.0))
        readers = survival.estates(dead) if self._published else {}
        newest = survival.done == max(each.done for each in facts)
        models = [own] if newest or not self._has_equal_models else []
        models += [
            last[1]
            for each, (reader, _) in readers.items()
            if reader == comm.rank and (last := survival.last.of(each))
        ]
        average(comm, self._memory, models)
        if self._has_equal_models:
            equalize(comm, self.optimizer, [each.done for each in facts])
        self.comm = comm
        self.flat.zeros = self._make_zeros(self._options)
        before = self.collective.statistics()
        self.collective = self._make_collective(comm, **self._arguments_for(comm.size))
        self._past.append(before)
        self._excluded = 0
        self.collective._is_abandoned = True
        version = max(each.steps for each in facts)
        total = max(each.total for each in facts)
        self._go_on_from({"version": version, "total": total, "ranks": comm.size})
        self._changed()
        for extra in self._extras:
            extra.joined()
        self._rebuilt()
        survival.behind = self._behind(version - survival.steps)
        survival.joined = max(each.joins for each in facts)
        survival.others_completed = max(each.completed for each in facts)
        recovery = Recovery(
            tuple(sorted(map(survival.rank_before, dead))),
            tuple(sorted(map(survival.rank_before, readers))),
            *(size, comm.size, version, survival.behind),
            survival.describe_lost(dead, readers),
            0.0,
        )
        comm.Barrier()
        return recovery

    def _arguments_for(self, size: int) -> dict[str, Any]:
        """Return the arguments of the collective for another number of ranks."""
        arguments = {**self._arguments, **self._options}
        if arguments.get("group_size") is not None:
            arguments["group_size"] = min(arguments["group_size"], size)
        return arguments

    def _behind(self, steps: int) -> int:
        """Return how many steps a rank makes without averages if it is this many behind."""
        return steps

    def _rebuilt(self) -> None:
        """Go on with another collective."""

    # Parts of methods

    def _average_model(self, **weight: float) -> None:
        """Call the collective with the model, which is overwritten by the result."""
        self.flat.check_places()
        if self._is_behind():
            return
        self._begin_call()
        result = self._average_step(lambda: self.collective(self._vectors, **weight))
        if result is None:
            return
        self._note(result)
        self._end_call()
        self._changed()

    def _bare_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the wrapped optimizer's step, and what belongs to it in the other vectors."""
        if closure is None:
            self._before_step()
            loss = super()._bare_step()
        else:
            loss = super()._bare_step(self._completed(closure))
        for extra in self._extras:
            extra.after_step()
        return loss

    def _before_step(self) -> None:
        for extra in self._extras:
            extra.before_step()

    def _completed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure whose gradients the local optimizer's step may use."""

        def compute() -> Any:
            loss = closure()
            self._before_step()
            return loss

        return compute if self._extras else closure

    @property
    def _may_average(self) -> bool:
        """Whether the next call may average."""
        return True

    def _begin_call(self) -> None:
        for extra in self._extras:
            extra.begin_call(self._memory if self._may_average else [], self._count_excluded)

    def _end_call(self) -> None:
        for extra in self._extras:
            extra.end_call(self._count_excluded)
        excluded = self._count_excluded()
        if excluded != self._excluded:
            self._excluded = excluded
            self._left_out()

    def _count_excluded(self) -> int:
        """Return how many of this rank's vectors the collective has excluded so far."""
        excluded: int = self.collective._nonfinite
        return excluded

    def _left_out(self) -> None:
        """Let the local optimizer make state anew that an update which was left out has spoilt.

        Averaged state has been replaced with the model.
        """
        if self._shards.average_state:
            return
        state = self.optimizer.state
        spoilt = [each for each, values in state.items() if not is_finite(values)]
        for each in spoilt:
            forget(self.optimizer, each)
        if spoilt and not self._has_warned:
            self._has_warned = True
            log.warning(
                "rank %d, step %d: an update was not finite, and was left out; %s's state of %s "
                "was not, either, and begins anew; this is logged once",
                self.collective.rank,
                self._steps - 1,
                type(self.optimizer).__name__,
                counted(len(spoilt), "parameter"),
            )

    def _changed(self) -> None:
        """Go on from what the collective has put into the vectors."""
        self.flat.mark_changed()
        self._extras_changed()

    def _extras_changed(self) -> None:
        if self._extras:
            staged = self.collective.path == "staged"
            on_host = list(self.collective.on_host) if staged else []
            for extra in reversed(self._extras):
                count = len(extra.memory)
                extra.changed(on_host[-count:] if on_host and count else None)
                del on_host[len(on_host) - count :]

    def _save(self) -> Saved:
        """Return a copy of the model and of what else is averaged, for `_restore`."""
        vectors, constants = self.flat.save()
        more = [vector.clone() for extra in self._extras for vector in extra.memory]
        return vectors + more, constants

    def _restore(self, saved: Saved) -> None:
        """Put the values that `_save` returned back, bit for bit."""
        vectors, constants = saved
        count = len(self.flat.memory)
        self.flat.restore((vectors[:count], constants))
        for vector, value in zip(self._memory[count:], vectors[count:], strict=True):
            vector.copy_(value)
        for extra in self._extras:
            extra.changed(None)

    def _note(self, result: Any) -> None:
        again = result is self.result  # of a call that `_put_back` has made outstanding again
        self.result = result
        self.results.append(result)
        if self._recording is not None and not again:
            self._recording.completed(result)

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
        """Put the result of closing into the model, and move its tensors to their own memory."""
        if self.closed and not self._inside_average:
            try:
                self._keep_last_average()
            finally:
                self._let_go()
                for extra in self._extras:
                    extra.release()
                self.flat.release()

    # What a method that overlaps does with an outstanding average

    def _set_aside(self) -> Any:
        """Complete the outstanding average; return what `_put_back` needs to restore it."""
        self.complete()

    def _put_back(self, outstanding: Any) -> None:
        """Make the average that `_set_aside` returned outstanding again, in a restored model."""

    def _drop(self) -> None:
        """Complete the outstanding average, and leave the model unchanged."""

    def _keep_last_average(self) -> None:
        """Put the average that closing completed into the model, unless the model was changed."""


def weights_of(collective: Any) -> dict[str, Any]:
    """Return the settings of the models' weights that have an effect."""
    weights = {"weights": collective.weights}
    if collective.weights == "wp":
        weights["contraction"] = collective.contraction
    return weights


def is_finite(state: Any) -> bool:
    """Return whether all floating-point numbers in a local optimizer's state are finite."""
    if isinstance(state, torch.Tensor):
        return bool(state.isfinite().all())
    if isinstance(state, float):
        return math.isfinite(state)
    if isinstance(state, Mapping):
        return all(map(is_finite, state.values()))
    return not isinstance(state, (list, tuple)) or all(map(is_finite, state))


def forget(optimizer: torch.optim.Optimizer, parameter: Any) -> None:
    """Set an optimizer's state of a parameter to what it is before the first step."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        del optimizer.state[parameter]
        return
    # It makes its state when it is constructed.
    state = optimizer.state[parameter]
    state["step"].zero_()
    for group in optimizer.param_groups:
        if any(each is parameter for each in group["params"]):
            state["sum"].fill_(group["initial_accumulator_value"])


def warn_of_ranks(saved: int, loading: int) -> None:
    """Log what is lost if a checkpoint of another number of ranks is loaded."""
    if saved > loading:
        lost = "updates that only the models of the others contain are lost"
    elif saved < loading:
        lost = "a model that several ranks load counts several times in averages"
    else:
        return
    log.warning(
        "load_state_dict() has the state of one of %s, loaded on %d: %s; a model saved inside "
        "averaged() has the updates of all",
        *(counted(saved, "rank"), loading, lost),
    )


def unwrapped(optimizer: torch.optim.Optimizer, tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors; raise if they or the optimizer belong to another wrapper already."""
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
