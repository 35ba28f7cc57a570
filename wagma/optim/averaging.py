"""The inside of averagers: their vectors, the collective's calls, and what these change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import collectives
from collectives.agreement import agreed, raise_collectively
from collectives.meeting import meet
from collectives.result import Result
from collectives.settings import (
    checked_weight,
    difference,
    limits,
    or_default,
)
from collectives.statistics import Statistics
from wagma.optim.construction import AveragerOptions, check_free, checked
from wagma.optim.extras import Extra
from wagma.optim.flat import FlatModel, Saved
from wagma.optim.left_out import LeftOut
from wagma.optim.optimizers import CHECKED, Optimizers
from wagma.optim.recovery import NoRecovery, WithRecovery
from wagma.optim.shards import Shards
from wagma.optim.state import state_of
from wagma.optim.steps import Steps
from wagma.optim.survival import equalize
from wagma.optim.tensors import agree, broadcast, survey
from wagma.optim.vectors import DeviceVector, zeros_in_windows

if TYPE_CHECKING:  # importing it initializes MPI
    from mpi4py import MPI
    from typing_extensions import Unpack

    from wagma.optim.gradients import FlatGradients
    from wagma.recording import Recording

PLAIN = (bool, int, float, str, tuple, list, type(None))  # what a record of a run can have

_made: weakref.WeakSet[Averaging] = weakref.WeakSet()


class Averaging:
    """The inside of an `Averager`, which has what a user calls.

    A method defines `_make_collective` and `_average`, and `_average_gradients` if it averages
    these; `interfaces.Collective` describes a collective.
    """

    # How many vectors of the model's length a simulated rank has besides model and gradient.
    _simulated_vectors = 3
    # Whether its collective averages vectors in windows where they are.
    _uses_windows = False
    # Whether it can go on without a rank; and whether all ranks then have the same model anyway.
    _survives = False
    _has_equal_models = False
    # Whether steps average gradients, before the update.
    averages_gradients = False
    # Whether steps have a weight; and whether buffers are averaged only where all ranks average,
    # beside the collective's vectors, as it would average changes of them.
    _is_weighted = True
    _buffers_apart = False
    # The class of its collective, and which of the method's arguments that does not take.
    _makes: Any = None
    _not_for_it: tuple[str, ...] = ()
    # What is averaged in addition to the model; `_check_settings` sets another choice.
    _shards = Shards(False, None)

    _gradients: FlatGradients
    optimizers: Optimizers

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        arguments: dict[str, Any],
        **options: Unpack[AveragerOptions],
    ):
        """Average beside a model's optimizers; collective.

        Args:
            model: `torch.nn.Module`, of the same shapes on every rank; what is averaged of it is
                dense, on the CPU or one CUDA device, of floating-point or complex numbers.
            optimizer: a `torch.optim.Optimizer` of the model's parameters, a list of them, or None.
            arguments: the method's own, by name, for `_check_settings` and `_make_collective`.
            **options: see `AveragerOptions`.

        Raises:
            TypeError, ValueError: the model or the optimizer's state (`average_state`) cannot be
                averaged, or something differs between ranks; it names that; on every rank.
            collectives.CudaError: the model is on a device, and there is no CUDA driver.
        """
        comm, survive, *selected = checked(self, model, optimizer, arguments, options, _made)
        self.comm, self._model, self._selected = comm, model, selected
        self._arguments, self._options = arguments, dict[str, Any](options)
        self._past: list[Statistics] = []  # of former collectives
        self._recovery = NoRecovery(self)
        self.collective: Any = None
        self._build(comm, survive)
        self.weight, self.steps = 1.0, 0
        self._steps_of = Steps(self, self.optimizers.given)
        self._watch = LeftOut(self)
        self._result: Result | None = None
        self._noted: Any = None  # the same, as the collective has returned it
        self.results: list[Result] = []
        self._inside_average = self._inside_join = self._has_joined = self._is_manual = False
        self._are_equal = False  # all ranks' models, since the last step
        self._recording: Recording | None = None
        self._recorded: list[Recording] = []  # without a summary yet
        _made.add(self)

    def _build(self, comm: MPI.Intracomm, survive: Any) -> None:
        """Move what is averaged into vectors, and make the collective; collective."""
        optimizers = self.optimizers
        tensors = agree(
            comm,
            lambda: check_free(
                survey(self._model, optimizers.param_groups, *self._selected), optimizers, _made
            ),
        )
        device = next(t.value.device.type for t in tensors if t.is_parameter and not t.role)
        known = agreed(comm, lambda: self._shards.look_at(optimizers))
        raise_collectively(comm, difference(comm, {"the model's device": device, **known}))
        broadcast(comm, tensors)
        zeros = self._make_zeros()
        wide, apart = not self.averages_gradients, self._buffers_apart
        self.flat = agreed(
            comm,
            lambda: FlatModel(self._model, tensors, zeros, wide=wide, buffers_apart=apart),
            lambda flat: flat.release(),
        )
        try:
            self._extras = agreed(comm, lambda: self._make_extras(**self._arguments))
            if survive:
                told = survive if callable(survive) else None
                self._recovery = recovery = WithRecovery(self, told)
                self.comm = comm = recovery.survivors.comm
            self.collective = self._make_collective(comm, **self._arguments, **self._options)
            self.collective._is_abandoned = bool(survive)
        except BaseException:
            self.flat.release()
            raise
        self._excluded = 0  # of this rank's vectors, up to the last call

    # What a method defines

    def _check_settings(self, **settings: Any) -> dict[str, Any]:
        """Return the settings that must not differ between ranks and that no collective compares.

        Raise TypeError or ValueError if one is invalid, or an optimizer is not supported.
        """
        return {}

    def _make_zeros(self) -> Callable[..., torch.Tensor]:
        """Return what makes averaged vectors: in windows if that is of use on all ranks."""
        if not self._uses_windows:
            return torch.zeros
        transport = or_default("transport", self._options.get("transport"))
        if all(self.comm.allgather(transport != "messages")):
            return zeros_in_windows(self.comm)
        return torch.zeros

    def _make_extras(self, **settings: Any) -> list[Extra]:
        """Return what is averaged in addition to the model."""
        return []

    def _make_collective(self, comm: MPI.Intracomm, **settings: Any) -> Any:
        """Make the collective that averages, for vectors like `_vectors`; collective."""
        settings = {n: value for n, value in settings.items() if n not in self._not_for_it}
        return self._makes(comm, self._vectors, **settings)

    def _check_weight(self, weight: float) -> None:
        """Raise ValueError if a step cannot have this weight."""
        if not self._is_weighted and weight != 1:
            raise ValueError(
                f"weight is {weight:g}, but all ranks have the same weight in {type(self).__name__}"
            )

    def _average_gradients(self, weight: float, finite: bool) -> bool:
        """Average the gradients; return whether the optimizers make steps with them."""
        raise NotImplementedError

    def _average(self, weight: float) -> None:
        """Do what is done after the optimizers' steps: average the model."""
        self._average_model(**({"weight": weight} if self._is_weighted else {}))

    @property
    def settings(self) -> dict[str, Any]:
        """The method's arguments by name, with defaults resolved, for a record of the run."""
        named = {n: getattr(self.collective, n, value) for n, value in self._arguments.items()}
        return {name: value for name, value in named.items() if isinstance(value, PLAIN)}

    @property
    def weight(self) -> float:
        """The weight of this rank in the next steps, as for `step`."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._weight = checked_weight(weight)

    @property
    def closed(self) -> bool:
        """Whether `close` was called; the optimizers may then be used by themselves."""
        return self.collective.closed

    def _check_usable(self) -> None:
        if self.closed:
            raise collectives.ClosedError(f"this {type(self).__name__} averager is closed")
        if self._inside_average:
            raise RuntimeError("inside averaged() the model is the average, not this rank's own")
        if self._has_joined:
            raise RuntimeError(
                "this averager has left its join() block: wait for the outermost one"
            )

    # Vectors

    @property
    def _vectors(self) -> list[np.ndarray | DeviceVector]:
        """The vectors for the collective: those of the model, and of what else is averaged."""
        if self.averages_gradients:
            return self._gradients.with_model(self.flat)
        return [*self.flat.vectors, *(each for extra in self._extras for each in extra.vectors)]

    @property
    def _memory(self) -> list[torch.Tensor]:
        """The same vectors as tensors."""
        return [*self.flat.memory, *(each for extra in self._extras for each in extra.memory)]

    def _give(self) -> list[np.ndarray | DeviceVector]:
        """Return the vectors for the collective, with the model as it is now."""
        self.flat.check_places()
        try:
            self._watch.buffers(self.flat.give())
        except BaseException as error:  # others may wait for this rank
            self.collective.fail(error)
            raise
        return self._vectors

    def _changed(self, share: float = 0.0) -> None:
        """Go on from what the collective has put into the vectors; `share`: see `take`."""
        self.flat.take(share)
        if not self._inside_average:
            self.flat.mark_changed()
        self._watch.rebase()
        if self._extras:
            staged = self.collective.path == "staged"
            on_host = list(self.collective.on_host) if staged else []
            for extra in reversed(self._extras):
                count = len(extra.memory)
                extra.changed(on_host[-count:] if on_host and count else None)
                del on_host[len(on_host) - count :]

    def _save(self) -> tuple[Saved, list[torch.Tensor]]:
        """Return a copy of the model and of what else is averaged, for `_restore`."""
        return self.flat.save(), [v.clone() for extra in self._extras for v in extra.memory]

    def _restore(self, saved: tuple[Saved, list[torch.Tensor]]) -> None:
        """Put the values that `_save` returned back, bit for bit."""
        self.flat.restore(saved[0])
        memory = [vector for extra in self._extras for vector in extra.memory]
        for vector, value in zip(memory, saved[1], strict=True):
            vector.copy_(value)
        for extra in self._extras:
            extra.changed(None)

    def _release_vectors(self) -> None:
        for extra in self._extras:
            extra.release()
        self.flat.release()

    # Calls

    def _average_model(self, **weight: float) -> None:
        """Call the collective with the model, which is overwritten by the result."""
        vectors = self._give()
        if self._recovery.is_behind():
            return
        self._begin_call()
        result = self._recovery.average_step(lambda: self.collective(vectors, **weight))
        if result is None:
            return
        self._note(result)
        self._end_call()
        self._changed()

    @property
    def _may_average(self) -> bool:
        """Whether the next call may average."""
        return True

    def _begin_call(self) -> None:
        if self.steps in CHECKED and not self._shards.average_state:
            self.optimizers.check_steps(self.flat.parameters)
        for extra in self._extras:
            extra.begin_call(self._memory if self._may_average else [], self._count_excluded)

    def _end_call(self) -> None:
        for extra in self._extras:
            extra.end_call(self._count_excluded)
        excluded = self._count_excluded()
        if excluded != self._excluded:
            self._excluded = excluded
            self._left_out()
        if self._watch.names and self._result is not None:
            self._result = self._result._replace(left_out=self._watch.names)
            self.results[-1] = self._result
            self._watch.names = ()

    def _count_excluded(self) -> int:
        """Return how many of this rank's vectors the collective has excluded so far."""
        excluded: int = self.collective._nonfinite
        return excluded

    def _left_out(self) -> None:
        """Say that an update was left out, and put back the states that it has spoilt."""
        # Averaged state has been replaced with the model.
        spoilt = [] if self._shards.average_state else self.optimizers.put_back()
        self._watch.update(spoilt)

    def _note(self, result: Any) -> None:
        again = result is self._noted  # of a call that `_put_back` has made outstanding again
        self._result = self._noted = result
        self.results.append(result)
        if self._recording is not None and not again:
            self._recording.completed(result)

    def _average_now(self) -> None:
        """Set every rank's model to the average over all ranks."""
        self.collective.synchronize(self._give())
        self.flat.average_buffers(self.comm)

    def _average_all(self) -> None:
        """Set every rank's model to the average over all ranks, from which they go on."""
        self._recovery.together(self._average_now, None)
        self._changed()
        self._are_equal = True

    def _settle(self) -> None:
        """Bring in what is under way, and average all ranks' models; collective."""
        self._check_usable()
        self.complete()
        self._average_all()

    def _state(self) -> dict[str, Any]:
        """Return what `state_dict` does, without a look at the model."""
        return state_of(self)

    def _go_on_from(self, averaging: dict[str, Any]) -> None:
        """Continue from the current vectors, with the version in `averaging`: see `state_dict`."""
        self.collective.load(self._vectors, averaging["version"])

    @contextmanager
    def _taking_part(self) -> Iterator[None]:
        """Make no more steps, and take part in the others'; wait at the end of the block."""
        made = self.collective.version
        with self._joining():
            yield
        if self.averages_gradients:
            if not self._recovery.survives:
                self._meet("join()")  # a rank may have failed since the others have joined
            equalize(self.comm, self.optimizers.given, self.comm.allgather(made))

    @contextmanager
    def _joining(self) -> Iterator[None]:
        """Take part in the others' calls, then take the model of all; wait at the block's end."""
        with self.collective.joining(self._give()):
            yield

    def _meet(self, where: str) -> None:
        """Wait for all ranks, or raise RankFailedError for one that has failed; collective."""
        meet(self.comm, where, *limits(self._options))

    def _rebuilt(self) -> None:
        """Go on with another collective."""

    # What a method that overlaps does with an outstanding average

    def complete(self) -> None:
        """Wait for what the last step left outstanding: nothing, unless the method overlaps."""

    def _set_aside(self) -> Any:
        """Complete the outstanding average; return what `_put_back` needs to restore it."""
        self.complete()

    def _put_back(self, outstanding: Any) -> None:
        """Make the average that `_set_aside` returned outstanding again, in a restored model."""

    def _drop(self) -> None:
        """Complete the outstanding average, and leave the model unchanged."""

    def _keep_last_average(self) -> None:
        """Put the average that closing completed into the model, unless the model was changed."""
