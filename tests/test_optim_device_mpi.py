"""Every method with the model on a device, beside the CPU, on the stand-in for the CUDA driver."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import stand_in
import torch
import torch_device
from methods import (
    METHODS,
    SHARDS,
    backward,
    bits,
    bits_of,
    checkpoint,
    each_method,
    local_bits,
    make_model,
    momentum_sgd,
    restore,
)
from together import interrupted, same_everywhere

import collectives
from wagma import optim
from wagma.optim.vectors import current_stream

pytestmark = [pytest.mark.mpi, pytest.mark.torch_device, pytest.mark.transports("shared")]

REPEATABLE = {name: method for name, method in METHODS.items() if method.repeatable}
REPEATABLE["eager-sgd-in-step"] = METHODS["eager-sgd"]._replace(
    settings={"sync_period": 1}, repeatable=True
)
for name in ("wagma-group", "local-sgd"):
    settings = METHODS[name].settings | SHARDS
    REPEATABLE[f"{name}-shards"] = METHODS[name]._replace(settings=settings)
repeatable = pytest.mark.parametrize("method", REPEATABLE.values(), ids=REPEATABLE)


@pytest.fixture(scope="module")
def device():
    from mpi4py import MPI

    pytest.importorskip("ml_dtypes")
    if MPI.COMM_WORLD.rank:
        MPI.COMM_WORLD.Barrier()
    try:  # one rank builds it, the others find it
        return torch_device.require()
    finally:
        if not MPI.COMM_WORLD.rank:
            MPI.COMM_WORLD.Barrier()


@pytest.fixture
def pair(comm):
    """A communicator of two of the ranks."""
    part = comm.Split(comm.rank // 2)
    yield part
    part.Free()


@pytest.fixture(params=["staged", "direct"])
def path(request, device, monkeypatch):
    """Where vectors are averaged: on the host, or on their devices."""
    with ExitStack() as stack:
        if request.param == "direct":
            stack.enter_context(stand_in.averaging(monkeypatch, "shared"))
        yield request.param


def one_by_one(parameters, lr=0.1):
    """Return an optimizer without torch's faster loops, which round bfloat16 otherwise."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, foreach=False)


def train(comm, model, optimizer, steps):
    for step in steps:
        backward(model, comm.rank, step)
        optimizer.step()


def averaged(averager):
    """Return what is averaged of a model."""
    return [tensor.value for tensor in (*averager.flat.parameters, *averager.flat.buffers)]


def history(comm, method, device, dtype=torch.float32):
    """Return what a model, and the local optimizer's state, are after all that can be done."""
    model = make_model(comm.rank, dtype).to(device)
    seen = []

    def note():
        averager.complete()
        seen.append((bits_of(model), local_bits(optimizer)))

    with method.training(model, comm, one_by_one) as (optimizer, averager):
        for steps in (range(3), range(3, 6)):
            train(comm, model, optimizer, steps)
            note()
        with averager.averaged():
            seen.append(bits_of(model))
        note()
        train(comm, model, optimizer, [6])
        averager.synchronize()
        note()
        with averager.join():
            train(comm, model, optimizer, range(7, 9 + comm.rank % 2))
        note()
        train(comm, model, optimizer, [10])
        assert {value.device.type for value in model.parameters()} == {torch.device(device).type}
    seen.append(bits_of(model))
    return seen


@repeatable
def test_training_gives_the_bits_of_the_cpu(comm, pair, device, method):
    assert history(comm, method, device) == history(comm, method, "cpu")
    assert history(pair, method, device) == history(pair, method, "cpu")


@pytest.mark.parametrize("name", ["wagma-group", "local-sgd"])
def test_weights_by_work_give_the_bits_of_the_cpu(comm, device, name):
    for weights in ({"weights": "work"}, {"weights": "wp", "contraction": 0.5}):
        method = METHODS[name]._replace(settings=METHODS[name].settings | weights)
        assert history(comm, method, device) == history(comm, method, "cpu")


@pytest.mark.transports("messages", "shared")
@pytest.mark.parametrize("name", ["wagma-overlap", "allreduce"])
def test_models_that_their_devices_average_have_the_bits_of_the_cpu(
    comm, device, transport, name, monkeypatch
):
    with stand_in.averaging(monkeypatch, transport):
        model = make_model(comm.rank).to(device)
        with METHODS[name].make(model, comm, one_by_one) as averager:
            assert averager.collective.path == "direct"
        averaged = history(comm, METHODS[name], device)
    # Short vectors are rounded once, as in shared memory; messages between hosts double them.
    monkeypatch.setenv("WAGMA_TRANSPORT", "shared")
    assert averaged == history(comm, METHODS[name], "cpu")


@pytest.mark.parametrize("capturable", [False, True])
def test_moments_are_averaged_with_their_numbers_wherever_these_are(comm, device, path, capturable):
    """AdamW's count of steps is on the host, or with `capturable` on the device."""
    ends = []
    for place in (device, "cpu"):
        model = make_model(comm.rank).to(place)
        options = {"foreach": False, "capturable": capturable and place != "cpu"}
        local = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
        settings = {"sync_period": 3, "wait": "group", **SHARDS}
        with optim.WAGMA(model, local, comm=comm, **settings) as averager:
            assert averager.collective.path == ("host" if place == "cpu" else path)
            with averager.join():
                train(comm, model, local, range(4 + comm.rank))
            counts = {float(of["step"]) for of in local.state.values()}
            train(comm, model, local, range(8, 10))
            ends.append((counts, [p.detach().cpu() for p in model.parameters()]))
    assert len(ends[0][0]) == 1
    assert ends[0][0] == ends[1][0]
    for mine, expected in zip(ends[0][1], ends[1][1], strict=True):
        torch.testing.assert_close(mine, expected)


def test_gradients_that_some_ranks_lack_have_the_bits_of_the_cpu_where_devices_average(
    comm, device, monkeypatch
):
    """In the last step one that all lack as well."""
    ends = []
    for place in (device, "cpu"):
        model = make_model(comm.rank).to(place)
        with ExitStack() as stack:
            if place != "cpu":
                stack.enter_context(stand_in.averaging(monkeypatch, "shared"))
            training = METHODS["allreduce"].training(model, comm, one_by_one)
            optimizer, averager = stack.enter_context(training)
            assert averager.collective.path == ("host" if place == "cpu" else "direct")
            for step in range(3):
                backward(model, comm.rank, step)
                if step == 2:
                    model[0].bias.grad = None
                if comm.rank == step:
                    model[3].weight.grad = None
                optimizer.step()
        ends.append((bits_of(model), local_bits(optimizer)))
    assert ends[0] == ends[1]


@contextmanager
def growing_by(most):
    """Check that tensors' memory on the device grows by so many bytes at most in the block."""
    torch_device.reset_peak()
    before = torch_device.counts().bytes
    yield
    assert torch_device.counts().peak - before <= most


def waits():
    """Return how often the host has read a tensor, or a function of the driver has blocked it."""
    counts = torch_device.counts()
    return counts.reads + counts.blocking


@each_method
def test_every_method_waits_for_nothing_in_a_step_and_takes_little_memory(comm, device, method):
    model = make_model(comm.rank, width=500).to(device)
    model_size = sum(value.nbytes for value in model.state_dict().values())
    size = model_size * method.vectors
    slack = size // 2  # buffers, here a sixth of the model, up to three times more
    before = torch_device.counts()
    with growing_by(size + slack), ExitStack() as stack:
        training = method.training(model, comm, partial(one_by_one, lr=1e-4))
        optimizer, averager = stack.enter_context(training)
        open_until_the_end = stack.pop_all()
    made = torch_device.counts()
    assert made.bytes - before.bytes <= size + slack
    pages = 2 * 4096  # of flags, and of how far a stream is
    assert made.pinned - before.pinned <= size + slack + pages
    with open_until_the_end:
        waited = 0
        with averager.join():
            for step in range(5 + comm.rank):
                backward(model, comm.rank, step)
                begun = waits()
                momentum = 0 if step else model_size
                with growing_by(momentum + slack):
                    optimizer.step()
                waited += waits() - begun
        assert waited == 0
        assert same_everywhere(comm, bits(model.parameters()))
        train(comm, model, optimizer, [9])
        with growing_by(slack):
            averager.synchronize()
        assert same_everywhere(comm, bits(averaged(averager)))
        with growing_by(size + slack), averager.averaged():
            pass
        assert torch_device.counts().pinned == made.pinned
    assert torch_device.counts().pinned == before.pinned
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert all(value.device == device for value in model.state_dict().values())


@pytest.mark.parametrize("name", ["wagma", "allreduce", "partial-reduce"])
def test_a_step_waits_for_nothing_where_devices_average(comm, device, name, monkeypatch):
    model = make_model(comm.rank).to(device)
    waited = 0
    with (
        stand_in.averaging(monkeypatch, "shared"),
        METHODS[name].training(model, comm, one_by_one) as (optimizer, averager),
    ):
        assert averager.collective.path == "direct"
        for step in range(5):
            backward(model, comm.rank, step)
            begun = waits()
            optimizer.step()
            waited += waits() - begun
    assert waited == 0


@pytest.mark.parametrize("saved_on", ["cpu", "device"])
@pytest.mark.parametrize("name", ["wagma-overlap", "allreduce", "sgp"])
def test_training_goes_on_elsewhere_from_its_state(comm, device, name, saved_on):
    method = METHODS[name]
    places = ("cpu", device) if saved_on == "cpu" else (device, "cpu")
    model = make_model(comm.rank).to(places[0])
    with method.training(model, comm) as (optimizer, averager):
        train(comm, model, optimizer, range(4))
        saved = checkpoint(model, optimizer, averager)
        train(comm, model, optimizer, range(4, 7))
        averager.complete()
        expected = bits_of(model), local_bits(optimizer)
    again = make_model(17 + comm.rank).to(places[1])
    with method.training(again, comm) as (optimizer, averager):
        restore(saved, again, optimizer, averager)
        train(comm, again, optimizer, range(4, 7))
        averager.complete()
        assert (bits_of(again), local_bits(optimizer)) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_all_dtypes_give_the_bits_of_the_cpu(comm, device, dtype):
    for name in ("wagma-overlap", "allreduce"):
        method = METHODS[name]
        assert history(comm, method, device, dtype) == history(comm, method, "cpu", dtype)


@pytest.mark.parametrize("name", ["wagma-group", "wagma-overlap", "allreduce"])
def test_another_stream_is_waited_for(comm, device, name):
    ends = []
    for place in (device, "cpu"):
        model = make_model(comm.rank).to(place)
        stream = torch.Stream(device)
        if place != "cpu":
            stream.wait_stream(torch.accelerator.current_stream())
        with stream, METHODS[name].training(model, comm) as (optimizer, _):
            train(comm, model, optimizer, range(5))
        if place != "cpu":
            torch.accelerator.current_stream().wait_stream(stream)
        ends.append(bits_of(model))
    assert ends[0] == ends[1]


def test_an_average_that_was_started_on_another_stream_is_waited_for(comm, device):
    ends = []
    for place in (device, "cpu"):
        model = make_model(comm.rank).to(place)
        streams = [torch.Stream(device) for _ in range(2)]
        with METHODS["wagma-overlap"].training(model, comm) as (optimizer, _):
            for step in range(6):
                before, now = streams[step - 1 & 1], streams[step & 1]
                if place != "cpu":
                    now.wait_stream(before if step else torch.accelerator.current_stream())
                with now:
                    backward(model, comm.rank, step)
                    optimizer.step()
            if place != "cpu":
                torch.accelerator.current_stream().wait_stream(now)
        ends.append(bits_of(model))
    assert ends[0] == ends[1]


def test_a_parameter_group_is_added(comm, device):
    ends = []
    for place in (device, "cpu"):
        model = make_model(comm.rank).to(place)
        head = list(model[3].parameters())
        for parameter in head:
            parameter.requires_grad_(False)
        make = lambda parameters: momentum_sgd(p for p in parameters if p.requires_grad)  # noqa: E731
        with METHODS["wagma-group"].training(model, comm, make) as (optimizer, averager):
            train(comm, model, optimizer, range(2))
            for parameter in head:
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": head, "lr": 0.3})
            averager.refresh()
            train(comm, model, optimizer, range(2, 5))
        ends.append(bits_of(model))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", ["wagma-group", "wagma-overlap", "allreduce", "sgp"])
def test_a_gradient_scaler_skips_steps_as_on_the_cpu(comm, device, name):
    ends = []
    for place in (device, "cpu"):
        model = make_model(comm.rank).to(place)
        scaler = torch.amp.GradScaler(torch.device(place).type, init_scale=64.0)
        with METHODS[name].training(model, comm) as (optimizer, _):
            for step in range(5):
                generator = torch.Generator().manual_seed(1000 * comm.rank + step)
                batch = torch.randn(16, 4, generator=generator).to(place)
                model.zero_grad()
                scaler.scale((model(batch) - comm.rank).square().mean()).backward()
                if step == comm.rank:
                    model[0].weight.grad[0, 0] = torch.inf
                scaler.step(optimizer)
                scaler.update()
        ends.append((bits_of(model), scaler.get_scale()))
    assert ends[0] == ends[1]
    assert (ends[0][1] < 64) == (comm.rank < 5)


@pytest.mark.parametrize("name", ["wagma", "wagma-overlap", "eager-sgd", "d-psgd", "ripples"])
def test_an_error_on_one_rank_raises_on_all(comm, device, name):
    model = make_model(comm.rank).to(device)
    failing = comm.rank == 2
    raised = pytest.raises(
        KeyError if failing else (collectives.RankFailedError, collectives.ClosedError),
        match="mine|waits .* for rank 2, which has closed",
    )
    with raised, METHODS[name].training(model, comm) as (optimizer, averager):
        for step in range(200):
            backward(model, comm.rank, step)
            if failing and step == 3:
                raise KeyError("mine")
            optimizer.step()
    assert averager.closed and not averager.flat.vectors
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_a_device_that_fails_is_named_everywhere_and_nobody_hangs(comm, device, path):
    model = make_model(comm.rank).to(device)
    with METHODS["wagma"].training(model, comm) as (optimizer, averager):
        assert averager.collective.path == path
        train(comm, model, optimizer, range(2))
        comm.Barrier()
        words = (
            f"CUDA error {stand_in.ILLEGAL_ADDRESS}"  # torch, which copies buffers, sees it first
        )
        if comm.rank == 1:
            driver = stand_in.Device()
            driver.fail(stand_in.ILLEGAL_ADDRESS)
            with pytest.raises(RuntimeError, match=words):
                averager.synchronize()
            driver.fail(0)
        else:
            with pytest.raises(collectives.RankFailedError, match=f"rank 1 failed.*{words}"):
                averager.synchronize()


def test_a_graph_that_is_being_captured_is_an_error_everywhere(comm, device, path):
    # Without buffers, which torch's test device looks through on the host.
    model = torch.nn.Linear(4, 3).to(device)
    words = "a CUDA graph is being captured on this stream"
    with METHODS["wagma"].training(model, comm) as (optimizer, averager):
        assert averager.collective.path == path
        train(comm, model, optimizer, range(2))
        comm.Barrier()
        if comm.rank == 1:
            stream = current_stream(device)
            with stand_in.Device().capturing(stream), pytest.raises(RuntimeError, match=words):
                averager.synchronize()
        else:
            with pytest.raises(collectives.RankFailedError, match=f"rank 1 failed.*{words}"):
                averager.synchronize()


@pytest.mark.parametrize("name", ["wagma-group", "wagma-overlap", "allreduce"])
def test_after_an_interrupted_step_training_goes_on_as_on_the_cpu(comm, device, name):
    ends = []
    for place in (device, "cpu"):
        model = make_model(comm.rank).to(place)
        with METHODS[name].training(model, comm) as (optimizer, averager):
            train(comm, model, optimizer, range(2))
            if comm.rank == 0:
                backward(model, comm.rank, 2)
                with interrupted():
                    optimizer.step()
                    averager.complete()
                ends.append(bits_of(model))
            comm.Barrier()
            if name == "allreduce":  # whose ranks would no longer be equal
                with pytest.raises(RuntimeError, match="an exception ended a step of rank 0"):
                    train(comm, model, optimizer, range(2 + (comm.rank == 0), 5))
                continue
            train(comm, model, optimizer, range(2 + (comm.rank == 0), 5))
            averager.synchronize()
            assert same_everywhere(comm, bits(averaged(averager)))
            ends.append(bits_of(model))
    half = len(ends) // 2
    assert ends[:half] == ends[half:]


def test_models_of_which_some_are_on_a_device_are_refused_everywhere(comm, device):
    model = make_model().to(device if comm.rank % 2 else "cpu")
    before = bits_of(model)
    with pytest.raises(ValueError) as raised:
        optim.WAGMA(model, momentum_sgd(model.parameters()), comm=comm)
    assert same_everywhere(comm, str(raised.value))
    assert str(raised.value).startswith("the model's device differs between ranks: cpu on rank")
    assert bits_of(model) == before


def test_a_model_on_two_devices_is_refused_everywhere(comm, device):
    model = make_model()
    if comm.rank == 1:
        model[3].to(device)
    with pytest.raises(TypeError, match=r"'0.weight' is on cpu, parameter '3.weight' on standin:0"):
        optim.WAGMA(model, momentum_sgd(model.parameters()), comm=comm)


@pytest.mark.parametrize("name", ["local-sgd", "wagma-overlap"])
def test_a_training_on_a_device_continues_from_a_checkpoint(comm, device, tmp_path, name):
    pytest.importorskip("safetensors")  # where there is a GPU, there may be little else
    from wagma.checkpoint import load, save

    directory = comm.bcast(tmp_path / "checkpoints")
    method = METHODS[name]
    model = make_model(comm.rank).to(device)
    with method.training(model, comm) as (optimizer, averager):
        train(comm, model, optimizer, range(5))
        save(directory, averager)
        train(comm, model, optimizer, range(5, 9))
    expected = bits_of(model), local_bits(optimizer)
    model = make_model(comm.rank + 1).to(device)
    with method.training(model, comm) as (optimizer, averager):
        assert load(directory, averager).step == 5
        train(comm, model, optimizer, range(5, 9))
    assert (bits_of(model), local_bits(optimizer)) == expected
