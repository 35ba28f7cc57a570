"""What users of four ranks do with models and optimizers of their own: it comes right, or says why.

The situations are from public reports of those who train with SAM, Muon and AdamW, LoRA, MoCo,
normalizers, float32 masters, schedule-free optimizers, growing tables, Lookahead.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os

import accelerate
import pytest
import schedulefree
import torch
from methods import METHODS, each_method
from together import same_everywhere
from torch import nn

from wagma.optim import WAGMA, Allreduce, EagerSGD, LocalSGD, ParameterServer, PartialReduce

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(4), pytest.mark.transports("shared")]

BOTH_PACES = pytest.mark.parametrize("pace", ["common", "own"])
OVER_MODELS = pytest.mark.parametrize(
    ("method", "options"),
    [(WAGMA, {}), (WAGMA, {"pace": "own"}), (LocalSGD, {"sync_period": 2}), (PartialReduce, {})],
    ids=["wagma", "own", "local-sgd", "partial-reduce"],
)


def sgd(model, lr=0.02, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def train(model, optimizer, steps, *, each=lambda t: None, scale=lambda t: 1.0):
    """Make steps towards the sum of the inputs."""
    width = next(p.shape[-1] for p in model.parameters() if p.ndim == 2)
    for t in range(steps):
        x = torch.randn(16, width)
        model.zero_grad()
        ((model(x) - x.sum(1, keepdim=True)).square().mean() * scale(t)).backward()
        optimizer.step()
        each(t)


# Buffers


class Normalizer(nn.Module):
    """Mean, variance and count of all batches, and each batch less the mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))
        self.register_buffer("count", torch.tensor(1e-4))

    @torch.no_grad()
    def forward(self, x):
        total, change = self.count + len(x), x.mean(0) - self.mean
        m2 = self.var * self.count + x.var(0, unbiased=False) * len(x)
        m2 += change**2 * self.count * len(x) / total
        self.mean += change * len(x) / total
        self.var = m2 / total  # by another tensor, as people write it
        self.count.copy_(total)
        return (x - self.mean) / torch.sqrt(self.var + 1e-8)


@pytest.mark.parametrize("make", [Normalizer, lambda: nn.BatchNorm1d(4)], ids=["all", "moving"])
@each_method
def test_variances_stay_within_those_of_the_ranks(comm, method, make):
    torch.manual_seed(comm.rank)
    model = nn.Sequential(make(), nn.Linear(4, 1))
    variances = []
    with method.make(model, comm) as averager, averager.join():
        for _ in range(8 + 3 * comm.rank * (not method.exclusive)):
            x = torch.randn(32, 4) * 0.1
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            model.zero_grad()
            loss.backward()
            averager.optimizers.given[0].step()
            variances += [v for n, v in model.named_buffers() if n.endswith("var")][-1].tolist()
            assert loss.isfinite()
    assert all(0 < variance <= 1 for variance in variances)


@pytest.mark.parametrize("overlap", [False, True])
@BOTH_PACES
def test_a_late_rank_brings_its_own_variance_not_a_change_of_it(comm, pace, overlap):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = sgd(model, 0.001)
    with WAGMA(model, optimizer, comm=comm, pace=pace, overlap=overlap, sync_period=40) as averager:
        variance = model[1].running_var
        with averager.join():
            if comm.rank == 3:  # after others have made most of their steps
                for _ in range(3):
                    comm.recv()
            lowest = []
            with torch.no_grad():
                model[0].weight.mul_(0.1)
            train(model, optimizer, 39, each=lambda t: lowest.append(float(variance.min())))
            if comm.rank != 3:
                comm.send(None, dest=3)
        assert min(lowest) > 0 and float(variance.min()) > 0


@torch.no_grad()
def test_statistics_that_are_pooled_from_all_ranks_are_those_of_all_data(comm):
    model = nn.Sequential(Normalizer(), nn.Linear(4, 1)).double()
    model[0].count.zero_()
    torch.manual_seed(0)
    batches = [torch.randn(8 + rank, 4).double() * (rank + 1) + rank for rank in range(comm.size)]
    with WAGMA(model, sgd(model), comm=comm, exclude="0") as averager:
        for _ in range(3):
            model[0](batches[comm.rank])
        with averager.averaged():
            seen = comm.allgather([buffer.clone() for buffer in model[0].buffers()])
            count = sum(n for _, _, n in seen)
            mean = sum(n * m for m, _, n in seen) / count
            variance = sum(n * (v + (m - mean) ** 2) for m, v, n in seen) / count
    everything = torch.cat(batches * 3)
    torch.testing.assert_close(mean, everything.mean(0))
    torch.testing.assert_close(variance, everything.var(0, correction=0))


@BOTH_PACES
@pytest.mark.parametrize("persistent", [True, False])
def test_a_queue_of_each_ranks_own_keys_is_left_alone(comm, pace, persistent):
    model = nn.Linear(16, 8, bias=False)
    model.register_buffer("queue", torch.full((4, 8), float(comm.rank)), persistent=persistent)
    optimizer = sgd(model)
    exclude = ["que*"] if persistent else ()
    with WAGMA(model, optimizer, comm=comm, pace=pace, exclude=exclude) as averager:
        own = model.queue.clone()
        train(model, optimizer, 12)
        averager.synchronize()
        with averager.averaged():
            assert torch.equal(model.queue, own)
    assert torch.equal(model.queue, own)


@pytest.mark.parametrize("exclude", ["head", ["head.*"], lambda name, _: name.startswith("head")])
def test_a_head_of_each_ranks_own(comm, exclude):
    model = nn.Sequential()
    model.add_module("trunk", nn.Linear(4, 4))
    model.add_module("head", nn.Linear(4, 1))
    with torch.no_grad():
        model.head.bias.fill_(comm.rank)
    with WAGMA(model, sgd(model), comm=comm, exclude=exclude, sync_period=2) as averager:
        assert model.head.bias == comm.rank
        train(model, averager.optimizers.given[0], 4)
    assert same_everywhere(comm, str(model.trunk.weight.tolist()))
    assert not same_everywhere(comm, str(model.head.weight.tolist()))


def test_a_wrong_name_lists_near_ones_and_ranks_must_agree(comm):
    model = nn.Sequential(nn.Linear(4, 1))
    with pytest.raises(ValueError, match=r"no .* buffer '0\.wieght'; near ones are '0\.weight'"):
        WAGMA(model, sgd(model), comm=comm, exclude=["0.wieght"])
    with pytest.raises(ValueError, match=r"0\.bias', each rank's own where rank 0 has parameter"):
        WAGMA(model, sgd(model), comm=comm, exclude=["*.bias"] if comm.rank else ())


class Masked(nn.Module):
    """Has a mask that is made in the first pass."""

    def __init__(self, persistent):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.register_buffer("mask", torch.zeros(4, 4), persistent=persistent)

    def forward(self, x):
        if not self.mask.any():
            self.mask.fill_(-torch.inf).triu_(1)
        return self.layer(x)


@pytest.mark.parametrize("persistent", [True, False])
@each_method
def test_an_infinite_mask_stays_and_the_model_is_trained(comm, method, persistent):
    model = Masked(persistent)
    mask = torch.full((4, 4), -torch.inf).triu_(1)
    with method.make(model, comm, torch.optim.AdamW) as averager:
        before = model.layer.weight.detach().clone()
        train(model, averager.optimizers.given[0], 6)
        assert torch.equal(model.mask, mask)
        averager.synchronize()
        said = averager.statistics().left_out
        assert said == 0 or persistent
        in_steps = not (averager.averages_gradients or averager._buffers_apart)
        if persistent and in_steps and averager.result.left_out:
            assert averager.result.left_out == ("mask",)
    assert torch.equal(model.mask, mask)
    assert not torch.equal(model.layer.weight, before)


def test_a_table_that_grows(comm):
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 1)
            self.register_buffer("table", torch.ones(1), persistent=False)

        def forward(self, x):
            self.register_buffer("table", torch.ones(len(self.table) + 1), persistent=False)
            return self.layer(x * self.table[0])

    model = Growing()
    optimizer = sgd(model)
    with WAGMA(model, optimizer, comm=comm):
        train(model, optimizer, 10)
    assert len(model.table) == 11


# Frozen weights, and tensors of other kinds


@OVER_MODELS
def test_a_frozen_base_is_neither_sent_nor_changed(comm, method, options):
    base, adapter = nn.Linear(512, 512, bias=False), nn.Linear(512, 4)
    base.requires_grad_(False)
    model = nn.Sequential(base, adapter)
    optimizer = sgd(adapter)
    with method(model, optimizer, comm=comm, transport="messages", **options) as averager:
        before = base.weight.clone()
        assert sum(vector.numel() for vector in averager.flat.memory) < 2 * 512 * 4
        train(model, optimizer, 6)
        assert averager.statistics().bytes_sent < 6 * 4 * 512 * 4 * 4
    assert torch.equal(base.weight, before) and same_everywhere(comm, before.sum().item())


@OVER_MODELS
def test_unfreezing_needs_a_refresh(comm, method, options):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    optimizer = sgd(model[1], momentum=0.9)
    with method(model, optimizer, comm=comm, **options) as averager:
        train(model, optimizer, 3)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.02})
        train(model, optimizer, 1)  # no harm is done yet
        model[0].requires_grad_(True)
        with pytest.raises(ValueError, match=r"was frozen .*: call refresh\(\) on all ranks"):
            optimizer.step()
        averager.refresh()
        before = model[0].weight.detach().clone()
        train(model, optimizer, 3)
        averager.synchronize()
        assert averager.steps == 7
    assert not torch.equal(model[0].weight, before)
    assert same_everywhere(comm, str(model[0].weight.tolist()))


def test_a_momentum_encoder_is_averaged_if_it_is_included(comm):
    model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    model[1].requires_grad_(False)
    with WAGMA(model, sgd(model[0]), comm=comm, include=["1"], sync_period=1) as averager:
        with torch.no_grad():
            model[1].bias.fill_(comm.rank)
        train(model[0], averager.optimizers.given[0], 1)
        assert model[1].bias == 1.5


@pytest.mark.parametrize("persistent", [True, False])
def test_complex_numbers_and_constants_of_any_type(comm, persistent):
    model = nn.Linear(4, 1)
    model.wave = nn.Parameter(torch.full((3,), 1j * comm.rank))
    model.small = nn.Parameter(torch.ones(2, 2).to(torch.float8_e4m3fn), requires_grad=False)
    model.register_buffer("places", torch.arange(4).expand(2, -1))
    model.register_buffer("turns", torch.full((2,), 1j * comm.rank), persistent=persistent)
    with WAGMA(model, sgd(model), comm=comm) as averager:
        with torch.no_grad():
            model.wave.fill_(complex(comm.rank, 2))
        averager.synchronize()
        assert model.wave.tolist() == [1.5 + 2j] * 3
        assert model.turns.tolist() == [0 if persistent else 1j * comm.rank] * 2


def test_what_cannot_be_averaged_can_be_excluded_and_the_message_says_so(comm):
    model = nn.Linear(4, 1)
    model.register_buffer("graph", torch.eye(4).to_sparse())
    with pytest.raises(TypeError, match=r"sparse_coo.*exclude=\['graph'\] leaves it each rank's"):
        WAGMA(model, sgd(model), comm=comm)
    WAGMA(model, sgd(model), comm=comm, exclude=["graph"]).close()


def test_updates_that_are_small_beside_half_precision_are_not_lost(comm):
    model = nn.Linear(4, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = sgd(model, 2.0**-7)  # a step is the last place of 1
    with WAGMA(model, optimizer, comm=comm, group_size=4, wait="group") as averager:
        for _ in range(40):
            model.weight.grad = torch.full_like(model.weight, -1.0 if comm.rank == 0 else 0.0)
            optimizer.step()
        [wide] = averager.flat.stand_ins
        assert wide[:4].tolist() == [1 + 40 * 2.0**-9] * 4
    assert model.weight.tolist() == [[1.078125] * 4]  # that number in bfloat16


# Optimizers


class Both(torch.optim.Optimizer):
    """Momentum for the weight and AdamW for the bias, in one object."""

    def __init__(self, model):
        self.parts = [
            torch.optim.SGD([model.weight], lr=0.02, momentum=0.9),
            torch.optim.AdamW([model.bias], lr=0.02),
        ]
        groups = [group for part in self.parts for group in part.param_groups]
        super().__init__(groups, {})
        self.param_groups = groups

    def step(self, closure=None):
        for part in self.parts:
            part.step()


class Lookahead(torch.optim.Optimizer):
    """Every second step goes back halfway to slow weights, which its own state must have."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base, self.count = base, 0
        for p in base.param_groups[0]["params"]:
            self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.count += 1
        if self.count % 2 == 0:
            for p in self.base.param_groups[0]["params"]:
                p.copy_(self.state[p]["slow"].lerp_(p, 0.5))


@pytest.mark.parametrize(
    "make",
    [Both, lambda model: Lookahead(sgd(model, momentum=0.9)), torch.optim.AdamW, "list"],
    ids=["composite", "lookahead", "adamw", "list"],
)
@BOTH_PACES
def test_one_update_that_is_not_finite_is_left_out_once_and_said(comm, caplog, pace, make):
    model = nn.Linear(8, 1)
    if make == "list":
        optimizers = Both(model).parts
    else:
        optimizers = [make(model) if make is not torch.optim.AdamW else make(model.parameters())]
    with (
        caplog.at_level(logging.WARNING, "wagma"),
        WAGMA(model, optimizers, comm=comm, pace=pace, group_size=1) as averager,
    ):

        class All:
            def step(self):
                for each in optimizers:
                    each.step()

        spoils = lambda t: torch.nan if (comm.rank, t) == (1, 7) else 1.0  # noqa: E731
        states = []
        train(
            *(model, All(), 20),
            scale=spoils,
            each=lambda t: states.append([copy.deepcopy(o.state_dict()) for o in optimizers]),
        )
        assert averager.statistics().left_out == (comm.rank == 1)
        assert model.weight.isfinite().all()
    text = "rank 1, step 7: an update that is not finite (the gradient of 'weight'): left out, 1"
    assert sum(text in message for message in caplog.messages) == (comm.rank == 1)
    if comm.rank == 1 and make is torch.optim.AdamW:  # as it was before
        assert states[7][0]["state"][0]["exp_avg"].equal(states[6][0]["state"][0]["exp_avg"])


def test_the_state_of_a_composite_is_not_averaged_nor_its_model_moved(comm):
    model = nn.Linear(8, 1)
    optimizer = Both(model)
    model(torch.ones(4, 8)).sum().backward()
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"Both has .* \(Both, SGD, AdamW\).* give them as a list"):
        WAGMA(model, optimizer, comm=comm, average_state=True)
    assert torch.equal(model.weight, before)
    with WAGMA(model, optimizer.parts, comm=comm, average_state=True, sync_period=1):
        for part in optimizer.parts:
            part.step()
        momentum = optimizer.parts[0].state[model.weight]["momentum_buffer"]
        assert same_everywhere(comm, str(momentum.tolist()))


class Masters(torch.optim.Optimizer):
    """Keeps float32 weights, in its state or apart, and sets the model to them."""

    def __init__(self, parameters, apart=False):
        super().__init__(parameters, {})
        self.apart = [p.float().detach().clone() for p in self.param_groups[0]["params"]] * apart

    @torch.no_grad()
    def step(self, closure=None):
        for i, p in enumerate(self.param_groups[0]["params"]):
            if self.apart:
                master = self.apart[i]
            else:
                master = self.state[p].setdefault("master", p.float().clone())
            p.copy_(master.add_(p.grad.float(), alpha=-0.05))


def drift(model, optimizer, rank, steps):
    """Make steps towards the rank's number."""
    for _ in range(steps):
        model.zero_grad()
        (model.weight.float() - rank).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("apart", [False, True])
@OVER_MODELS
def test_masters_that_undo_averages_are_named_within_ten_steps(comm, method, options, apart):
    model = nn.Linear(4, 1, bias=False).bfloat16()
    optimizer = Masters(model.parameters(), apart)
    named = pytest.raises(Exception, match="Masters keeps the weights of parameter 'weight' as")
    with method(model, optimizer, comm=comm, **options), named:
        drift(model, optimizer, comm.rank, 10)


@BOTH_PACES
def test_masters_in_the_state_can_be_averaged_with_the_model(comm, pace):
    model = nn.Linear(4, 1, bias=False).bfloat16()
    nn.init.zeros_(model.weight)
    optimizer = Masters(model.parameters())
    with WAGMA(model, optimizer, comm=comm, pace=pace, average_state=True):
        drift(model, optimizer, comm.rank, 200)
        weights = comm.allgather(float(model.weight.mean()))
    assert max(weights) - min(weights) < 2  # apart they would be 3, and the mean would be lost


def test_lookahead_and_tracked_copies_are_no_masters(comm):
    model = nn.Linear(4, 1, bias=False)
    optimizer = Lookahead(sgd(model))
    with WAGMA(model, optimizer, comm=comm):
        drift(model, optimizer, comm.rank, 20)


class SAM(torch.optim.Optimizer):
    """Two steps, each after a gradient of its own."""

    def __init__(self, model):
        super().__init__(model.parameters(), {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.05)

    @torch.no_grad()
    def first_step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["old"])
        self.base.step()


def train_by_sam(model, optimizer, averager, told):
    gradients = told and averager.averages_gradients
    for _ in range(5):
        for update in (optimizer.first_step, optimizer.second_step):
            model.zero_grad()
            (model(torch.randn(16, 8)) - averager.comm.rank).square().mean().backward()
            if gradients:
                assert averager.average_gradients()
            update()
        if told:
            averager.step()


CALLS = {
    "synchronize": lambda averager: averager.synchronize(),
    "averaged": lambda averager: averager.averaged().__enter__(),
    "statistics": lambda averager: averager.statistics(),
    "state_dict": lambda averager: averager.state_dict(),
    "result": lambda averager: averager.result,
    "join": lambda averager: averager.join().__enter__() or averager.synchronize(),
    "close": lambda averager: averager.close(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("method", [WAGMA, Allreduce])
def test_steps_that_were_not_heard_of_are_an_error(comm, method, call):
    model = nn.Linear(8, 1)
    averager = method(model, SAM(model), comm=comm)
    train_by_sam(model, averager.optimizers.given[0], averager, told=False)
    with pytest.raises(RuntimeError, match=r"heard of no step of SAM: call averager\.step\(\)"):
        call(averager)
    with contextlib.suppress(RuntimeError):
        averager.close()


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("method", "options"), [(WAGMA, {}), (WAGMA, {"pace": "own"}), (Allreduce, {})]
)
def test_steps_by_other_methods_are_told(comm, method, options, given):
    model = nn.Linear(8, 1)
    optimizer = SAM(model)
    with method(model, optimizer if given else None, comm=comm, **options) as averager:
        train_by_sam(model, optimizer, averager, told=True)
        assert averager.steps == 5
        if method is Allreduce:
            assert same_everywhere(comm, str(model.weight.tolist()))
        averager.synchronize()
        assert same_everywhere(comm, str(model.weight.tolist()))


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("make", [schedulefree.SGDScheduleFree, schedulefree.AdamWScheduleFree])
def test_modes_of_schedule_free_optimizers(comm, make, overlap, state):
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = make(model.parameters(), lr=0.1)
    settings = {"overlap": overlap, "average_state": state, "wait": "group"}
    with WAGMA(model, optimizer, comm=comm, **settings) as averager:
        optimizer.train()
        drift(model, optimizer, comm.rank, 15)
        averager.complete()
        trained = model.weight.detach().clone()
        optimizer.eval()
        right = sum(comm.allgather(model.weight.detach()), torch.zeros(1, 4)) / 4
        for training in (False, True):
            (optimizer.train if training else optimizer.eval)()
            before = model.weight.detach().clone()
            with averager.averaged():
                torch.testing.assert_close(model.weight.detach(), right)
                optimizer.eval()  # as it is already
                torch.testing.assert_close(model.weight.detach(), right)
            assert torch.equal(model.weight, before)
            assert optimizer.param_groups[0]["train_mode"] == training
        torch.testing.assert_close(model.weight.detach(), trained)


@pytest.mark.parametrize("training", [False, True])
def test_the_last_average_of_a_schedule_free_optimizer(comm, training):
    model = nn.Linear(4, 1, bias=False)
    optimizer = schedulefree.SGDScheduleFree(model.parameters(), lr=0.1)
    own = {"pace": "own", "keep_average": True, "sync_period": 2}
    refused = pytest.raises(ValueError, match="state of SGDScheduleFree, which is not averaged")
    with WAGMA(model, optimizer, comm=comm, **own) as averager, refused:
        averager.last_average().__enter__()
    with WAGMA(model, optimizer, comm=comm, average_state=True, **own) as averager:
        optimizer.train()
        with averager.join():
            drift(model, optimizer, comm.rank, 8)
        (optimizer.train if training else optimizer.eval)()
        before = model.weight.detach().clone()
        with averager.last_average() as (version, _):
            kept = model.weight.detach().clone()
            assert not optimizer.param_groups[0]["train_mode"]
        assert torch.equal(model.weight, before)
        by_version = dict(comm.allgather((version, kept.tolist())))
        assert by_version[version] == kept.tolist()


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("method", [WAGMA, LocalSGD, Allreduce, EagerSGD])
def test_two_optimizers_make_one_step(comm, method, order):
    model = nn.Linear(8, 4)
    optimizers = [torch.optim.SGD([model.weight], lr=0.02), torch.optim.AdamW([model.bias])]
    with method(model, optimizers, comm=comm) as averager:
        with pytest.raises(ValueError, match="one averager takes a list of all of a model's"):
            WAGMA(model, optimizers[1], comm=comm)
        for t in range(1, 7):
            model.zero_grad()
            (model(torch.randn(16, 8)) - comm.rank).square().mean().backward()
            for optimizer in optimizers[::order]:
                assert averager.steps == t - 1
                optimizer.step()
            assert averager.steps == averager.collective.version == t
            if method is Allreduce:
                assert same_everywhere(comm, str(model.bias.tolist()))


def test_a_second_step_of_one_of_several_is_refused_where_gradients_are_averaged(comm):
    model = nn.Linear(8, 4)
    optimizers = [torch.optim.SGD([p], lr=0.02) for p in model.parameters()]
    with Allreduce(model, optimizers, comm=comm):
        model(torch.ones(1, 8)).sum().backward()
        optimizers[0].step()
        with pytest.raises(RuntimeError, match="a second step of one of them"):
            optimizers[0].step()
        optimizers[1].step()


@pytest.mark.parametrize("method", [WAGMA, Allreduce])
def test_a_grad_scaler_and_two_optimizers(comm, method):
    model = nn.Linear(8, 4)
    optimizers = [torch.optim.SGD([p], lr=0.02) for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with method(model, optimizers, comm=comm) as averager:
        before = model.bias.detach().clone()
        scaler.scale(model(torch.ones(1, 8)).sum() * (comm.rank + 1)).backward()
        if method is Allreduce:
            with pytest.raises(RuntimeError, match=r"scaler\.unscale_\(optimizer\) for each"):
                scaler.step(optimizers[0])
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        assert averager.steps == 1
        averager.synchronize()
        torch.testing.assert_close(before - model.bias, torch.full((4,), 0.02 * 2.5))


@pytest.mark.parametrize("name", ["wagma", "allreduce", "local-sgd", "d-psgd"])
def test_lbfgs_is_refused_with_the_reason(comm, name):
    model = nn.Linear(4, 1)
    with pytest.raises(TypeError, match="LBFGS learns the curvature from differences of models"):
        METHODS[name].make(model, comm, torch.optim.LBFGS)


def test_an_optimizer_that_never_steps_is_named(comm):
    model = nn.Linear(8, 4)
    first, second = torch.optim.SGD([model.weight]), torch.optim.AdamW([model.bias])
    averager = WAGMA(model, [first, first, second], comm=comm)
    assert averager.optimizers.given == (first, second)
    train(model, first, 2)
    with pytest.raises(RuntimeError, match="AdamW of the optimizers made no step"):
        averager.close()


def test_a_step_that_fails_between_two_optimizers_is_told_to_all(comm):
    model = nn.Linear(8, 4)
    first, second = torch.optim.SGD([model.weight]), torch.optim.SGD([model.bias])

    def fail(*_):
        raise KeyError

    with Allreduce(model, [first, second], comm=comm):
        model(torch.ones(1, 8)).sum().backward()
        first.step()
        if comm.rank == 1:
            hook = second.register_step_pre_hook(fail)
            with pytest.raises(KeyError):
                second.step()
            hook.remove()
        else:
            second.step()
        words = "an exception ended a step of rank 1" if comm.rank == 1 else "rank 1 failed"
        with pytest.raises(Exception, match=words):
            first.step()


@pytest.mark.parametrize("method", [WAGMA, Allreduce])
@pytest.mark.parametrize("fused", [False, True])
def test_a_kept_step_with_a_grad_scaler_and_infinite_gradients_of_one_rank(comm, method, fused):
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    kept = optimizer.step
    with method(model, optimizer, comm=comm) as averager:
        optimizer.step = kept  # as Accelerate does with what it has kept
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for t in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 8)).sum() * (comm.rank + 1)
            scaler.scale(loss * (torch.inf if (comm.rank, t) == (1, 1) else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert averager.steps == t + 1
            if method is Allreduce:
                assert same_everywhere(comm, str(model.weight.tolist()))
        averager.synchronize()
        assert model.weight.isfinite().all() and same_everywhere(comm, str(model.weight.tolist()))


def test_a_buffer_replaced_by_another_kind_on_one_rank_is_an_error_on_all(comm):
    for name in ("wagma", "d-psgd"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        with METHODS[name].make(model, comm) as averager:
            if comm.rank == 1:
                model[1].running_mean = torch.zeros(4).double()
            with pytest.raises(Exception, match=r"buffer '1\.running_mean' was replaced by one of"):
                averager.synchronize()


def test_control_variates_of_two_optimizers_keep_their_sum(comm):
    model = nn.Linear(8, 4)
    optimizers = [torch.optim.SGD([p], lr=0.01) for p in model.parameters()]
    settings = {"correction": "control-variates", "sync_period": 2}
    with WAGMA(model, optimizers, comm=comm, **settings) as averager:
        for t in range(9):
            model.zero_grad()
            loss = (model(torch.randn(16, 8)) - comm.rank).square().mean()
            (loss * (torch.inf if (comm.rank, t) == (1, 3) else 1)).backward()
            for optimizer in optimizers:
                optimizer.step()
        [variates] = averager._extras
        sums = [comm.allreduce(float(v.memory[0].sum())) for v in (variates.mean, variates.own)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-4, abs=1e-4)


def test_steps_are_counted_as_steps(comm):
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    with ParameterServer(
        model, optimizer, comm=comm, mode="async-local", local_steps=4
    ) as averager:
        train(model, optimizer, 20)
        state = averager.state_dict()
        assert (averager.steps, state["steps"], state["version"]) == (20, 20, 5)


def test_the_old_form_shows_the_new_one(comm):
    model = nn.Linear(4, 1)
    for kind in (WAGMA, Allreduce, PartialReduce):
        with pytest.raises(
            TypeError, match=rf"is now averager = {kind.__name__}\(model, optimizer"
        ):
            kind(sgd(model), model, comm=comm)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("method", [WAGMA, Allreduce])
def test_a_strangers_loop_of_accelerate_needs_no_glue(comm, monkeypatch, method, first):
    for name in [name for name in os.environ if name.startswith(("PMI", "OMPI", "MPI"))]:
        monkeypatch.delenv(name)  # else it would begin a process group of torch's
    torch.manual_seed(comm.rank)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Linear(4, 2)
    optimizer = sgd(model, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)
    averager = method(model, optimizer, comm=comm) if first else None
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with averager or method(model, optimizer, comm=comm) as averager:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        assert averager.steps == 4
        averager.synchronize()
        assert same_everywhere(comm, str(model.weight.tolist()))
