"""WAGMA-SGD, the wait-avoiding group model averaging of Li et al. (IEEE TPDS 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import collectives
from wagma.optim.flat import FlatModel, agree, broadcast, check_members, survey
from wagma.optim.wrapper import Wrapper

if TYPE_CHECKING:  # importing it initialises MPI
    from mpi4py import MPI


class WAGMA(Wrapper):
    """Average the model with a changing group of ranks after every step of a local optimiser.

    Algorithm 2 of the paper: each rank applies its local optimiser to its own batch's gradient,
    then averages the resulting model in this iteration's group without waiting for ranks that
    are late, whose last models stand in for them; every `sync_period` steps all ranks average.

    The model's parameters and floating-point buffers become views of one vector (`FlatModel`
    says which) and start from rank 0's values on every rank, integer buffers too. The parameter
    objects stay the same, so the wrapped optimiser, schedulers and `GradScaler` go on working.
    All ranks make the same number of steps.

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
        result: what `collective` returned at the last step, None before the first.
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
    ):
        """Wrap an optimiser and its model; collective.

        Args:
            optimizer: any `torch.optim.Optimizer` of the model's parameters.
            model: `torch.nn.Module` on the CPU, its parameters and floating-point buffers dense
                and all float32 or all float64, of the same shapes on every rank.
            group_size: S, ranks per group, 1 to the number of ranks P; by default the paper's
                √P, rounded up to a power of two.
            sync_period: τ, steps from one average over all ranks to the next, at least 1.
            comm: mpi4py communicator, by default `MPI.COMM_WORLD`; it is duplicated for use.
            wait: "nobody", or "group" to wait in every step for the group's members, which makes
                runs repeatable bit for bit.
            late: how a late rank's model is merged, "paper" or "conserving"; by default
                `collectives.DEFAULT_LATE`.

        Raises:
            TypeError, ValueError: a model that cannot be averaged (the message names the
                parameter), or models or settings that differ between ranks (it names the ranks);
                the same on every rank.
        """
        if comm is None:
            from mpi4py import MPI  # here, because it initialises MPI

            comm = MPI.COMM_WORLD
        tensors = agree(comm, lambda: survey(model, optimizer))
        broadcast(comm, tensors)
        super().__init__(optimizer)
        self.flat = FlatModel(tensors)
        self.collective = collectives.GroupAllreduce(
            comm,
            self.flat.vector,
            group_size=default_group_size(comm.Get_size()) if group_size is None else group_size,
            sync_period=sync_period,
            wait=wait,
            late=late,
        )
        self.result = None
        self._inside_average = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the wrapped optimiser, then average the model (Algorithm 2).

        Args:
            closure: function that evaluates the model and returns the loss, for the optimisers
                that want one.

        Returns:
            What the wrapped optimiser's step returned.

        Raises:
            RuntimeError: a parameter's memory was replaced after wrapping, or this is inside
                `averaged()`.
            collectives.ClosedError: after `close`.
        """
        self._check_usable()
        loss = self.optimizer.step(closure)
        self.flat.check()
        self.result = self.collective(self.flat.vector)
        return loss

    def synchronize(self) -> None:
        """Set every rank's model to the average over all ranks now; collective, not a step."""
        self._check_usable()
        self.flat.check()
        self.collective.synchronize(self.flat.vector)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the average over all ranks in the model, to evaluate or save it; collective.

        Afterwards each rank has its own model again, bit for bit, integer buffers included, and
        training goes on as if nothing had been. `step` and `synchronize` raise inside.
        """
        self._check_usable()
        self.flat.check()
        own = self.flat.save()
        self._inside_average = True
        try:
            self.collective.average(self.flat.vector)
            yield
        finally:
            self._inside_average = False
            self.flat.restore(own)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimiser.

        Raises:
            ValueError: it has a parameter that was not in the model when that was wrapped.
        """
        before = len(self.param_groups)
        self.optimizer.add_param_group(param_group)
        try:
            check_members(self.flat.averaged, self.param_groups)
        except ValueError:
            del self.param_groups[before:]
            raise

    def close(self) -> None:
        """Leave the collective, once every step that any rank began is done; collective.

        The model stays usable and keeps this rank's values.
        """
        self.collective.close()

    def __enter__(self) -> WAGMA:
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        return self.collective.__exit__(*exception)

    def _check_usable(self) -> None:
        if self.collective.closed:
            raise collectives.ClosedError("this WAGMA optimizer is closed")
        if self._inside_average:
            raise RuntimeError("inside averaged() the model is the average, not this rank's own")


def default_group_size(size: int) -> int:
    """Return √P rounded up to a power of two, at most P: the paper's choice of S."""
    return min(size, 2 ** math.ceil(math.log2(size) / 2))
