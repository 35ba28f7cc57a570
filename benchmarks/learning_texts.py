"""A small GPT on ranks with different texts, in simulated time: AdamW's state and corrections.

    python benchmarks/learning_texts.py

8 ranks train the GPT of `unlike_texts.py` by AdamW, with S = 4 and τ = 10 and batches of 8: on four
kinds of text, two ranks each, or on all kinds mixed. All ranks make 400 steps of 0.2 s with 5 % of
jitter; "one slow" lasts as long, and rank 0 takes four times as long for each step. The loss of the
ranks' mean model on held-out text of all kinds, in nats per character, mean ± deviation over the
seeds.
"""

import os
import statistics
from pathlib import Path

from common import markdown, parser, report
from learning import Run, train_all
from learning_shards import BOTH, GROUPS, JITTER, SLOW, STEP

from wagma.simulation import MACHINES, steps

TASK = Path(__file__).with_name("unlike_texts.py")
VARIATES = "correction=control-variates"
METHODS = {
    "Allreduce": "allreduce",
    "local SGD": "local-sgd",
    "AD-PSGD": "ad-psgd",
    "AD-PSGD, both": f"ad-psgd:{BOTH}",
    "WAGMA": f"wagma:{GROUPS}",
    "WAGMA, state": f"wagma:{GROUPS}:average_state",
    "WAGMA, variates": f"wagma:{GROUPS}:{VARIATES}",
    "WAGMA, both": f"wagma:{GROUPS}:{BOTH}",
    "own pace": f"wagma:{GROUPS}:pace=own",
    "own pace, both": f"wagma:{GROUPS}:pace=own:{BOTH}",
}
CASES = {"mixed": 1.0, "different": 1.0, "different, one slow": SLOW}


def run(case, name, seed, arguments):
    """Return a training."""
    count, ranks = arguments.steps, arguments.ranks
    length = {} if CASES[case] == 1 else {"seconds": STEP * count}
    times = steps.log_normal(2 * count if length else count, ranks, STEP, JITTER, seed)
    times[:, 0] *= CASES[case]
    settings = {"task": TASK, "batch_size": 8, "seed": seed, "optimizer": "adamw", "lr": 0.003}
    return Run((case, name, seed), METHODS[name], times, MACHINES["aries"], settings | length)


def table(rows):
    """Return the table of Markdown."""
    return markdown(
        "",
        CASES,
        {
            name: [f"{cell['mean']:.3f} ± {cell['deviation']:.3f}" for cell in row.values()]
            for name, row in rows.items()
        },
    )


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments = arguments.parse_args()
    found = {}
    for case in CASES:
        os.environ["WAGMA_TEXTS"] = "mixed" if case == "mixed" else "different"
        found |= train_all(
            [
                run(case, name, seed, arguments)
                for name in METHODS
                for seed in range(arguments.seeds)
            ]
        )
    rows = {}
    for name in METHODS:
        rows[name] = {}
        for case in CASES:
            losses = [found[case, name, seed]["loss"] for seed in range(arguments.seeds)]
            mean, deviation = statistics.mean(losses), statistics.stdev(losses)
            rows[name][case] = {"mean": mean, "deviation": deviation, "losses": losses}
    print(table(rows))
    report(arguments, "learning-texts", arguments.ranks, rows)


if __name__ == "__main__":
    main()
