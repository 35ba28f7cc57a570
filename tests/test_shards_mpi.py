"""Averaged optimizer state and control variates over MPI: nothing is lost, at any pace."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from methods import SHARDS, backward, bits, bits_of, checkpoint, make_model, restore
from together import before_transports, same_everywhere

from wagma.optim import ADPSGD, WAGMA, LocalSGD
from wagma.optim.control_variates import ControlVariates

pytestmark = pytest.mark.mpi

PERIOD = 4
CASES = {
    "common": (WAGMA, {"sync_period": PERIOD}),
    "group": (WAGMA, {"sync_period": PERIOD, "wait": "group"}),
    "own": (WAGMA, {"sync_period": PERIOD, "pace": "own"}),
    "overlap": (WAGMA, {"sync_period": PERIOD, "overlap": True}),
    "own-overlap": (WAGMA, {"sync_period": PERIOD, "pace": "own", "overlap": True}),
    "rare": (
        WAGMA,
        {"sync_period": PERIOD, "average_state": "all-ranks", "correction_every": "all-ranks"},
    ),
    "own-rare": (
        WAGMA,
        {
            "sync_period": PERIOD,
            "pace": "own",
            "average_state": 2,
            "correction_every": "all-ranks",
        },
    ),
    "group-third": (WAGMA, {"sync_period": PERIOD, "wait": "group", "average_state": 3}),
    "overlap-rare": (
        WAGMA,
        {"sync_period": PERIOD, "overlap": True, "average_state": 2, "correction_every": 1},
    ),
    "local": (LocalSGD, {"sync_period": PERIOD}),
    "local-solo": (LocalSGD, {"sync_period": PERIOD, "trigger": "solo"}),
    "pairs": (ADPSGD, {"correction_period": PERIOD}),
}
each_case = pytest.mark.parametrize("case", CASES)
MAKERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}
each_maker = pytest.mark.parametrize("maker", MAKERS)


def make(case, comm, maker="momentum", dtype=torch.float64, **options):
    kind, settings = CASES[case]
    model = make_model(0, dtype)
    optimizer = MAKERS[maker](model.parameters())
    averager = kind(model, optimizer, comm=comm, **{**SHARDS, **settings, **options})
    return model, optimizer, averager


def run(comm, model, optimizer, steps, spoil=()):
    """Train; gradients of (rank, step) in `spoil` are not finite."""
    for step in steps:
        backward(model, comm.rank, step)
        if (comm.rank, step) in spoil:
            next(model.parameters()).grad.fill_(math.nan)
        optimizer.step()


def variates(averager) -> ControlVariates:
    return next(each for each in averager._extras if isinstance(each, ControlVariates))


def assert_conserved(comm, averager):
    """The mean over the ranks of c is that of cr; collective."""
    with averager.averaged():
        own = torch.cat(variates(averager).own.memory)
        expected = torch.stack(comm.allgather(own)).mean(dim=0)
        torch.testing.assert_close(torch.cat(variates(averager).mean.memory), expected)
    assert expected.abs().max() > 0


@pytest.mark.ranks(1, 3, 4, 8)
@each_maker
@each_case
def test_the_sum_of_the_variates_is_conserved(comm, case, maker):
    model, optimizer, averager = make(case, comm, maker)
    with averager:
        run(comm, model, optimizer, range(11))
        averager.complete()
        assert_conserved(comm, averager)
        assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.ranks(3, 4)
@each_case
def test_gradients_that_are_not_finite_leave_the_sums_equal(comm, case):
    """At the end of a period, within one, and on two ranks at once."""
    spoil = {(1, PERIOD - 1), (1, PERIOD + 1), (0, 3 * PERIOD - 1), (2, 3 * PERIOD - 1)}
    model, optimizer, averager = make(case, comm)
    with averager:
        run(comm, model, optimizer, range(5 * PERIOD), spoil)
        averager.complete()
        averager.synchronize()
        assert_conserved(comm, averager)
        assert all(p.isfinite().all() for p in model.parameters())
        for vector in averager._memory:
            assert vector.isfinite().all()


@pytest.mark.ranks(4)
@each_maker
@pytest.mark.parametrize(
    "case", ["common", "group", "overlap", "rare", "group-third", "overlap-rare", "local"]
)
def test_after_an_average_over_all_ranks_all_state_is_equal(comm, case, maker):
    model, optimizer, averager = make(case, comm, maker)
    with averager:
        run(comm, model, optimizer, range(2 * PERIOD))
        averager.complete()
        assert averager.result.synchronized
        values = [value for of in optimizer.state.values() for value in of.values()]
        assert len(values) > 1
        assert same_everywhere(comm, bits(values))
        assert same_everywhere(comm, bits_of(model))
        assert same_everywhere(comm, bits(variates(averager).memory))
        run(comm, model, optimizer, range(1))
        averager.complete()
        assert not same_everywhere(comm, bits(variates(averager)._sum.memory))


@pytest.mark.ranks(4)
@pytest.mark.transports("shared")
def test_averaged_momentum_is_the_mean_of_the_groups(comm):
    """Groups of all ranks, and plain averages of models and momenta beside it."""
    model, optimizer, averager = make("group", comm, group_size=comm.size, correction=None)
    alone = make_model(0, torch.float64)
    local = MAKERS["momentum"](alone.parameters())
    with averager:
        for step in range(6):
            run(comm, model, optimizer, [step])
            backward(alone, comm.rank, step)
            local.step()
            with torch.no_grad():
                for value in [*alone.parameters(), *alone.buffers()]:
                    if value.is_floating_point():
                        value.copy_(torch.stack(comm.allgather(value.detach())).mean(dim=0))
                for of in local.state.values():
                    buffer = of["momentum_buffer"]
                    buffer.copy_(torch.stack(comm.allgather(buffer)).mean(dim=0))
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)
            torch.testing.assert_close(
                optimizer.state[mine]["momentum_buffer"], local.state[theirs]["momentum_buffer"]
            )


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize(
    "case", ["common", "group", "own", "overlap", "rare", "own-rare", "local", "pairs"]
)
def test_ranks_with_fewer_steps_leave_their_part(comm, case):
    """Then all ranks have the same c and cr, and the sums are equal again."""
    model, optimizer, averager = make(case, comm)
    with averager:
        with averager.join():
            run(comm, model, optimizer, range(9 + comm.rank))
        assert same_everywhere(comm, bits(averager._memory))
        assert same_everywhere(comm, bits(variates(averager).own.memory))
        run(comm, model, optimizer, range(2 * PERIOD))
        averager.complete()
        assert_conserved(comm, averager)


@pytest.mark.ranks(4)
def test_a_rank_that_has_left_leaves_nothing_in_c(comm):
    """While rank 0 has left, c over the others is the sum of their cr."""
    model, optimizer, averager = make("own", comm)
    with averager:
        run(comm, model, optimizer, range(PERIOD))
        left = comm.rank == 0
        variates(averager).leave() if left else None
        averager.collective.publish(averager._vectors) if left else None
        own = torch.cat(variates(averager).own.memory)
        if left:
            assert not own.any()
        assert_conserved(comm, averager)


@pytest.mark.ranks(4)
@pytest.mark.transports("shared")
@each_maker
@pytest.mark.parametrize("case", ["group", "group-third", "local"])
def test_a_checkpoint_of_each_rank_continues_bit_for_bit(comm, case, maker):
    model, optimizer, averager = make(case, comm, maker)
    with averager:
        run(comm, model, optimizer, range(2 * PERIOD + 1))
        saved = checkpoint(model, optimizer, averager)
        run(comm, model, optimizer, range(PERIOD))
        expected = bits_of(model)
    model, optimizer, averager = make(case, comm, maker)
    with averager:
        restore(saved, model, optimizer, averager)
        run(comm, model, optimizer, range(PERIOD))
        assert bits_of(model) == expected


@pytest.mark.ranks(4)
@pytest.mark.transports("shared")
@pytest.mark.parametrize("case", ["common", "own", "overlap", "local", "pairs"])
def test_one_ranks_checkpoint_restarts_the_variates_of_all(comm, case):
    model, optimizer, averager = make(case, comm)
    with averager:
        run(comm, model, optimizer, range(2 * PERIOD + 1))
        with averager.averaged():
            saved = comm.bcast(checkpoint(model, optimizer, averager), root=1)
    model, optimizer, averager = make(case, comm)
    with averager:
        restore(saved, model, optimizer, averager)
        assert bits(variates(averager).own.memory) == bits(variates(averager).memory)
        assert torch.cat(variates(averager).memory).any()
        run(comm, model, optimizer, range(PERIOD + 1))
        averager.complete()
        assert_conserved(comm, averager)


@pytest.mark.ranks(4)
@pytest.mark.transports("shared")
def test_a_checkpoint_at_own_pace_loses_nothing(comm):
    model, optimizer, averager = make("own", comm)
    with averager:
        run(comm, model, optimizer, range(5 + 3 * comm.rank))
        saved = checkpoint(model, optimizer, averager)
        saved[2] = averager.checkpoint()
        with averager.averaged():
            expected = bits(averager._memory)
    model, optimizer, averager = make("own", comm)
    with averager:
        restore(saved, model, optimizer, averager)
        with averager.averaged():
            assert bits(averager._memory) == expected
        assert_conserved(comm, averager)


@pytest.mark.ranks(4)
@pytest.mark.transports("shared")
def test_an_average_held_is_also_that_of_the_state(comm):
    model, optimizer, averager = make("group", comm, "adamw")
    with averager:
        run(comm, model, optimizer, range(PERIOD + 1))
        before = bits(averager._memory)
        moments = optimizer.state[next(model.parameters())]["exp_avg"]
        expected = torch.stack(comm.allgather(moments)).mean(dim=0)
        with averager.averaged():
            torch.testing.assert_close(moments, expected)
            saved = optimizer.state_dict()["state"][0]["exp_avg"].clone()
        torch.testing.assert_close(saved, expected)
        assert bits(averager._memory) == before


@pytest.mark.ranks(3)
@pytest.mark.transports("shared")
def test_steps_that_a_scaler_skips_have_no_gradient(comm):
    model, optimizer, averager = make("group", comm, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with averager:
        for step in range(2 * PERIOD):
            loss = backward(model, comm.rank, step)
            model.zero_grad()
            loss = (model(torch.ones(4, 4)) - comm.rank).square().mean()
            scaler.scale(loss).backward()
            if comm.rank == 1 and step == 2:
                next(model.parameters()).grad.fill_(math.inf)
            scaler.step(optimizer)
            scaler.update()
        assert variates(averager)._count == (3 if comm.rank == 1 else 0)
        assert_conserved(comm, averager)


@pytest.mark.ranks(3)
@pytest.mark.transports("shared")
def test_a_closures_gradients_are_corrected(comm):
    models = []
    for with_closure in (False, True):
        model, optimizer, averager = make("group", comm)
        with averager:
            for step in range(2 * PERIOD + 1):
                if with_closure:
                    loss = optimizer.step(functools.partial(backward, model, comm.rank, step))
                    assert loss > 0
                else:
                    run(comm, model, optimizer, [step])
        models.append(bits_of(model))
    assert models[0] == models[1]


@pytest.mark.ranks(3)
@before_transports
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (WAGMA, {"late": "paper"}, "correction='control-variates' needs late='conserving'"),
        (WAGMA, {"weights": "work"}, "correction='control-variates' needs weights='given'"),
        (LocalSGD, {"weights": "wp"}, "correction='control-variates' needs weights='given'"),
        (LocalSGD, {"correction": "scaffold"}, "correction is 'scaffold', not None or"),
        (ADPSGD, {"average_state": 1}, "average_state must be True or False, not 1"),
        (LocalSGD, {"average_state": 2}, "average_state must be True or False, not 2"),
        (WAGMA, {"average_state": 0}, "average_state is 0, not True, False, a number of versions"),
        (WAGMA, {"correction_every": 2}, "correction_every is 2, not 1 or 'all-ranks'"),
        (
            WAGMA,
            {"correction": None, "correction_every": "all-ranks"},
            "correction_every is 'all-ranks', but correction is None",
        ),
        (
            WAGMA,
            {"average_state": 2, "correction": None, "late": "paper"},
            "late is 'paper' with only_all_ranks or every",
        ),
        (ADPSGD, {"correction_period": 0}, "correction_period is 0, not an integer of at least"),
    ],
)
def test_options_that_do_not_go_together_are_refused_on_every_rank(comm, kind, options, message):
    model = make_model()
    local = MAKERS["momentum"](model.parameters())
    with pytest.raises((TypeError, ValueError), match=message):
        kind(model, local, comm=comm, **{**SHARDS, **options})


@pytest.mark.ranks(3)
@before_transports
def test_ranks_with_other_state_are_told(comm):
    model = make_model()
    local = MAKERS["adamw" if comm.rank else "momentum"](model.parameters())
    with pytest.raises(ValueError, match="the local optimizer's state"):
        WAGMA(model, local, comm=comm, **SHARDS)


class Often(torch.optim.SGD):
    """Requires a closure."""

    def step(self, closure):
        return super().step(closure)


@pytest.mark.ranks(3)
@before_transports
def test_an_optimizer_that_computes_several_gradients_in_a_step_is_refused(comm):
    model = make_model()
    local = Often(model.parameters())
    for options in (SHARDS, {"correction": "control-variates"}):
        with pytest.raises(TypeError, match="correction: Often evaluates a closure|Often keeps"):
            LocalSGD(model, local, comm=comm, **options)


@pytest.mark.ranks(3)
@pytest.mark.transports("shared")
def test_a_weight_is_refused_with_a_correction(comm):
    _, optimizer, averager = make("local", comm)
    with averager, pytest.raises(ValueError, match="all ranks have the same weight"):
        averager.weight = 2.0
        optimizer.step()


@pytest.mark.ranks(3)
@pytest.mark.transports("shared")
def test_closing_gives_the_state_memory_of_its_own(comm):
    model, optimizer, averager = make("local", comm, "adamw")
    with averager:
        run(comm, model, optimizer, range(3))
        memory = averager._memory
    before = bits(value for of in optimizer.state.values() for value in of.values())
    for vector in memory:
        vector.fill_(7)
    assert bits(value for of in optimizer.state.values() for value in of.values()) == before
    backward(model, comm.rank, 3)
    optimizer.step()
