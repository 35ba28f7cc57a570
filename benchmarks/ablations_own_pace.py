"""Parts of WAGMA's own pace left out or changed, in simulated time: what each is good for.

    python benchmarks/ablations_own_pace.py --ranks 8

Group sizes, periods τ from one average over all ranks to the next, the same groups in all versions,
and no groups at all, in the cases of `learning_own_pace.py` with a rank that is 4 times as slow.
"No averages over all" has a period that is longer than the training. The paper's late rule is not
among them: at the own pace it would lose updates, and is refused. Means and medians over the seeds.
"""

from learning_own_pace import CASES, measure

OWN = "wagma:pace=own"
NEVER = 100_000
METHODS = {
    "S = √P, τ = 10": OWN,
    "S = 2": f"{OWN}:group_size=2",
    "S = P": f"{OWN}:group_size={{ranks}}",
    "no groups (S = 1)": f"{OWN}:group_size=1",
    "fixed groups": f"{OWN}:groups=fixed",
    "τ = 5": f"{OWN}:sync_period=5",
    "τ = 40": f"{OWN}:sync_period=40",
    "no averages over all": f"{OWN}:sync_period={NEVER}",
}

if __name__ == "__main__":
    slow = [case for case, (factors, _) in CASES.items() if factors]
    measure(__doc__, "ablations-own-pace", METHODS, slow)
