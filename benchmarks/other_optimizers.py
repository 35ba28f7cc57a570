"""Optimizers of other packages beside averagers: which run, and how well do their models learn?

    mpiexec -n 4 python benchmarks/other_optimizers.py

A small regression for 200 steps, each rank with batches of its own. The reference is one process
that trains on the batches of all ranks, which is what Allreduce does up to rounding; the ratio is
the held-out loss of the mean model to the reference's. Recorded are also the updates that were left
out, and what `average_state=True` does. An optimizer whose package cannot be imported is skipped.
"""

import importlib
import importlib.metadata
import math

import torch
from common import markdown, parser, report
from mpi4py import MPI
from torch import nn

from wagma.optim import WAGMA, Allreduce, LocalSGD

INPUTS, OUTPUTS, BATCH, NOISE = 16, 4, 32, 0.2
METHODS = {
    "Allreduce": (Allreduce, {}),
    "WAGMA": (WAGMA, {}),
    "own pace": (WAGMA, {"pace": "own"}),
    "LocalSGD": (LocalSGD, {}),
    "WAGMA, average_state": (WAGMA, {"average_state": True}),
    "LocalSGD, average_state": (LocalSGD, {"average_state": True}),
}
WITHIN = 1.5  # of the reference's loss


def of(module, name, **settings):
    """Return a function that makes an optimizer of a model, and the module that it is of."""

    def make(model):
        return getattr(importlib.import_module(module), name)(model.parameters(), **settings)

    return make, module


def around(name, **settings):
    """Return the same for one of pytorch_optimizer that is put around another."""

    def make(model):
        outer = getattr(importlib.import_module("pytorch_optimizer"), name)
        if name == "Lookahead":
            return outer(torch.optim.AdamW(model.parameters(), lr=5e-3), **settings)
        return outer(model.parameters(), base_optimizer=torch.optim.AdamW, **settings)

    return make, "pytorch_optimizer"


def matrices(model):
    """Return the parameters that are matrices, and the others."""
    parameters = list(model.parameters())
    return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]


def muon_and_adamw(model):
    """Return torch's Muon of the matrices, and AdamW of the rest, as a list."""
    two, rest = matrices(model)
    return [torch.optim.Muon(two, lr=0.02), torch.optim.AdamW(rest, lr=5e-3)]


def muon_with_adam(model):
    """Return one optimizer with a group of matrices, and one of the rest."""
    muon = importlib.import_module("muon")
    two, rest = matrices(model)
    return muon.SingleDeviceMuonWithAuxAdam(
        [
            {"params": two, "use_muon": True, "lr": 0.02},
            {"params": rest, "use_muon": False, "lr": 5e-3},
        ]
    )


ADAFACTOR = {"lr": 5e-3, "scale_parameter": False, "relative_step": False}
# Of each optimizer, how it is made, and its module.
OPTIMIZERS = {
    "AdamW": of("torch.optim", "AdamW", lr=5e-3),
    "Muon + AdamW": (muon_and_adamw, "torch.optim"),
    "SingleDeviceMuonWithAuxAdam": (muon_with_adam, "muon"),
    "Lion": of("lion_pytorch", "Lion", lr=1e-3),
    "Adafactor": of("transformers.optimization", "Adafactor", **ADAFACTOR),
    "AdamWScheduleFree": of("schedulefree", "AdamWScheduleFree", lr=1e-2),
    "Prodigy": of("prodigyopt", "Prodigy", lr=1.0),
    "CAME": of("came_pytorch", "CAME", lr=2e-3),
    "Adam8bit": of("bitsandbytes.optim", "Adam8bit", lr=5e-3),
    "SophiaH": of("pytorch_optimizer", "SophiaH", lr=0.06),
    "SOAP": of("pytorch_optimizer", "SOAP", lr=5e-3),
    "Shampoo": of("pytorch_optimizer", "Shampoo", lr=0.03, preconditioning_compute_steps=10),
    "ScalableShampoo": of("pytorch_optimizer", "ScalableShampoo", lr=0.02),
    "Lamb": of("pytorch_optimizer", "Lamb", lr=2e-2),
    "SAM": around("SAM", rho=0.05, lr=5e-3),
    "Lookahead": around("Lookahead", k=5, alpha=0.5),
}
PACKAGES = {
    "torch.optim": "torch",
    "muon": "muon-optimizer",
    "lion_pytorch": "lion-pytorch",
    "transformers.optimization": "transformers",
    "came_pytorch": "came-pytorch",
    "bitsandbytes.optim": "bitsandbytes",
    "pytorch_optimizer": "pytorch-optimizer",
}


def samples(number, seed):
    """Return inputs and targets, which are noisy."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, INPUTS, generator=generator)
    mixed = inputs @ torch.linspace(-0.5, 0.5, INPUTS * OUTPUTS).view(INPUTS, OUTPUTS).roll(3, 0)
    return inputs, mixed.sin() + NOISE * torch.randn(number, OUTPUTS, generator=generator)


def new_model():
    """Return a model whose largest matrix is large enough for an optimizer's 8 bits."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, OUTPUTS)
    )


def loss_of(model):
    with torch.no_grad():
        inputs, targets = samples(2048, seed=1000)
        return nn.functional.mse_loss(model(inputs), targets).item()


def train(name, model, optimizers, batches):
    """Make a step with each batch."""
    for inputs, targets in batches:

        def backward(inputs=inputs, targets=targets):
            for each in optimizers:
                each.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward(create_graph=name == "SophiaH")
            return loss

        backward()
        for each in optimizers:
            each.step(*([backward] if name == "SAM" else []))


def made(name, model):
    """Return an optimizer in its training mode, and a list of it, or of its parts."""
    make, _ = OPTIMIZERS[name]
    given = make(model)
    if "ScheduleFree" in name:
        given.train()
    return given, given if isinstance(given, list) else [given]


def batches_of(ranks, steps):
    """Return what ranks train on: for each step, the batches of all of them."""
    drawn = [samples(steps * BATCH, seed=rank) for rank in ranks]
    inputs = torch.cat([x.view(steps, BATCH, INPUTS) for x, _ in drawn], 1)
    return list(zip(inputs, torch.cat([y.view(steps, BATCH, OUTPUTS) for _, y in drawn], 1)))


def alone(comm, name, steps):
    """Return the loss after one process has trained on the batches of all ranks."""
    model = new_model()
    _, optimizers = made(name, model)
    train(name, model, optimizers, batches_of(range(comm.size), steps))
    if "ScheduleFree" in name:
        optimizers[0].eval()
    return loss_of(model)


def beside(comm, name, method, settings, steps):
    """Return the mean model's loss and how many updates were left out, or the error."""
    model = new_model()
    given, optimizers = made(name, model)
    found, left_out, error = {}, 0, None
    try:
        with method(model, given, comm=comm, **settings) as averager:
            train(name, model, optimizers, batches_of([comm.rank], steps))
            left_out = averager.statistics().left_out
            with averager.averaged():
                found = {"loss": loss_of(model)}
            if not math.isfinite(found["loss"]):
                raise ArithmeticError(f"the mean model's loss is {found['loss']}")
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    errors = [each for each in comm.allgather(error) if each]
    if errors:
        own = [each for each in errors if not each.startswith("RankFailedError")]
        return {"error": (own or errors)[0]}
    return found | {"left_out": comm.allreduce(left_out)}


def measure(comm, name, steps):
    """Return an optimizer's results, or why it is skipped."""
    make, module = OPTIMIZERS[name]
    package = PACKAGES.get(module, module)
    try:
        make(new_model())
    except (ImportError, AttributeError) as error:
        return {"package": package, "skipped": f"{type(error).__name__}: {error}"}
    reference = alone(comm, name, steps)
    result = {
        "package": package,
        "version": importlib.metadata.version(package),
        "before": loss_of(new_model()),
        "one process": reference,
    }
    for label, (method, settings) in METHODS.items():
        result[label] = found = beside(comm, name, method, settings, steps)
        if "loss" in found:
            found["ratio"] = found["loss"] / reference
            found["within"] = found["ratio"] <= WITHIN
    return result


def cell(found):
    """Return what a table says of a method."""
    if "error" in found:
        return found["error"].partition(":")[0]
    left_out = f", {found['left_out']} left out" if found["left_out"] else ""
    return f"{found['ratio']:.2f}{left_out}"


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--optimizers", default=",".join(OPTIMIZERS), metavar="NAME,…")
    arguments = arguments.parse_args()
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    results = {}
    for name in arguments.optimizers.split(","):
        results[name] = result = measure(comm, name, arguments.steps)
        if comm.rank:
            continue
        if "skipped" in result:
            print(f"# {name} of {result['package']} is skipped: {result['skipped']}", flush=True)
            continue
        losses = f"{result['before']:.3f} before, {result['one process']:.3f} of one process"
        print(f"# {name} of {result['package']} {result['version']}: {losses}", flush=True)
        for label in METHODS:
            found = result[label]
            print(f"#   {label}: {found.get('error') or cell(found)}", flush=True)
    if comm.rank:
        return
    ran = {name: each for name, each in results.items() if "skipped" not in each}
    rows = {name: [cell(each[label]) for label in METHODS] for name, each in ran.items()}
    print(markdown("loss ÷ one process's", list(METHODS), rows))
    report(arguments, "other-optimizers", comm.size, results)


if __name__ == "__main__":
    main()
