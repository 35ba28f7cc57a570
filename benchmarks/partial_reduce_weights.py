"""Partial Reduce's weights by time to an accuracy: real gradients in simulated time.

    python benchmarks/partial_reduce_weights.py

The simulator's controller forms the groups, at the times of its model: 8 ranks on a Cray Aries
network, log-normal steps of 0.2 s in the median, σ = 0.2 (the value at which Partial Reduce is as
fast, compared with All-Reduce, as in the paper: see `simulated_partial_reduce`), ResNet-34's 21.8
million parameters. In that order each rank makes its steps, of SGD with momentum, of a network with
one hidden layer on scikit-learn's digits; groups average the models with the weights of
`collectives.dynamic_weights`. So a run is a function of its seed, and repeats on any machine.

All-Reduce is P' = 8. Accuracy is that of the mean of all ranks' models on the 360 test images,
after every 8 steps; its time is that of the first of three in a row that reach the threshold. The
weights are compared with the same seeds: batches, first model, times of steps.
"""

from statistics import median

import numpy as np
from common import parser, report
from sklearn.datasets import load_digits

from collectives import dynamic_weights
from wagma.methods import named
from wagma.methods.method import load
from wagma.simulation import MACHINES, Settings, steps
from wagma.simulation.core import Simulation

RANKS = 8
STEP, SIGMA = 0.2, 0.2
PARAMETERS = 21_797_672
CASES = {
    "all alike": {},
    "three 1.87 × slow": dict.fromkeys(range(3), 1.87),
    "one 6 × slow": {0: 6.0},
    "three 6 × slow": dict.fromkeys(range(3), 6.0),
}
GROUP_SIZES = (3, 5)
# Arguments of `dynamic_weights`; None: all members have the same weight.
WEIGHTS = {
    "constant": None,
    "dynamic": {},
    "dynamic, missing=initial": {"missing": "initial"},
    "dynamic-each": {"each": True},
}
HIDDEN, BATCH, MOMENTUM = 32, 16, 0.9
TEST = 360
IN_A_ROW = 3


def schedule(group_size, slow, seconds, seed):
    """Return the groups and the times of their ends."""
    times = steps.log_normal(int(3 * seconds / STEP), RANKS, STEP, SIGMA, seed)
    for rank, factor in slow.items():
        times[:, rank] *= factor
    method = named("partial-reduce")
    driver = load(method.simulated)(Settings(4 * PARAMETERS, group_size=group_size), RANKS)
    driver.log = []
    Simulation(driver, MACHINES["aries"], times, seconds).run()
    return driver.log, driver.times


class Digits:
    """The data, and the network's gradients; a model is one float64 vector."""

    SHAPES = ((64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,))

    def __init__(self, seed):
        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(images))
        images, labels = images[order] / 16, labels[order]
        self.test, self.test_labels = images[:TEST], labels[:TEST]
        self.train, self.train_labels = images[TEST:], labels[TEST:]
        self.draws = [np.random.default_rng([seed, rank]) for rank in range(RANKS)]

    def first_model(self, seed):
        draws = np.random.default_rng(seed)
        parts = [draws.normal(0, np.sqrt(2 / shape[0]), shape) for shape in self.SHAPES]
        for part in parts[1::2]:
            part[:] = 0
        return np.concatenate([part.ravel() for part in parts])

    def parts(self, model):
        found, begin = [], 0
        for shape in self.SHAPES:
            end = begin + int(np.prod(shape))
            found.append(model[begin:end].reshape(shape))
            begin = end
        return found

    def accuracy(self, model):
        first, first_bias, second, second_bias = self.parts(model)
        hidden = np.maximum(self.test @ first + first_bias, 0)
        return float(np.mean((hidden @ second + second_bias).argmax(axis=1) == self.test_labels))

    def gradient(self, model, rank):
        """Return the gradient of the cross-entropy on a rank's next batch."""
        chosen = self.draws[rank].integers(0, len(self.train), BATCH)
        inputs, labels = self.train[chosen], self.train_labels[chosen]
        first, first_bias, second, second_bias = self.parts(model)
        hidden = np.maximum(inputs @ first + first_bias, 0)
        scores = hidden @ second + second_bias
        errors = np.exp(scores - scores.max(axis=1, keepdims=True))
        errors /= errors.sum(axis=1, keepdims=True)
        errors[np.arange(BATCH), labels] -= 1
        errors /= BATCH
        back = (errors @ second.T) * (hidden > 0)
        parts = (inputs.T @ back, back.sum(axis=0), hidden.T @ errors, errors.sum(axis=0))
        return np.concatenate([part.ravel() for part in parts])


def train(groups, times, weights, rate, arguments, seed):
    """Train in the order of the groups; return the time to the accuracy, or None, and counts.

    Returns:
        The seconds; the steps of all ranks until then; the share of groups of several ranks in
        which an older model weighed more than one of the newest.
    """
    task = Digits(seed)
    initial = task.first_model(seed)
    models = np.tile(initial, (RANKS, 1))
    speeds = np.zeros_like(models)
    iterations = np.zeros(RANKS, int)
    made = reached = several = older = 0
    begun = None
    for group, time in zip(groups, times):
        members = list(group)
        for rank in members:
            speeds[rank] = MOMENTUM * speeds[rank] + task.gradient(models[rank], rank)
            models[rank] -= rate * speeds[rank]
            iterations[rank] += 1
        shares, left = np.full(len(members), 1 / len(members)), 0.0
        own = iterations[members]
        if weights is not None:
            shares, left = dynamic_weights(own.tolist(), arguments.alpha, **weights)
        several += len(members) > 1
        newest = own == own.max()
        older += not newest.all() and shares[~newest].max() > shares[newest].min() * (1 + 1e-9)
        models[members] = shares @ models[members] + left * initial
        iterations[members] = own.max()
        if made // RANKS != (made + len(members)) // RANKS:
            if task.accuracy(models.mean(axis=0)) >= arguments.accuracy:
                begun = begun or (time, made + len(members))
                reached += 1
                if reached == IN_A_ROW:
                    return *begun, older / max(several, 1)
            else:
                begun, reached = None, 0
        made += len(members)
    return None, None, older / max(several, 1)


def measure(plans, weights, rate, arguments):
    """Return the results of all seeds; medians are None if one did not reach the accuracy."""
    runs = [train(*plan, weights, rate, arguments, seed) for seed, plan in enumerate(plans)]
    seconds, made, older = (list(each) for each in zip(*runs))
    ended = None not in seconds
    return {
        "seconds": seconds,
        "median_seconds": median(seconds) if ended else None,
        "median_steps": median(made) if ended else None,
        "older_weighs_more": median(older),
    }


def in_a_line(found):
    seconds = " ".join("–" if each is None else f"{each:.1f}" for each in found["seconds"])
    medians = ""
    if found["median_seconds"] is not None:
        medians = f"{found['median_seconds']:8.1f}{found['median_steps']:7.0f}"
    return f"{seconds:<40}{medians:<15}{found['older_weighs_more']:7.1%}"


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--seconds", type=float, default=300.0)
    arguments.add_argument("--accuracy", type=float, default=0.95)
    arguments.add_argument("--learning-rates", type=float, nargs="+", default=[0.02, 0.05])
    arguments.add_argument("--alpha", type=float, default=0.5)
    arguments = arguments.parse_args()
    results = {}
    print(
        f"{'':<20}{'P':>4}  {'':<26}{'rate':<6}{'seconds':<40}{'median':>8}{'steps':>7}{'older':>7}"
    )
    for case, slow in CASES.items():
        for group_size in (RANKS, *GROUP_SIZES):
            plans = [
                schedule(group_size, slow, arguments.seconds, seed)
                for seed in range(arguments.seeds)
            ]
            for name in WEIGHTS if group_size < RANKS else ("constant",):
                for rate in arguments.learning_rates:
                    found = measure(plans, WEIGHTS[name], rate, arguments)
                    results[f"{case}, P' = {group_size}, {name}, rate {rate}"] = found
                    print(
                        f"{case:<20}{group_size:>4}  {name:<26}{rate:<6}{in_a_line(found)}",
                        flush=True,
                    )
    report(arguments, "partial-reduce-weights", 1, results)


if __name__ == "__main__":
    main()
