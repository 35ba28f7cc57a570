"""The model as one vector on a device, on the stand-in for the CUDA driver."""

import sys
from types import SimpleNamespace

import pytest
import stand_in
import torch
import torch_device
from methods import bits_of, make_model
from torch import nn

from collectives.memory import device_caches, device_memory
from wagma.optim.flat import FlatModel
from wagma.optim.gradients import FlatGradients
from wagma.optim.overlap import Overlap
from wagma.optim.tensors import survey
from wagma.optim.vectors import LEGACY_STREAM

# The device may have to be compiled.
pytestmark = [pytest.mark.torch_device, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def device():
    return torch_device.require()


def mixed(device):
    """Return a model of four dtypes, with frozen, integer and constant tensors."""
    pytest.importorskip("ml_dtypes")
    model = make_model()
    model[0].half()
    model[3].bfloat16()
    model.register_buffer("total", torch.ones(3, dtype=torch.float64))
    model.register_buffer("mask", torch.full((2, 2), -torch.inf))
    model.register_parameter("frozen", nn.Parameter(torch.ones(5), requires_grad=False))
    return model.to(device)


def flatten(model):
    return FlatModel(model, survey(model, []))


def test_tensors_keep_object_and_value_and_become_parts_of_a_vector_on_the_device(device):
    model = mixed(device)
    before, parameters = bits_of(model), list(model.parameters())
    flat = flatten(model)
    assert bits_of(model) == before
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert flat.device == device
    types = [vector.__cuda_array_interface__["typestr"] for vector in flat.vectors]
    assert types == ["<f2", "<f4", "<V2", "<f8", "<f4"]
    for tensor in flat.parameters:
        vector = flat.memory[flat.dtypes.index(tensor.value.dtype)]
        begin = tensor.value.data_ptr() - vector.data_ptr()
        assert begin % 64 == 0 and 0 <= begin < vector.nbytes
        assert tensor.value.device == device
        assert tensor.value.untyped_storage().nbytes() == tensor.value.nbytes
    others = [tensor.name for tensor in flat.tensors if tensor.role]
    assert others == ["frozen", "mask", "2.num_batches_tracked"]
    for vector in flat.memory:
        vector.fill_(3)
    flat.take()
    assert all((tensor.value == 3).all() for tensor in (*flat.parameters, *flat.buffers))
    flat.check()


def test_flattening_leaves_as_much_memory_to_others_as_before(device):
    model = nn.Linear(1024, 512).to(device)
    torch_device.Module.empty_cache()
    before = stand_in.Device().counts().device_bytes
    flat = flatten(model)
    after = stand_in.Device().counts().device_bytes
    assert flat.memory[0].nbytes > 2**21 and after - before < 2**16


def test_a_collective_gets_the_memory_that_torch_only_caches(device):
    torch.empty(2**20, device=device)  # floats, freed at once
    driver = stand_in.Device()
    driver.limit(driver.counts().device_bytes)
    try:
        with stand_in.mapped_memory():
            memory = device_memory.export(0, b"content")
    finally:
        driver.limit(0)
    assert memory.handle


def test_what_cupy_caches_is_freed_too(monkeypatch):
    emptied = []
    pool = SimpleNamespace(free_all_blocks=lambda: emptied.append("cupy"))
    fake = SimpleNamespace(get_default_memory_pool=lambda: pool)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    device_caches.empty()
    assert emptied == ["cupy"]


def test_the_interface_names_the_current_stream(device):
    flat = flatten(make_model().to(device))
    vector, _ = flat.vectors
    interface = vector.__cuda_array_interface__
    assert (interface["version"], interface["stream"]) == (3, LEGACY_STREAM)
    assert interface["shape"] == (flat.memory[0].numel(),)
    assert interface["data"] == (flat.memory[0].data_ptr(), False)
    stream = torch.Stream(device)
    with stream:
        assert vector.__cuda_array_interface__["stream"] == stream.native_handle > 1


def test_saving_and_restoring_reads_nothing_on_the_host(device):
    model = mixed(device)
    flat = flatten(model)
    before, reads = bits_of(model), torch_device.reads()
    saved = flat.save()
    for value in model.state_dict().values():
        value.fill_(1)
    flat.restore(saved)
    flat.check()
    flat.take()
    flat.mark_changed()
    assert torch_device.reads() == reads
    assert bits_of(model) == before


def test_release_gives_tensors_memory_of_their_own(device):
    model = mixed(device)
    flat = flatten(model)
    before, places = bits_of(model), [tensor.value.data_ptr() for tensor in flat.parameters]
    flat.release()
    assert bits_of(model) == before and not flat.vectors and not flat.memory
    after = [tensor.value.data_ptr() for tensor in flat.parameters]
    assert not any(place == now for place, now in zip(places, after, strict=True))
    assert {value.device for value in model.state_dict().values()} == {device}


def test_gradients_are_filled_and_written_back_on_the_device(device):
    model = make_model().to(device)
    flat = flatten(model)
    gradients = FlatGradients(flat)
    (model(torch.ones(4, 4, device=device)) - 1).square().mean().backward()
    model[3].bias.grad = None
    expected = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
    gradients.fill()
    reads = torch_device.reads()
    gradients.fill()
    gradients.multiply(0.5)
    gradients.write_back([True, True, False, True, True, False])
    assert torch_device.reads() == reads
    assert gradients.own == [True, True, True, True, True, False]
    for index, (parameter, value) in enumerate(zip(model.parameters(), expected, strict=True)):
        if index in (2, 5):
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, value / 2)
    assert gradients._memory[-1].tolist() == [0.5] * 5 + [0]
    gradients.fill(finite=False)
    assert gradients._memory[-1].isnan().all() and not any(gradients.own)


class Later:
    """A collective whose average is twice the vectors, once it is waited for."""

    def start(self, vectors, weight):
        self.vectors = vectors
        return self

    def wait(self):
        for vector in self.vectors:
            vector.values.mul_(2)


def test_an_average_under_way_leaves_the_model_alone(device):
    model = make_model().to(device)
    flat = flatten(model)
    before = bits_of(model)
    overlap = Overlap(flat, [], Later())
    reads = torch_device.reads()
    overlap.start(weight=1.0)
    assert torch_device.reads() == reads
    assert bits_of(model) == before
    reads = torch_device.reads()
    overlap.take()
    assert torch_device.reads() == reads
    assert torch.equal(model[0].weight.cpu(), 2 * make_model()[0].weight)


def test_a_model_on_two_devices_is_refused(device):
    model = make_model()
    model[3].to(device)
    with pytest.raises(TypeError) as raised:
        flatten(model)
    assert str(raised.value) == (
        "parameter '0.weight' is on cpu, parameter '3.weight' on standin:0: a model is averaged "
        "on one device"
    )


def test_integer_buffers_stay_where_they_are(device):
    model = make_model().to(device)
    model[2].num_batches_tracked = torch.tensor(7)
    flat = flatten(model)
    assert model[2].num_batches_tracked.device.type == "cpu"
    assert flat.device == device
    flat.restore(flat.save())
    assert model[2].num_batches_tracked == 7
