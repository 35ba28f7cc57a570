"""The options that all averagers take, and what their constructors check."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

import collectives
from collectives import process
from collectives.agreement import raise_collectively
from collectives.collective import check_comm
from collectives.meeting import meet
from collectives.process import place_of
from collectives.settings import difference, limits, unknown_option
from collectives.survival import why_not
from wagma.optim.optimizers import Optimizers
from wagma.optim.survival import Recovery
from wagma.optim.tensors import OWN, Selection, Tensor

if TYPE_CHECKING:
    from mpi4py import MPI

    from wagma.optim.averaging import Averaging


class AveragerOptions(collectives.CollectiveOptions, total=False):
    """Keyword arguments of every averager.

    Attributes:
        comm: mpi4py communicator, by default `MPI.COMM_WORLD`. It is duplicated, and `join`,
            `record` and checkpoints use it, too: free it after `close`.
        exclude: what of the model stays each rank's own, of any kind: names of parameters, buffers
            or modules, patterns of them as ``"*.queue"``, or a function of a name and a tensor that
            returns whether it is excluded; the same on all ranks.
        include: frozen parameters that are averaged, named as for `exclude`: the weights of an
            encoder that follows another one, for example.
        survive: whether the others go on if the process of a rank ends; or a function that is
            called with the `Recovery` each time they did. It needs Open MPI 5 under its own
            ``mpiexec --with-ft ulfm``, and a method that can: WAGMA, LocalSGD with trigger
            "count", Allreduce.
    """

    comm: MPI.Intracomm | None
    exclude: Selection
    include: Selection
    survive: bool | Callable[[Recovery], object]


def given(scope: dict[str, Any]) -> dict[str, Any]:
    """Return a constructor's own arguments by name, of its `locals()`."""
    others = ("self", "model", "optimizer", "options", "__class__")
    return {name: value for name, value in scope.items() if name not in others}


def old_form(name: str, model: Any) -> Exception | None:
    """Return the error for an optimizer in place of the model, as it was in former versions."""
    if not isinstance(model, torch.optim.Optimizer):
        return None
    return TypeError(
        f"{name}(optimizer, model) is now averager = {name}(model, optimizer): the optimizer stays "
        "yours, so step it, and use averager for synchronize(), averaged(), join(), close(), …"
    )


def checked(
    averager: Averaging,
    model: Any,
    optimizer: Any,
    arguments: dict[str, Any],
    options: Any,
    made: Iterable[Averaging],
) -> tuple[MPI.Intracomm, Any, Selection, Selection]:
    """Return options of a constructor that no collective takes, if all ranks can go on; collective.

    They are taken out of the `options`: the communicator, `survive`, `exclude` and `include`.
    """
    comm, survive = options.pop("comm", None), options.pop("survive", False)
    if comm is None:
        comm = process.load_mpi().COMM_WORLD  # here, because it initializes MPI
    exclude, include = options.pop("exclude", ()), options.pop("include", ())
    check_comm(comm)
    name = type(averager).__name__
    meet(comm, f"the constructor of {name}", *limits(options))
    own: dict[str, Any] = {}
    error: Exception | None = old_form(name, model)
    try:
        averager.optimizers = Optimizers(None if error else optimizer)
        averager.optimizers.check(averager.averages_gradients, name)
        own = averager._check_settings(**arguments)
    except (TypeError, ValueError) as problem:
        error = error or problem
    error = error or unknown_option(type(averager), AveragerOptions, options)
    error = error or survival_error(averager, comm, survive, made)
    raise_collectively(comm, error)
    common = {"algorithm": name, "survive": bool(survive), **own}
    raise_collectively(comm, difference(comm, common))
    return comm, survive, exclude, include


def survival_error(
    averager: Averaging, comm: MPI.Intracomm, survive: Any, made: Iterable[Averaging]
) -> Exception | None:
    """Return why the others could not go on without a rank, if that is asked for."""
    if not isinstance(survive, bool) and not callable(survive):
        return TypeError(f"survive must be True, False or a function, not {survive!r}")
    if not survive:
        return None
    name = type(averager).__name__
    if not averager._survives:
        return ValueError(
            f"survive: {name} cannot go on without a rank; WAGMA, LocalSGD with trigger='count' "
            "and Allreduce can"
        )
    if place_of(comm) is not process:
        return ValueError("survive: simulated ranks do not die")
    if any(other._recovery.survives and not other.closed for other in made):
        return ValueError(
            f"survive: another averager of this process is open with it, and ranks could not agree "
            f"which goes on first: close that one before {name} is made"
        )
    reason = why_not()
    return RuntimeError(f"survive: {reason}") if reason else None


def check_free(
    tensors: list[Tensor], optimizers: Optimizers, made: Iterable[Averaging]
) -> list[Tensor]:
    """Return the tensors; raise ValueError if they or an optimizer belong to another averager."""
    mine = {id(tensor.value) for tensor in tensors if tensor.role != OWN}
    for other in made:
        if other.closed:
            continue
        theirs = [*other.flat.parameters, *other.flat.buffers]
        shared = [each for each in theirs if id(each.value) in mine]
        same = [each for each in other.optimizers.given if each in optimizers.given]
        if shared or same:
            what = f"{shared[0].kind} {shared[0].name!r}" if shared else type(same[0]).__name__
            raise ValueError(
                f"{what} belongs to another {type(other).__name__} averager, which is not closed: "
                "one averager takes a list of all of a model's optimizers"
            )
    return tensors
