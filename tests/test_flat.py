"""The model as vectors: what becomes a view of them, what does not, and what is refused."""

from __future__ import annotations

import copy
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from wagma.optim.flat import FlatModel
from wagma.optim.tensors import survey
from wagma.optim.vectors import ALIGNMENT


def make_model(dtype=torch.float32):
    """Return a model with convolutions, BatchNorm buffers and a scalar parameter."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 5)
    )
    model.scale = nn.Parameter(torch.tensor(2.0))
    return model.to(dtype)


def flatten(model, exclude=(), include=(), **settings):
    return FlatModel(model, survey(model, [], exclude, include), **settings)


def is_view(tensor, flat):
    start = flat.vectors[0].__array_interface__["data"][0]
    return start <= tensor.data_ptr() < start + flat.vectors[0].nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_keep_object_shape_and_value_and_become_aligned_views(dtype):
    model = make_model(dtype)
    before = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())

    flat = flatten(model)

    vector, buffers = flat.vectors
    assert vector.ndim == 1 and vector.flags.c_contiguous and vector.flags.writeable
    assert torch.from_numpy(vector).dtype == dtype
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    for name, value in model.state_dict().items():
        assert value.shape == before[name].shape
        assert value.stride() == before[name].stride()
        assert torch.equal(value, before[name])
    for parameter in parameters:
        assert is_view(parameter, flat) and parameter.data_ptr() % ALIGNMENT == 0
    assert not any(is_view(buffer, flat) for buffer in model.buffers())
    assert flat.by_value == [1] and buffers[:3].tolist() == [0, 0, 0]
    assert all(p.requires_grad and p.is_leaf for p in parameters)


def test_each_dtype_has_a_vector_that_its_parameters_are_views_of():
    """A mixed model: half-precision layers, a float32 BatchNorm, a float64 buffer."""
    model = make_model()
    model[0].half()
    model[4].bfloat16()
    model.register_buffer("total", torch.ones(3, dtype=torch.float64))
    before = copy.deepcopy(model.state_dict())

    flat = flatten(model)

    names = [vector.dtype.name for vector in flat.vectors]
    # The order of the modules, a module's own parameters first; then those of buffers.
    assert names == ["float32", "float16", "bfloat16", "float64", "float32"]
    assert flat.by_value == [3, 4]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    averaged = [*flat.parameters, *flat.buffers]
    saved = []
    for number in (3, 4):
        for vector in flat.vectors:
            vector[:] = number
        flat.take()
        assert all((tensor.value == number).all() for tensor in averaged)
        saved.append(flat.save())
    flat.restore(saved[0])
    assert all((tensor.value == 3).all() for tensor in averaged)


def test_a_write_to_the_vector_is_seen_in_the_parameters_and_the_reverse():
    model = make_model()
    flat = flatten(model)
    flat.vectors[0][:] = 3
    assert all((tensor.value == 3).all() for tensor in flat.parameters)
    with torch.no_grad():
        model[4].bias.fill_(7)
    assert (flat.vectors[0] == 7).sum() == model[4].bias.numel()


def test_half_precision_has_float32_beside_it_that_loses_no_small_update():
    """A float16 at 1 loses 2⁻¹² in each average of two ranks; the wide vector has the sum."""
    model = nn.Linear(3, 1, dtype=torch.float16)
    nn.init.ones_(model.weight)
    flat = flatten(model, wide=True)
    (vector,) = flat.vectors
    assert vector.dtype == np.float32 and flat.memory == flat.stand_ins
    for _ in range(8):
        flat.give()
        vector[:3] += 2.0**-12
        flat.take()
    assert (model.weight == 1 + 2.0**-9).all()
    with torch.no_grad():
        model.weight += 1  # the optimizer's change is added to it
    assert not flat.give() and (vector[:3] == 2 + 2.0**-9).all()
    flat.round()
    assert np.array_equal(vector[:3], model.weight.detach()[0].float())
    assert flatten(nn.Linear(3, 1, dtype=torch.float16)).vectors[0].dtype == np.float16


def test_forward_backward_and_steps_equal_those_of_the_plain_model():
    plain = make_model(torch.float64)
    model = copy.deepcopy(plain)
    flatten(model)
    batch = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    for network in (plain, model):
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            (network(batch).square().mean() * network.scale).backward()
            optimizer.step()
    for (name, expected), actual in zip(
        plain.state_dict().items(), model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(actual, expected, msg=name)


shapes = st.lists(st.integers(0, 5), max_size=4)


@settings(max_examples=50, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_any_shapes_and_orders_of_dimensions_survive(shapes, random):
    model = nn.ParameterList([nn.Parameter(torch.ones(1))])
    for shape in shapes:
        order = random.sample(range(len(shape)), len(shape))
        model.append(nn.Parameter(torch.randn(shape).permute(order)))
    before = [(p.detach().clone(), p.stride()) for p in model]

    flat = flatten(model)

    for parameter, (value, stride) in zip(model, before, strict=True):
        assert torch.equal(parameter, value) and parameter.stride() == stride
    numbers = np.concatenate([value.numpy().ravel() for value, _ in before])
    assert np.array_equal(
        np.sort(flat.vectors[0][flat.vectors[0] != 0]), np.sort(numbers[numbers != 0])
    )


def test_channels_last_parameters_stay_so():
    model = nn.Conv2d(4, 3, 3).to(memory_format=torch.channels_last)
    flatten(model)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_tied_parameter_is_one_view():
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7, bias=False))
    model[1].weight = model[0].weight
    flat = flatten(model)
    assert len(flat.parameters) == 1 and flat.vectors[0].size == 32  # 21 elements, aligned
    assert model[1].weight is model[0].weight

    model[1].weight = nn.Parameter(torch.zeros(7, 3))
    with pytest.raises(RuntimeError, match=r"'0\.weight' was replaced"):
        flat.check()


def roles(flat, role):
    return [tensor.name for tensor in flat.tensors if tensor.role == role]


def test_batchnorm_statistics_are_averaged_by_value_and_their_counter_is_not():
    model = make_model()
    flat = flatten(model)
    model(torch.randn(2, 1, 8, 8))
    flat.check()
    flat.give()
    assert flat.vectors[1][:3].tolist() == model[1].running_mean.tolist()
    assert [tensor.name for tensor in flat.buffers] == ["1.running_mean", "1.running_var"]
    assert roles(flat, "not averaged") == ["1.num_batches_tracked"]
    model[1].running_mean = torch.full((3,), 5.0)  # a module may replace it
    flat.check()
    flat.give()
    assert flat.vectors[1][:3].tolist() == [5, 5, 5]
    flat.vectors[1][:3] = 6
    flat.take()
    assert model[1].running_mean.tolist() == [6, 6, 6]


def test_elements_of_buffers_that_are_not_finite_leave_themselves_out_only():
    model = make_model()
    flat = flatten(model)
    model[1].running_mean.copy_(torch.tensor([torch.nan, -torch.inf, 3]))
    assert flat.give() == ["1.running_mean"]
    assert flat.vectors[1][:3].tolist() == [0, 0, 3]
    flat.vectors[1][:3] = 7
    flat.take()
    assert model[1].running_mean.tolist() == [7, -torch.inf, 7]


def test_frozen_parameters_are_not_averaged_unless_they_are_included():
    model = make_model()
    model[0].requires_grad_(False)
    flat = flatten(model)
    assert not is_view(model[0].weight, flat) and "0.weight" in roles(flat, "not averaged")
    flat.release()
    flat = flatten(model, include="0")
    assert is_view(model[0].weight, flat) and not model[0].weight.requires_grad


@pytest.mark.parametrize(
    "exclude", ["4", ["4.weight", "4.bias"], "4.*", lambda name, tensor: tensor.shape[:1] == (5,)]
)
def test_what_is_excluded_is_each_ranks_own(exclude):
    model = make_model()
    flat = flatten(model, exclude)
    assert roles(flat, "each rank's own") == ["4.weight", "4.bias"]
    assert not is_view(model[4].weight, flat) and is_view(model[0].weight, flat)
    flat.check()


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"exclude": "4.weights"}, ValueError, r"buffer '4.weights'; near ones are '4.weight'"),
        ({"include": [4]}, TypeError, "include has 4, which is not a name or pattern"),
        ({"include": "limit"}, ValueError, "include: frozen parameter 'limit' is not finite"),
    ],
)
def test_what_cannot_be_selected_is_refused(settings, kind, message):
    model = make_model()
    model.limit = nn.Parameter(torch.tensor(torch.inf), requires_grad=False)
    with pytest.raises(kind, match=message):
        flatten(model, **settings)


def test_a_constant_that_is_not_finite_stays_out_of_the_average():
    model = make_model()
    model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
    model.limit = nn.Parameter(torch.tensor(torch.inf), requires_grad=False)
    flat = flatten(model)
    assert {"mask", "limit"} <= set(roles(flat, "not averaged"))
    assert all(np.isfinite(vector).all() for vector in flat.vectors)


def test_buffers_that_are_not_persistent_are_nobodys():
    model = make_model()
    model.register_buffer("cache", torch.ones(3), persistent=False)
    flat = flatten(model)
    assert "cache" not in [tensor.name for tensor in flat.tensors]


def test_views_survive_loading_and_zero_grad():
    model, other = make_model(), make_model()
    nn.init.constant_(other[4].weight, 5)
    flat = flatten(model)
    model.load_state_dict(other.state_dict())
    for set_to_none in (True, False):
        model(torch.randn(2, 1, 8, 8)).sum().backward()
        model.zero_grad(set_to_none)
    flat.check()
    assert (flat.vectors[0] == 5).sum() == 540


def replace_data(model):
    model[4].weight.data = model[4].weight.data.clone()


def replace_parameter(model):
    model[4].weight = nn.Parameter(model[4].weight.detach().clone())


def remove_parameter(model):
    del model[4].weight


def reshape_buffer(model):
    model[1].running_mean = torch.ones(4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (replace_data, "parameter '4.weight'"),
        (replace_parameter, "parameter '4.weight'"),
        (remove_parameter, "parameter '4.weight'"),
        (nn.Module.double, "parameter 'scale'"),
        (nn.Module.half, "parameter 'scale'"),
    ],
)
def test_replaced_memory_is_noticed(change, named):
    model = make_model()
    flat = flatten(model)
    flat.check()
    change(model)
    with pytest.raises(RuntimeError, match=f"{named} was replaced"):
        flat.check()


def test_a_buffer_that_was_replaced_by_another_kind_is_noticed():
    model = make_model()
    flat = flatten(model)
    reshape_buffer(model)
    for call in (flat.give, flat.take):
        with pytest.raises(
            RuntimeError, match=r"buffer '1.running_mean' was replaced by one of an"
        ):
            call()


def test_saved_values_come_back_bit_for_bit():
    model = make_model()
    flat = flatten(model)
    flat.vectors[0][:3] = [np.nan, -0.0, np.inf]
    before, counter = flat.vectors[0].tobytes(), model[1].num_batches_tracked.item()
    saved = flat.save()
    flat.vectors[0][:] = 1
    model(torch.randn(2, 1, 8, 8))
    flat.restore(saved)
    assert flat.vectors[0].tobytes() == before
    assert model[1].num_batches_tracked.item() == counter
    flat.check()


def mixed_model():
    """Return a model of four dtypes, with an order of dimensions of its own and an empty tensor."""
    model = make_model().to(memory_format=torch.channels_last)
    model[0].half()
    model[4].bfloat16()
    model.register_buffer("total", torch.ones(3, dtype=torch.float64))
    model.register_buffer("nothing", torch.ones(0, 3))
    model.tied = model.scale
    return model


def test_every_tensor_has_a_storage_that_is_its_own_part_of_the_vector():
    model = mixed_model()
    flat = flatten(model)
    for tensor in (*flat.parameters, *flat.buffers):
        assert tensor.value.untyped_storage().nbytes() == tensor.value.nbytes
    flat.check()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_released_tensors_have_memory_of_their_own_and_all_else_stays(mode):
    model = mixed_model()
    flat = flatten(model)
    objects = [*model.parameters(), *model.buffers()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    strides = [value.stride() for value in objects]
    model[4].weight.grad = gradient = torch.ones_like(model[4].weight)
    vectors = list(flat.vectors)
    with mode():
        flat.release()
        flat.release()
    assert not flat.vectors
    for vector in vectors:
        vector[:] = 3
    assert all(a is b for a, b in zip(objects, [*model.parameters(), *model.buffers()]))
    assert [value.stride() for value in objects] == strides
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in objects)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    assert model[4].weight.grad is gradient and model.tied is model.scale
    flat.check()
    model.double()(torch.randn(2, 1, 8, 8, dtype=torch.float64)).sum().backward()


def test_nothing_holds_the_vectors_of_a_released_model():
    model = make_model()
    flat = flatten(model)
    vector = weakref.ref(flat.vectors[0])
    flat.release()
    assert vector() is None


def test_what_was_replaced_stays_as_it_is_when_the_rest_is_released():
    model = make_model()
    flat = flatten(model)
    replace_data(model)
    data = model[4].weight.data_ptr()
    flat.release()
    assert model[4].weight.data_ptr() == data


def test_a_pruned_layer_is_noticed_and_a_new_name_is_not():
    model = make_model()
    flat = flatten(model)
    model.alias = model[4]
    flat.check()
    prune.l1_unstructured(model[4], "weight", amount=0.5)
    with pytest.raises(RuntimeError, match=r"parameter '4\.weight' was replaced after"):
        flat.check()


def with_a_quarter(model):
    model.register_buffer("scales", torch.zeros(3).to(torch.float8_e5m2))


def with_a_lazy_layer(model):
    model.append(nn.LazyLinear(3))


def with_a_sparse_buffer(model):
    model.register_buffer("graph", torch.eye(3).to_sparse())


def with_a_tensor_elsewhere(model):
    model.register_buffer("far", torch.zeros(3, device="meta"))


def with_shared_memory(model):
    model.register_buffer("start", model[4].weight.detach())


def with_overlapping_memory(model):
    words = torch.randn(10)
    model.one, model.two = nn.Parameter(words[:6]), nn.Parameter(words[5:])


def with_interlocking_memory(model):
    table = torch.randn(4, 6)
    model.left, model.right = nn.Parameter(table[:, :4]), nn.Parameter(table[:, 3:])


def with_memory_seen_as_integers(model):
    model.register_buffer("bits", model[4].bias.detach().view(torch.int32)[1:])


def with_an_expanded_buffer(model):
    model.register_buffer("mask", torch.ones(1, 4).expand(3, 4))


def with_an_inference_tensor(model):
    with torch.inference_mode():
        model.register_buffer("cache", torch.ones(4))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (with_a_quarter, TypeError, "buffer 'scales' is torch.float8_e5m2, not one of float16, b"),
        (with_a_lazy_layer, ValueError, "parameter '5.weight' has no shape yet"),
        (with_a_sparse_buffer, TypeError, "buffer 'graph' is torch.sparse_coo"),
        (with_a_tensor_elsewhere, TypeError, "buffer 'far' is on meta"),
        (with_shared_memory, ValueError, "buffer 'start' and parameter '4.weight' share memory"),
        (with_overlapping_memory, ValueError, "parameter 'one' and parameter 'two' share memory"),
        (with_interlocking_memory, ValueError, "'left' and parameter 'right' share memory"),
        (with_memory_seen_as_integers, ValueError, "'4.bias' and buffer 'bits' share memory"),
        (with_an_expanded_buffer, ValueError, "buffer 'mask' is expanded.*register a clone"),
        (with_an_inference_tensor, TypeError, "buffer 'cache' was made in torch.inference_mode"),
    ],
)
def test_what_cannot_be_averaged_is_refused_by_name(change, kind, message):
    model = make_model()
    change(model)
    with pytest.raises(kind, match=message):
        survey(model, [])


def test_complex_parameters_are_pairs_of_real_numbers():
    model = make_model()
    model.phase = nn.Parameter(torch.tensor([1 + 2j, 3j]))
    model.register_buffer("turn", torch.tensor([4 + 5j]))
    phase, flat = model.phase, flatten(model)
    numbers = flat.vectors[0][flat.vectors[0] != 0].tolist()
    assert model.phase is phase and phase.tolist() == [1 + 2j, 3j]
    assert {1.0, 2.0, 3.0} <= set(numbers) and flat.vectors[1].dtype == np.float32
    with torch.no_grad():
        phase.mul_(2)
    assert {4.0, 6.0} <= set(flat.vectors[0].tolist())
    flat.vectors[1][:] = 7
    flat.take()
    assert model.turn.item() == 7 + 7j
    flat.release()
    assert phase.tolist() == [2 + 4j, 6j]


def test_views_without_a_common_element_are_separate_parameters():
    table = torch.arange(24.0).view(4, 6)
    model = nn.ParameterList([table[:, :2], table[::2, 2:], table[1::2, 2:], table[:0]])
    before = [parameter.clone() for parameter in model]
    flat = flatten(model)
    assert all(torch.equal(p, value) for p, value in zip(model, before, strict=True))
    assert sorted(flat.vectors[0][flat.vectors[0] != 0]) == list(range(1, 24))


def test_torchs_default_device_does_not_matter():
    model, table = make_model(), torch.ones(4, 6)
    model.left, model.right = nn.Parameter(table[:, :2]), nn.Parameter(table[:, 2:])
    with torch.device("meta"):
        flat = flatten(model)
    assert is_view(model.left, flat)


def test_a_model_with_nothing_to_average_is_refused():
    for value in (torch.zeros(0), nn.Parameter(torch.ones(3), requires_grad=False)):
        with pytest.raises(ValueError, match="no floating-point parameters"):
            flatten(nn.ParameterList([value]))


def test_wrong_objects_and_strangers_are_refused():
    model, other = make_model(), nn.Linear(2, 3)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not list"):
        survey(list(model.parameters()), [])
    with pytest.raises(ValueError, match=r"parameter 0 of group 0, shape \(3, 2\), is in"):
        survey(model, [{"params": list(other.parameters())}])
    with pytest.raises(ValueError, match="no floating-point parameters"):
        survey(nn.ReLU(), [])
