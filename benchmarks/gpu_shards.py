"""Averaged optimizer state and control variates on a GPU, as a part of gpu.py."""

from __future__ import annotations

from common import take_turns
from gpu_parts import large_model, medians_of, synchronizing, timing, torch_place
from gpu_processes import keep

STEPS, PERIOD = 12, 4
# Of parameters in double precision, between a training on the GPU and one on the CPU.
CLOSE = 1e-9
# The same where AdamW's count of steps is on the device: it corrects by numbers of float32 there.
CLOSE_IN_SINGLE = 1e-5
BOTH = {"average_state": True, "correction": "control-variates"}


def optimizers(torch):
    """Return functions that make a local optimizer, by what is tried."""
    sgd = {"lr": 0.05, "momentum": 0.9}
    return {
        "SGD": lambda p: torch.optim.SGD(p, **sgd),
        "SGD, foreach": lambda p: torch.optim.SGD(p, **sgd, foreach=True),
        "SGD, fused": lambda p: torch.optim.SGD(p, **sgd, fused=True),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
        "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
        "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        "AdamW, capturable": capturable,
        "AdamW, compiled": compiled,
    }


def capturable(parameters):
    """Return an AdamW whose count of steps is on the device; on the CPU it is on the host."""
    import torch

    parameters = list(parameters)
    on_device = parameters[0].device.type != "cpu"
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.01), capturable=on_device)


def compiled(parameters):
    """Return such an AdamW whose step is compiled, on a device."""
    import torch

    made = capturable(parameters)
    if made.param_groups[0]["capturable"]:
        made.step = torch.compile(made.step)
    return made


def model_of(torch, place, dtype):
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    return torch.nn.Sequential(*layers).to(place, dtype)


def trained(torch, comm, place, make, **options):
    """Train on data of this rank's own; return the parameters, and c minus the mean of all cr."""
    from wagma.optim import WAGMA
    from wagma.optim.control_variates import ControlVariates

    model = model_of(torch, place, torch.float64)
    optimizer = make(model.parameters())
    options |= {"sync_period": PERIOD, **BOTH}
    with WAGMA(model, optimizer, comm=comm, **options) as averager:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * comm.rank + step)
            batch = torch.randn(8, 6, generator=generator, dtype=torch.float64).to(place)
            optimizer.zero_grad()
            (model(batch) - comm.rank).square().mean().backward()
            optimizer.step()
        variates = next(e for e in averager._extras if isinstance(e, ControlVariates))
        own = torch.stack(comm.allgather(torch.cat(variates.own.memory).cpu())).mean(dim=0)
        with averager.averaged():
            off = (torch.cat(variates.mean.memory).cpu() - own).abs().max()
        return torch.cat([p.detach().flatten().cpu() for p in model.parameters()]), float(off)


def mixed_precision(torch, comm, place):
    """Train with a gradient that is infinite once; return how many numbers are not finite."""
    from wagma.optim import WAGMA

    model = model_of(torch, place, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    with WAGMA(model, optimizer, comm=comm, sync_period=PERIOD, **BOTH) as averager:
        for step in range(STEPS):
            batch = torch.randn(8, 6, device=place)
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = (model(batch) - comm.rank).square().mean()
            scaler.scale(loss).backward()
            if (comm.rank, step) == (1, 5):
                next(model.parameters()).grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
        return sum(int((~vector.isfinite()).sum()) for vector in averager._memory)


def shards(comm, device, arguments):
    """Compare trainings on the GPU with those on the CPU, and time steps with both options."""
    place = torch_place(comm, arguments)
    import torch

    from wagma import devices
    from wagma.optim import WAGMA

    if place.type == "cpu":
        return {"not measured": devices.why_none()}, {}
    found, figures = {}, {}
    makers = optimizers(torch)
    if place.type != "cuda":
        del makers["AdamW, compiled"]  # torch has a compiler for CUDA, not for the stand-in
    for name, make in makers.items():
        there, off = trained(torch, comm, place, make, wait="group")
        expected, _ = trained(torch, comm, "cpu", make, wait="group")
        difference = float((there - expected).abs().max())
        found[name] = {"difference": difference, "c − mean of cr": off}
        on_device = name in ("AdamW, capturable", "AdamW, compiled")
        bound = CLOSE_IN_SINGLE if on_device else CLOSE
        figures[f"{name}: difference from the CPU"] = (difference, bound)
        figures[f"{name}: c − mean of cr"] = (off, CLOSE)
        keep(comm, arguments, {"trainings": found})
    for pace in ("common", "own"):
        _, off = trained(torch, comm, place, makers["AdamW"], pace=pace)
        figures[f"{pace} pace: c − mean of cr"] = (off, CLOSE)
    if place.type == "cuda":
        bad = mixed_precision(torch, comm, place)
        figures["mixed precision: numbers that are not finite"] = (float(bad), 0)
    model, count = large_model(place, arguments)
    times, waits = {}, {}
    kinds = {
        "SGD": lambda: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        "AdamW": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    }
    choices = {
        "neither": {},
        "state": {"average_state": True},
        "both": BOTH,
        "both, all ranks": {**BOTH, "average_state": "all-ranks", "correction_every": "all-ranks"},
    }
    for kind, make in kinds.items():
        for choice, options in choices.items():
            settings = {"group_size": comm.size, **options}
            optimizer = make()
            with WAGMA(model, optimizer, comm=comm, **settings):

                def call(optimizer=optimizer):
                    optimizer.step()
                    devices.wait_for(place)

                name = f"{kind}, {choice}"
                variants = {name: timing(comm, call)}
                times |= take_turns(comm, variants, arguments.rounds, arguments.seconds / 8)
                waits[name] = synchronizing(optimizer.step)
            keep(comm, arguments, {"trainings": found, "seconds": medians_of(times)})
    return {
        "trainings": found,
        "parameters": count,
        "seconds": medians_of(times),
        "operations of a step that wait for the device": waits,
        "figures": figures,
    }, {}
