"""The effect of late gradients alone on SGD: why eager-SGD's "solo" is less accurate.

    python benchmarks/late_gradients.py

One process makes the steps that four ranks would make together, with batches of four parts. The
gradients of some parts are applied when they are computed, those of the others some steps later.
The network, the digits and the defaults are those of `wagma train`; accuracy on the test set,
mean ± standard deviation over the seeds. It takes about a minute.
"""

from collections import deque

import torch
from common import parser, report, spread

from wagma import data
from wagma.tasks.classification import accuracy, cross_entropy
from wagma.tasks.digits import batches, small_cnn

PARTS = 4
# Momentum and learning rate; the last two take steps of the same length in the long run.
OPTIMISERS = ((0.0, 0.05), (0.9, 0.05), (0.0, 0.5))
# The number of late parts, and the number of steps by which they are late.
LATE = ((0, 0), (3, 1), (4, 1), (4, 2))


def train(digits, seed, arguments, momentum, lr, parts_late, delay):
    """Return the accuracy after the steps."""
    whole = PARTS * arguments.batch_size
    drawn, (test,) = batches(*digits, "iid", None, 0, 1, whole, seed)
    torch.manual_seed(seed)
    model = small_cnn()
    parameters = list(model.parameters())
    sgd = torch.optim.SGD(parameters, lr=lr, momentum=momentum)

    waiting = deque()
    for _ in range(arguments.steps):
        parts = zip(*(tensor.chunk(PARTS) for tensor in next(drawn)))
        losses = [cross_entropy(model, part) / PARTS for part in parts]
        computed = [torch.autograd.grad(loss, parameters) for loss in losses]
        waiting.append(computed[:parts_late])
        due = waiting.popleft() if len(waiting) > delay else []
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.zeros_like(parameter)
            for each in [*computed[parts_late:], *due]:
                parameter.grad += each[i]
        sgd.step()
    with torch.no_grad():
        return accuracy(model, test)["accuracy"]


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=150)
    arguments.add_argument("--batch-size", type=int, default=32, help="of each part")
    arguments = arguments.parse_args()
    torch.set_num_threads(1)
    digits = data.load_digits()
    results = {}
    print(f"# accuracy in %, {arguments.steps} steps, {arguments.seeds} seeds")
    print(
        f"{'late, by steps':28}"
        + "".join(f"momentum {m:g}, lr {lr:g}".rjust(22) for m, lr in OPTIMISERS)
    )
    for parts_late, delay in LATE:
        name = f"{parts_late} of {PARTS} parts, by {delay}" if delay else "none"
        line = f"{name:28}"
        for momentum, lr in OPTIMISERS:
            found = [
                train(digits, seed, arguments, momentum, lr, parts_late, delay)
                for seed in range(arguments.seeds)
            ]
            results.setdefault(name, {})[f"momentum {momentum:g}, lr {lr:g}"] = found
            line += spread([100 * share for share in found], 1).rjust(22)
        print(line, flush=True)
    report(arguments, "late-gradients", 1, results)


if __name__ == "__main__":
    main()
