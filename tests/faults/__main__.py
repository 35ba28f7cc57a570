"""Train with random faults, continue until the end, and compare with trainings without faults.

No checkpoint may be lost or unreadable, every step is recorded once, no process stays, none hangs,
and where runs repeat themselves the model is the same, bit for bit. The MPI is that of the
environment: `make test-openmpi` sets one up for Open MPI, in whose tree build/openmpi this runs as
well, and there ranks also go on without others.

Successive seeds go through all faults, and all of these through all algorithms: a table is complete
after as many runs as `--table` prints.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from launch import ULFM, has_ulfm, mpirun

from wagma.checkpoint import files

from . import job
from .kinds import (
    DAMAGED,
    EVERY,
    HARMLESS,
    KILLED,
    KINDS,
    OTHERS,
    REFUSED,
    STEPS,
    SURVIVED,
    Fault,
    damage,
)

REPEATED = ("allreduce", "wagma:wait=group", "local-sgd:sync_period=4", "d-psgd", "sgp", "hop")
UNREPEATED = ("wagma", "eager-sgd", "ad-psgd", "parameter-server", "partial-reduce", "ripples")
ALGORITHMS = REPEATED + UNREPEATED
SURVIVORS = ("allreduce", "wagma:wait=group", "local-sgd:sync_period=4", "wagma")
# The others may have no part in what they wait for: no call that writes so late, no file to read.
MUST_KILL = {*KILLED} - {"killed while writing", "killed while resuming"}
TIMEOUT = 60  # seconds of a job
ATTEMPTS = 5  # jobs until the training ends


class Failed(Exception):
    """A training did not end as it has to."""


def start(ranks, folder, flags, fault=None, options=()):
    """Run a job in a folder, with options of mpiexec; return its exit status and what it wrote."""
    (folder / "task.py").write_text(job.TASK)
    words = ["train", *flags, "--script", "task.py", "--no-straggler-warnings"]
    words = [job.__file__, json.dumps(fault), *words]
    launched = ranks if ranks > 1 else None
    ended = mpirun(launched, *words, timeout=TIMEOUT, cwd=folder, options=options, forked=True)
    return ended.returncode, str(ended)


def flags_of(algorithm, name):
    """Return the command line of a training."""
    return [
        *("--algorithm", algorithm, "--name", name, "--steps", str(STEPS), "--batch-size", "8"),
        *("--checkpoint-every", str(EVERY), "--checkpoint-keep", "3", "--resume"),
    ]


def play(fault, algorithm, ranks, folder, references):
    """Train with a fault, continue to the end, and raise Failed where anything is wrong."""
    flags = flags_of(algorithm, "run")
    checkpoints = folder / "runs" / "run" / "checkpoints"
    if fault.kind in SURVIVED:
        survive(fault, ranks, folder, flags)
        return
    planted = fault
    if fault.kind == "killed while resuming" or fault.kind not in {**KILLED, **HARMLESS}:
        # First a job that is killed, to have something to resume.
        step = max(fault.step, EVERY + 2)
        start(ranks, folder, flags, Fault("all killed", 0, step, 0, 0.0, 0.0))
        planted = fault if fault.kind in KILLED else None
    if fault.kind in {**DAMAGED, **REFUSED} and len(files.found(checkpoints)) < 2:
        expect(start(ranks, folder, flags), 0, "")  # or there would be none, or none that is good
    if fault.kind in DAMAGED:
        damage(fault, files.found(checkpoints)[0])
    if fault.kind == "other settings":
        expect(start(ranks, folder, [*flags, "--lr", "0.3"]), 2, "was saved with lr = 0.05")
    if fault.kind == "other version":
        manifest = files.found(checkpoints)[0] / files.MANIFEST
        right = files.read_json(manifest)
        files.write_json(manifest, right | {"format": files.FORMAT + 1})
        expect(start(ranks, folder, flags), 2, f"has format {files.FORMAT + 1}")
        files.write_json(manifest, right)
    if fault.kind == "other ranks":
        ranks += 1
    continue_to_the_end(ranks, folder, flags, planted, checkpoints, fault)
    check(fault, algorithm, ranks, folder / "runs" / "run", references)


def survive(fault, ranks, folder, flags):
    """Train with the death of a rank, which the others survive; then go on without a fault."""
    run = folder / "runs" / "run"
    fault = fault._replace(step=min(fault.step, STEPS - 9))  # later nobody might survive it
    expect(start(ranks, folder, [*flags, "--survive"], fault, ULFM), 0, "has died")
    summary = json.loads((run / "summary.json").read_text())
    if summary["steps_of_rank"] != [STEPS] * (ranks - 1):
        raise Failed(f"steps: {summary['steps_of_rank']}")
    newest = files.found(run / "checkpoints")[0]
    if not is_good(newest) or not newest.name.endswith(f"-step-{STEPS}"):
        raise Failed(f"the last checkpoint is {newest}")
    expect(start(ranks, folder, [*flags, "--steps", str(STEPS + 5)]), 0, "continuing from")


def continue_to_the_end(ranks, folder, flags, planted, checkpoints, fault):
    """Start jobs until one ends well; no checkpoint may be lost meanwhile."""
    newest, told = 0, ""
    for _ in range(ATTEMPTS):
        status, told = start(ranks, folder, flags, planted)
        if planted and planted.kind in MUST_KILL and not status:
            raise Failed("nobody was killed")
        planted = None
        # Those of a killed job that wrote when it ended are complete or not there.
        good = [files.number_of(path) for path in files.found(checkpoints) if is_good(path)]
        broken = [path for path in files.found(checkpoints) if not is_good(path)]
        if broken and fault.kind not in DAMAGED:
            raise Failed(f"broken: {broken}\n{told}")
        if max(good, default=0) < newest:
            raise Failed(f"checkpoint {newest} is lost\n{told}")
        newest = max(good, default=0)
        if not status:
            return
    raise Failed(f"no end after {ATTEMPTS} jobs; the last:\n{told}")


def is_good(path):
    """Return whether a checkpoint's files are those of its manifest."""
    try:
        manifest = files.read_json(path / files.MANIFEST)
        files.check(path, manifest, manifest["files"])
    except files.BrokenError:
        return False
    return True


def expect(ended, status, text):
    """Raise Failed unless a job has ended so."""
    if ended[0] != status or text not in ended[1]:
        raise Failed(f"status {ended[0]} instead of {status} with {text!r}\n{ended[1]}")


def check(fault, algorithm, ranks, run, references):
    """Raise Failed unless every step is recorded once, and the model is that without faults."""
    import torch

    first = 0
    if fault.kind == "other ranks":
        resumed = json.loads((run / "config.json").read_text())["resumed"]
        first = resumed[-1]["step"] if resumed else 0
    for rank in range(ranks):
        lines = (run / files.part_name(rank).replace(".pt", ".jsonl")).read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        if steps != list(range(first, STEPS)):
            raise Failed(f"rank {rank} has recorded the steps {steps}")
    if fault.kind in ("nan", "other ranks", "signalled") or algorithm not in REPEATED:
        return
    model = torch.load(run / "model.pt")
    reference = references(algorithm, ranks)
    if not all(torch.equal(model[name], reference[name]) for name in reference):
        raise Failed("the model is another than without the fault")


class References:
    """The models of trainings without faults, each made when it is first needed."""

    def __init__(self, folder):
        self.folder, self.models = folder, {}

    def __call__(self, algorithm, ranks):
        import torch

        key = algorithm, ranks
        if key not in self.models:
            folder = self.folder / f"reference-{len(self.models)}"
            folder.mkdir()
            ended = start(ranks, folder, flags_of(algorithm, "run"))
            expect(ended, 0, "")
            self.models[key] = torch.load(folder / "runs" / "run" / "model.pt")
        return self.models[key]


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="100 by default")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first run; the next has the next"
    )
    parser.add_argument("--ranks", type=int, default=2, help="2 by default")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="only these")
    parser.add_argument("--table", action="store_true", help="print what a whole table has")
    settings = parser.parse_args()
    few = () if settings.ranks > 1 else (*OTHERS, *SURVIVED)
    few += () if has_ulfm() else (*SURVIVED,)
    kinds = [kind for kind in settings.kinds if kind not in few]
    if settings.table:
        print(f"{len(kinds)} faults x {len(ALGORITHMS)} algorithms", *kinds, *ALGORITHMS, sep="\n")
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        references = References(Path(place))
        for seed in range(settings.seed, settings.seed + settings.runs):
            generator = random.Random(seed)
            row, column = seed % len(kinds), seed // len(kinds)
            kind = kinds[row]
            fault = Fault.drawn(generator, settings.ranks, kind)
            those = SURVIVORS if kind in SURVIVED else ALGORITHMS
            algorithm = those[(row + column) % len(those)]
            folder = Path(place) / str(seed)
            folder.mkdir()
            outcome, began = "ok", time.monotonic()
            try:
                play(fault, algorithm, settings.ranks, folder, references)
            except (Failed, AssertionError) as error:
                outcome, failed = f"FAILED: {error}", failed + 1
            shutil.rmtree(folder)
            where = f"rank {fault.rank}, step {fault.step}, call {fault.call}"
            seconds = f"{time.monotonic() - began:.1f} s"
            print(f"seed {seed}: {kind} ({where}), {algorithm}: {outcome}, {seconds}", flush=True)
    print(f"{settings.runs} runs, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
