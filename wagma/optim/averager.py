"""The base class of all methods: what a user calls beside the optimizers that train a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import collectives
from collectives.result import Result
from collectives.settings import checked_weight
from collectives.statistics import total
from wagma.optim import state
from wagma.optim.averaging import Averaging
from wagma.optim.joining import check_threads, join_blocks

if TYPE_CHECKING:
    from typing_extensions import Self

    from wagma.recording import Recording


class Averager(Averaging):
    """Averages a model, or its gradients, between ranks, beside the optimizers that train it.

    The optimizers stay the user's, who steps, schedules, scales and saves them as without it: the
    averager hears of their steps, and averages after the last of several has made its step. Without
    an optimizer, or for one that steps by other methods, call `step` after each update.

    Averaged are the trainable parameters, and persistent buffers of floating point, as values.
    Frozen parameters and integer buffers are rank 0's on all ranks at first, and then left alone;
    buffers that are not persistent are always. `exclude` leaves more as each rank's own. Parameters
    become parts of one vector per dtype (see `FlatModel`); `close` gives them memory of their own
    again. All ranks make the same number of steps, unless they `join`. A step that a `GradScaler`
    skips on some rank because of infinite gradients counts as well. After `requires_grad_` or
    `add_param_group` has made more trainable, all ranks call `refresh`.

    Where models are averaged, an update that is not finite is left out, and the rank continues from
    a model of the others; the optimizer's state is put back to what it was before. Elements of
    buffers that are not finite leave themselves out only. The first time, the 10th, the 100th, … a
    warning names the tensor.

    For ranks with different data some methods have two more options, whose vectors are averaged as
    parts of the model's: ``average_state=True`` averages the local optimizer's state, its tensors
    of a parameter's shape and its numbers, and makes them views of vectors;
    ``correction="control-variates"`` (`ControlVariates`, SCAFFOLD) corrects a rank's gradients.

    Attributes:
        optimizers: the `Optimizers`: their `given` are the user's.
        collective, comm: the collective that averages, and the communicator, as given.
        flat, steps: the `FlatModel` that is trained, and the number of this rank's steps.
        results: list of the results of all calls completed since the last step began.
    """

    def __repr__(self) -> str:
        count = self.collective.size
        parts = [str(self.optimizers), f"{count} rank{'s' * (count != 1)}"]
        parts += [f"{name}={value!r}" for name, value in self.settings.items()]
        parts += [f"step {self.steps}", "closed" if self.closed else "open"]
        return f"{type(self).__name__}({', '.join(parts)})"

    def __getstate__(self) -> NoReturn:
        why = "cannot be copied or pickled, because it holds a communicator: save its state_dict()"
        raise TypeError(f"{type(self).__name__} {why}")

    # Steps

    def step(self, *, weight: float | None = None) -> None:
        """Average after an update; for training without an optimizer's `step`.

        Args:
            weight: weight of this rank relative to 1, such as its batch size divided by the mean
                size; finite, at least 0. None: `weight`, the attribute, which also the steps of
                optimizers have. Where gradients are averaged, `average_gradients` has it.

        Raises:
            RuntimeError: the optimizer's `step`, which averages by itself, has been made; or
                `average_gradients` has not; or a parameter was replaced; or inside `averaged()`.
            TypeError, ValueError: the weight is invalid, or a trainable parameter not averaged.
            collectives.RankFailedError, collectives.ClosedError: another rank has failed; closed.
        """
        self._begin_manual("step()")
        if self.averages_gradients and not self._is_manual:
            raise RuntimeError("step() without average_gradients() before the update")
        if self._shards.correction is not None:
            raise RuntimeError("correction= needs the optimizer's step(), before which it corrects")
        if not self.averages_gradients:
            self._steps_of.begin()
        self._is_manual = False
        self._steps_of.end(None, weight)

    def average_gradients(self, *, weight: float | None = None) -> bool:
        """Average the gradients before an update; for training without an optimizer's `step`.

        Args:
            weight: as for `step`.

        Returns:
            Whether to make the update: if no rank's gradients are finite, no rank makes it. If an
            exception ends it, go on from a checkpoint: the others have made it.

        Raises:
            RuntimeError: also if the method averages models.
            TypeError, ValueError, collectives.RankFailedError, collectives.ClosedError: as `step`.
        """
        self._begin_manual("average_gradients()")
        if not self.averages_gradients:
            raise RuntimeError(f"{type(self).__name__} averages models: call step() only")
        if not self._is_manual:
            self._steps_of.begin()
        self._is_manual = True
        given = self.weight if weight is None else checked_weight(weight)
        return self._average_gradients(given, True)

    def _begin_manual(self, call: str) -> None:
        self._check_usable()
        if self._steps_of.heard:
            how = "is for training without an optimizer's step(), which averages by itself"
            raise RuntimeError(f"{call} {how}: one has been made")

    # Averages over all ranks

    def synchronize(self) -> None:
        """Set every rank's model to the average over all ranks now; collective, not a step.

        Raises:
            RuntimeError: inside `averaged()`, or after its own `join` block inside another one; or
                optimizers have made steps that the averager has not heard of.
            collectives.ClosedError: after `close`.
        """
        self._check_usable()
        self.complete()
        self._check_model()
        self._average_all()
        self._watch.buffers(self.flat.unseen())

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the average over all ranks in the model, to evaluate or save it; collective.

        At the end of the block each rank has its own model again, bit for bit, including all
        buffers, and the training is unaffected. Of an optimizer with modes (schedule-free) the
        ranks' models to evaluate are averaged, in either mode.

        Raises:
            RuntimeError, collectives.ClosedError: as `synchronize` does.
        """

        def average() -> None:
            self.collective.average(self._give())
            self.flat.average_buffers(self.comm)

        with self._holding(average, together=True):
            yield

    @contextmanager
    def _holding(self, get: Callable[[], Any], *, together: bool = False) -> Iterator[Any]:
        """Hold in the model what `get` overwrites the vectors by; yield what that returns.

        Args:
            get: gives the collective the vectors.
            together: whether it is collective.
        """
        self._check_usable()
        self._check_model()
        if self._recovery.survives:
            self.complete()
        own = self._save()
        outstanding = self._set_aside()
        self._inside_average = True
        try:
            if together:
                with self.optimizers.evaluating():
                    got, own = self._recovery.together(get, own)
                    self._changed()
                    yield got
            else:
                with self.optimizers.training(self._shards.average_state):
                    got = get()
                    self._changed()
                    with self.optimizers.evaluating():
                        yield got
        finally:
            self._inside_average = False
            self._restore(own)
            self._put_back(outstanding)
            self._release()  # if the averager was closed inside the block

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks make different numbers of steps inside the block; collective.

        A rank that leaves the block takes part in the others' operations until all ranks have left
        it, so that no rank waits for it and its updates are not lost. Then all ranks have the same
        model and, at a common pace, the same number of versions; where gradients are averaged also
        the optimizers' states of a rank that made the most steps. For nested blocks of several
        averagers this holds after the outermost one; an averager whose own has ended waits for it.

        Raises:
            RuntimeError: as `synchronize` does; or gradients are averaged, and MPI was initialized
                without the thread level MULTIPLE.
            collectives.ClosedError: after `close`.
        """
        self._check_usable()
        if self.averages_gradients:
            check_threads(type(self).__name__)
        if self._inside_join:
            yield
            return
        self._inside_join = True
        try:
            with join_blocks.enter() as begun:
                yield
                self._check_usable()
                self.complete()
                self._check_model()
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
            with self._recovery.taking_part():
                yield
        finally:
            self._has_joined = False
        self.flat.average_buffers(self.comm)
        for extra in self._extras:
            extra.joined()
        self._changed()
        self._are_equal = True

    def refresh(self) -> None:
        """Average what is trainable now, after `requires_grad_` or new parameters; collective.

        All ranks go on from the average of their models; `collective` is a new one.

        Raises:
            RuntimeError, collectives.ClosedError: as `synchronize` does; or with `survive`.
            TypeError, ValueError: as the constructor does.
        """
        self._check_usable()
        if self._recovery.survives:
            raise RuntimeError("refresh() with survive: close this averager, and make another one")
        if self._inside_join:
            raise RuntimeError("refresh() inside join(), which some ranks may have left")
        state.build_anew(self)

    # The state

    def state_dict(self) -> dict[str, Any]:
        """Return what the averager has to continue with beside the model and the optimizers.

        "steps" are this rank's, "version" counts the collective's calls; "equal" is whether all
        ranks have the same model, because they have just averaged. Models and local states differ
        between ranks: save them on every rank to continue exactly, or one rank's inside
        `averaged()`. Outstanding averages are completed: call it before you copy the model's state.
        With parameters of half precision it has a float32 copy of these.

        Raises:
            RuntimeError: a part of the model is not averaged, because it is new or was replaced; or
                as `synchronize` does.
        """
        self.complete()
        self._check_model()
        return self._state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, and continue from the model as it is now; collective.

        Load the states of the model and the optimizers first. Outstanding averages are dropped. If
        another number of ranks saved it, and their models were not equal, rank 0 logs a warning of
        what is lost.

        Args:
            state_dict: this rank's.

        Raises:
            RuntimeError, collectives.ClosedError: as `synchronize` does.
            collectives.DisagreementError: the ranks load different versions.
        """
        self._check_usable()
        self._drop()
        state.load(self, state_dict)

    # What is known of the training

    @property
    def result(self) -> Result | None:
        """The result of the `collective`'s call completed last; None before the first."""
        if self._result is None:
            self._watch.check_heard()
        return self._result

    def statistics(self) -> Any:
        """Return this rank's `collectives.statistics.Statistics` so far."""
        self._watch.check_heard()
        self._watch.buffers(self.flat.unseen())
        now = self.collective.statistics()
        now = total([*self._past, now]) if self._past else now
        return now._replace(left_out=now.left_out + self._watch.of_buffers)

    def timeline(self, directory: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Return a block that records every rank's timeline in a directory; collective.

        Args:
            directory: as for `collectives.Collective.timeline`.
        """
        return self.collective.timeline(directory)

    def record(self, directory: str | Path, steps: int | None = None) -> Recording:
        """Return a block that records all steps inside it, as `wagma train` does; collective.

        Enter it before the first step, or when all ranks have made the same steps. Each rank writes
        a line a step, which takes 70 µs; when the averager is closed, rank 0 writes the summary.
        `wagma watch`, `wagma report` and `wagma.report.of` take the directory.

        Args:
            directory: for the files; new, the same on all ranks.
            steps: number of steps that each rank will make, for the time that remains.

        Raises:
            RuntimeError: inside such a block.
            OSError: on entering it, the directory exists or cannot be made.
        """
        from wagma.recording import Recording  # not at the top: it imports this module

        if self._recording is not None:
            raise RuntimeError(f"the steps are recorded in {self._recording.directory} already")
        return Recording(self, directory, steps)

    # The end

    def close(self) -> None:
        """Leave the collective when all steps that any rank began are complete; collective.

        The model keeps this rank's values, in memory of its own again, and nothing is left in the
        optimizers. Closing twice has no effect.

        Raises:
            RuntimeError: steps were made that the averager has not heard of; it is closed then.
        """
        unheard = None if self.closed else self._watch.unheard(closing=True)
        try:
            self._recovery.leave()
        except BaseException:
            self._recorded.clear()  # other ranks may not come
            raise
        finally:
            self._release()
        self._finish_records()
        if unheard is not None:
            raise unheard

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        if exception[0] is None:
            return self.close()
        try:
            # If a rank has died, the job ends: others may wait for this one to go on with them.
            self.collective._is_abandoned = False
            self.collective.__exit__(*exception)
        finally:
            with suppress(collectives.CollectiveError):  # an average that failed with the block
                self._release()
        self._recorded.clear()

    def _release(self) -> None:
        """Leave the model with the result of closing, in memory of its own."""
        if self.closed and not self._inside_average:
            try:
                self._keep_last_average()
            finally:
                self._steps_of.close()
                self._watch.stop()
                self._release_vectors()

    def _finish_records(self) -> None:
        """Write the summaries of what was recorded; collective, as closing is.

        After a failure there are none: the rank that failed does not come.
        """
        if self._recorded and self.collective.native.failure[0] >= 0:
            self._recorded.clear()
        while self._recorded:
            self._recorded.pop(0).finish()

    def _check_model(self) -> None:
        """Raise RuntimeError if the model has parts or made steps that are not averaged."""
        self.flat.check()
        self._watch.check_heard()
