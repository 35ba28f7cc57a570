"""Records of runs with a known culprit, as `wagma train` writes them, in synchronous training."""

from __future__ import annotations

import json

import numpy as np

STEP = {"data": 0.002, "gradient": 0.08, "optimizer": 0.003, "delay": 0.0, "other": 0.0005}
AVERAGING = 0.001  # seconds of an exchange
STEPS, RANKS, NODES = 400, 8, ("a", "a", "a", "a", "b", "b", "b", "b")


class Run:
    """A run that is made up: seconds of all ranks' steps by part, of shape (steps, ranks).

    Attributes:
        parts: of the ranks' own steps, by name.
        averaging: seconds of averaging without waiting.
        queued: seconds in which a rank waited for a core, which are in "gradient".
        throttled, gpu: seconds for which a rank's cgroup was stopped, and why its GPU's clock was
            lower.
        samples, elements, work: as in the records; no work: none is told.
    """

    def __init__(self, seed, steps=STEPS, ranks=RANKS, spread=0.02):
        self.rng, self.shape = np.random.default_rng(seed), (steps, ranks)
        self.parts = {
            name: seconds * np.exp(self.rng.normal(0, spread, self.shape))
            for name, seconds in STEP.items()
        }
        self.averaging = np.full(self.shape, AVERAGING)
        self.queued = np.zeros(self.shape)
        self.throttled = np.zeros(self.shape)
        self.gpu = np.zeros(self.shape, dtype=int)
        self.samples = np.full(self.shape, 32)
        self.elements = np.full(self.shape, 32 * 64)
        self.work = None

    def prolong(self, part, seconds, rank, steps=slice(None)):
        """Let a rank's steps take longer."""
        self.parts[part][steps, rank] += seconds

    def own(self):
        return sum(self.parts.values())

    def write(self, directory, algorithm="allreduce", nodes=NODES, **more):
        """Write the files of the run; all ranks wait for the slowest at every step."""
        directory.mkdir(parents=True)
        steps, ranks = self.shape
        config = {
            "algorithm": algorithm,
            "options": {},
            "seconds": None,
            "ranks": ranks,
            "node_of_rank": list(nodes[:ranks]),
            "model_bytes": 400_000,
        }
        (directory / "config.json").write_text(json.dumps(config | more))
        own = self.own()
        step = own + self.averaging
        waiting = step.max(axis=1, keepdims=True) - step
        ended = np.cumsum(step.max(axis=1))
        for rank in range(ranks):
            lines = [
                json.dumps(self.record(step, rank, waiting[step, rank], ended[step]))
                for step in range(steps)
            ]
            (directory / f"rank-{rank:04}.jsonl").write_text("\n".join(lines) + "\n")
        return directory

    def record(self, step, rank, waiting, ended):
        of = {name: float(seconds[step, rank]) for name, seconds in self.parts.items()}
        computed = of["data"] + of["gradient"] + of["optimizer"]
        queued = float(self.queued[step, rank])
        return {
            "step": step,
            "loss": 1.0,
            "samples": int(self.samples[step, rank]),
            "elements": int(self.elements[step, rank]),
            "work": None if self.work is None else float(self.work[step, rank]),
            "compute_s": computed,
            "data_s": of["data"],
            "optimizer_s": of["optimizer"],
            "cpu_s": computed - queued,
            "queued_s": queued,
            "faults": 0,
            "throttled_s": float(self.throttled[step, rank]),
            "gpu_reasons": int(self.gpu[step, rank]),
            "delay_s": of["delay"],
            "average_s": float(waiting + self.averaging[step, rank]),
            "waiting_s": float(waiting),
            "elapsed_s": float(ended),
        }


def one_rank(run):
    run.prolong("gradient", 0.04, 3)


def two_ranks(run):
    run.prolong("gradient", 0.05, 2)
    run.prolong("gradient", 0.05, 6)


def a_node(run):
    for rank in range(4, 8):
        run.prolong("gradient", 0.03, rank)


def every_tenth_step(run):
    run.prolong("gradient", 0.2, 5, slice(4, None, 10))


def from_step_300(run):
    run.prolong("gradient", 0.08, 1, slice(300, None))


def data_loading(run):
    run.prolong("data", 0.06, 0)


def stolen_processor(run):
    """Another process has half of the rank's core in turn."""
    stolen = run.parts["gradient"][:, 4] * run.rng.uniform(0.8, 1.2, run.shape[0])
    run.prolong("gradient", stolen, 4)
    run.queued[:, 4] += stolen


def sleeps(run):
    run.prolong("delay", 0.05, 7)


def collections_of_garbage(run):
    steps = np.cumsum(run.rng.integers(20, 45, run.shape[0] // 45))
    run.prolong("gradient", 0.3, 6, steps)


def growing(run):
    run.prolong("gradient", np.linspace(0, 0.12, run.shape[0]), 2)


def nothing(run):
    pass


def noise(run):
    """Every rank's steps vary by much."""
    run.parts["gradient"] *= np.exp(run.rng.normal(0, 0.25, run.shape))


# Of each kind: the ranks that are slow, the pattern, and the part.
KINDS = {
    one_rank: ({3}, "always", "gradient"),
    two_ranks: ({2, 6}, "always", "gradient"),
    a_node: ({4, 5, 6, 7}, "always", "gradient"),
    every_tenth_step: ({5}, "now and then", "gradient"),
    from_step_300: ({1}, "from a step on", "gradient"),
    data_loading: ({0}, "always", "data"),
    stolen_processor: ({4}, "always", "outside"),
    sleeps: ({7}, "always", "delay"),
    collections_of_garbage: ({6}, "now and then", "gradient"),
    growing: ({2}, "growing", "gradient"),
    nothing: (set(), None, None),
    noise: (set(), None, None),
}


def alike(seed):
    """Return step times of ranks that are alike, of shape (steps, ranks), by many distributions."""
    rng = np.random.default_rng(seed)
    shape = steps, ranks = int(rng.choice([16, 40, 100, 300])), int(rng.choice([2, 3, 4, 8, 32]))
    times = np.exp(rng.normal(0, 0.02, shape))
    draw = [
        lambda: np.exp(rng.normal(0, rng.uniform(0.002, 0.3), shape)),
        lambda: 1 + rng.pareto(rng.uniform(1.5, 4), shape) * rng.uniform(0.05, 0.3),
        lambda: times + (rng.random(shape).argsort(axis=1) < 2),  # "cloud"
        lambda: np.where(rng.random(shape) < 1 / ranks, 6 * times, times),  # "random"
        lambda: times * np.exp(rng.normal(0, 0.5, (steps, 1))) * np.linspace(1, 3, steps)[:, None],
        lambda: np.where(rng.random(shape) < 0.002, 20 * times, times),
        lambda: 1 + rng.gamma(0.5, 0.2, shape),
        lambda: np.full(shape, 0.5),
    ]
    return draw[seed % len(draw)]()
