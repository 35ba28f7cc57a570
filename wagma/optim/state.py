"""What an averager has to continue with, beside the model and the optimizers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from collectives.agreement import counted

if TYPE_CHECKING:
    from wagma.optim.averaging import Averaging

log = logging.getLogger(__name__)


def state_of(averager: Averaging) -> dict[str, Any]:
    """Return the state: see `Averager.state_dict`."""
    last, collective = averager._result, averager.collective
    just_averaged = (
        last is not None and last.synchronized and last.version == collective.version - 1
    )
    state: dict[str, Any] = {
        "steps": averager.steps,
        "version": collective.version,
        "ranks": collective.size,
        "rank": collective.rank,
        "equal": averager._inside_average or averager._are_equal or just_averaged,
    }
    if averager.flat.stand_ins:
        averager.flat.give()
        state["wide"] = [vector.clone() for vector in averager.flat.stand_ins]
    more = {type(extra).__name__: extra.state_dict() for extra in averager._extras}
    return state | ({"extras": more} if any(more.values()) else {})


def load(averager: Averaging, state: dict[str, Any]) -> None:
    """Continue from a state: see `Averager.load_state_dict`; collective."""
    flat, extras, collective = averager.flat, averager._extras, averager.collective
    averager._are_equal = averager._is_manual = False
    averager._steps_of.forget()
    flat.check()
    flat.round()
    for vector, value in zip(flat.stand_ins, state.get("wide", ())):
        vector.copy_(value)
    flat.give()
    for extra in extras:
        extra.loaded(state.get("extras", {}).get(type(extra).__name__))
    if collective.rank == 0 and not state.get("equal"):
        warn_of_ranks(state.get("ranks", collective.size), collective.size)
    restarts = extras and not each_has_its_own(averager, state)
    averager._go_on_from(state)
    averager.steps = state.get("steps", state["version"])
    if restarts:
        for extra in extras:
            extra.joined()
    averager._recovery.loaded()


def each_has_its_own(averager: Averaging, state: dict[str, Any]) -> bool:
    """Return whether every rank is loading the state that it saved; collective.

    The collective asks, as it bears ranks at unequal places; it must load vectors next.
    """
    collective, own = averager.collective, averager._save()
    mine = (state.get("rank"), state.get("ranks")) == (collective.rank, collective.size)
    for vector in averager._memory:
        vector.fill_(mine)
    try:
        collective.load(averager._vectors, 0)
        collective.average(averager._vectors)
        return bool(averager._memory[0].eq(1).all())
    finally:
        averager._restore(own)


def build_anew(averager: Averaging) -> None:
    """Go on from the average of all models, with what is trainable now; collective."""
    averager._settle()
    state = averager._state()
    state["version"] = max(averager.comm.allgather(state["version"]))
    averager._past.append(averager.collective.statistics())
    averager.collective.close()
    averager._release_vectors()
    averager._build(averager.comm, False)
    for extra in averager._extras:
        extra.loaded(None)
    averager._go_on_from(state | {"snapshot": None})
    averager._rebuilt()


def warn_of_ranks(saved: int, loading: int) -> None:
    """Log what is lost if a state of another number of ranks is loaded."""
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
