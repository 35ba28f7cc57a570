"""torch's own methods, as `wagma compare` runs them, beside ours."""

import numpy as np
import pytest
import torch
from methods import backward, bits_of, make_model, momentum_sgd

import collectives
from wagma import optim, references

pytestmark = [pytest.mark.mpi, pytest.mark.transports()]
PAIRS = {
    "ddp": (references.DDP, optim.Allreduce, {}),
    "post-local-sgd": (references.PostLocalSGD, optim.LocalSGD, {"sync_period": 3}),
}


def gradients(reference, rank, step):
    """Compute the gradients of this rank's batch with what the method has for it."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    batch = torch.randn(16, 4, generator=generator)
    return reference.backward((reference.module(batch) - rank).square().mean())


@pytest.mark.parametrize("name", PAIRS)
def test_it_trains_as_ours_does_and_is_averaged_for_a_while(comm, name):
    theirs, ours, settings = PAIRS[name]
    models = [make_model() for _ in range(2)]
    local = [momentum_sgd(model.parameters()) for model in models]
    reference = theirs(models[0], local[0], comm=comm, **settings)
    with ours(models[1], local[1], comm=comm, **settings) as averager:
        for step in range(7):
            local[0].zero_grad()
            waited = gradients(reference, comm.rank, step)
            assert (waited > 0) == (name == "ddp")
            local[0].step()
            backward(models[1], comm.rank, step)
            local[1].step()
            for one, other in zip(models[0].parameters(), models[1].parameters()):
                torch.testing.assert_close(one, other)
            (result,) = reference.results
            expected = averager.result.synchronized, tuple(averager.result.group)
            assert (result.synchronized, result.group) == expected
            assert (result.version, result.timely) == (step, True)
        before = bits_of(models[0])
        with reference.averaged(), averager.averaged():
            for one, other in zip(models[0].parameters(), models[1].parameters()):
                torch.testing.assert_close(one, other)
        assert bits_of(models[0]) == before
    assert reference.settings.items() <= averager.settings.items()
    assert reference.statistics().waiting > 0 and reference.statistics().bytes_sent is None
    reference.close()
    reference.close()


def test_ddp_averages_the_gradients_of_micro_batches_with_the_last_one(comm):
    """Before it, each rank has its own gradient."""
    model = make_model()
    reference = references.DDP(model, momentum_sgd(model.parameters()), comm=comm)

    def first():
        return next(model.parameters()).grad.numpy().copy()

    with reference.no_sync():
        gradients(reference, comm.rank, 0)
    own = first()
    each = comm.allgather(own)
    assert comm.size == 1 or not np.allclose(each[0], each[-1])
    gradients(reference, comm.rank, 0)
    np.testing.assert_allclose(first(), 2 * np.mean(each, axis=0), rtol=1e-4, atol=1e-6)
    reference.close()


@pytest.mark.parametrize("name", PAIRS)
def test_those_who_wait_for_a_rank_that_has_left_are_told(comm, name):
    theirs, _, settings = PAIRS[name]
    model = make_model()
    optimizer = momentum_sgd(model.parameters())
    reference = theirs(model, optimizer, comm=comm, **settings)

    def steps():
        for step in range(4):
            optimizer.zero_grad()
            gradients(reference, comm.rank, step)
            optimizer.step()

    if comm.rank:
        with pytest.raises(collectives.ClosedError, match="another rank has left"):
            steps()
    reference.close()
