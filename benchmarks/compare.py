"""Compare two results of one benchmark and name the ratios that have regressed.

    python benchmarks/compare.py OLD.json NEW.json

Only ratios are compared, each measured within one run: ours to MPI_Allreduce, one rank late to none
late. Absolute times of different runs say more about the machine than about the code. Smaller
ratios are better. A ratio has regressed if its median has grown by more than the tolerance and its
quartiles lie above the old ones; if they overlap, noise may be the cause, and it is called unclear.

Exit status: 0 if nothing has regressed, 1 if something has, 2 if the files cannot be compared.
"""

import argparse
import json
import math
import sys
from pathlib import Path

QUARTILES = ("low", "median", "high")


def load(path):
    """Return a result's contents; raise ValueError if it cannot be compared."""
    try:
        contents = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"{path} is not JSON") from None
    try:
        ratios = {
            name: {key: float(values[key]) for key in QUARTILES}
            for name, values in contents["ratios"].items()
        }
        what = {key: contents[key] for key in ("benchmark", "ranks", "machine")}
        if not all(0 <= q["low"] <= q["median"] <= q["high"] < math.inf for q in ratios.values()):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is no result of these benchmarks") from None
    if not ratios:
        raise ValueError(f"{path} has no ratios: {what['benchmark']} measures none")
    return what, ratios


def judge(old, new, tolerance):
    """Return the verdict on one ratio, from its old and new quartiles."""
    if new["median"] <= tolerance * old["median"]:
        return ""
    return "unclear" if new["low"] <= old["high"] else "REGRESSED"


def compare(old_path, new_path, tolerance):
    """Print the table and return the names of the ratios that have regressed."""
    (old_what, old), (new_what, new) = load(old_path), load(new_path)
    for key in ("benchmark", "ranks"):
        if old_what[key] != new_what[key]:
            raise ValueError(
                f"{key} differ: {old_what[key]} in {old_path}, {new_what[key]} in {new_path}"
            )
    common = [name for name in old if name in new]
    if not common:
        raise ValueError(f"{old_path} and {new_path} have no ratio in common")
    print(f"# {old_what['benchmark']}, {old_what['ranks']} ranks, tolerance {tolerance:g}")
    for key, value in old_what["machine"].items():
        if key != "date" and new_what["machine"].get(key) != value:
            print(f"# {key} differs: {value}, {new_what['machine'].get(key)}")
    width = max(map(len, common))
    print(f"{'# ratio':{width}}{'old':>10}{'new':>10}{'new/old':>10}")
    regressed = []
    for name in common:
        verdict = judge(old[name], new[name], tolerance)
        before, after = old[name]["median"], new[name]["median"]
        growth = after / before if before else math.inf
        print(f"{name:{width}}{before:10.3f}{after:10.3f}{growth:10.2f}  {verdict}".rstrip())
        if verdict == "REGRESSED":
            regressed.append(name)
    for path, names in ((old_path, old.keys() - new), (new_path, new.keys() - old)):
        for name in sorted(names):
            print(f"# only in {path}: {name}")
    return regressed


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", metavar="OLD.json")
    parser.add_argument("new", metavar="NEW.json")
    parser.add_argument(
        "--tolerance", type=float, default=1.25, help="growth that is let pass (default 1.25)"
    )
    arguments = parser.parse_args()
    if not arguments.tolerance >= 1:
        parser.error(f"--tolerance {arguments.tolerance:g}: must be at least 1")
    try:
        regressed = compare(arguments.old, arguments.new, arguments.tolerance)
    except ValueError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    if regressed:
        print(f"regressed: {'; '.join(regressed)}")
    return bool(regressed)


if __name__ == "__main__":
    sys.exit(main())
