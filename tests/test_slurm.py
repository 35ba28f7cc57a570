"""The scripts for Slurm: what they do without it."""

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "slurm"
# MPICH's name for the segments of step 0 of job 2, as seen under Slurm 22.05.
SEGMENT = "mpich_shm_281e0ec3"


@pytest.mark.parametrize("name", ["train-cpu.sbatch", "train-gpu.sbatch"])
def test_the_scripts_are_shell_and_ask_for_a_signal_before_the_end(name):
    subprocess.run(["bash", "-n", SCRIPTS / name], check=True)
    assert "#SBATCH --signal=TERM@60\n" in (SCRIPTS / name).read_text()


def test_the_script_for_gpus_trains_there():
    text = (SCRIPTS / "train-gpu.sbatch").read_text()
    assert '.venv/bin/wagma train --device cuda --name "$run" ' in text
    # A rank per device, each of which sees the others'.
    numbers = [
        re.findall(rf"^#SBATCH --{option}=(\d+)$", text, re.MULTILINE)
        for option in ("ntasks-per-node", "gpus-per-node")
    ]
    assert len(numbers[0]) == 1 and numbers[0] == numbers[1]
    assert "#SBATCH --gpus-per-task" not in text
    assert "Not yet tested under Slurm with GPUs" in text
    assert "\nexport CUDA_DEVICE_MAX_CONNECTIONS=" in text.partition("srun --mpi")[0]


def test_only_the_job_s_own_segments_are_removed(tmp_path):
    mine = [tmp_path / f"{SEGMENT}_{number}" for number in range(2)]
    others = [tmp_path / name for name in ("mpich_shm_c141a9dc_0", f"{SEGMENT}0_0", "other")]
    for path in [*mine, *others]:
        path.touch()
    script = (SCRIPTS / "remove-stale-memory.sh").read_text()
    assert "/dev/shm/" in script
    variables = {"SLURM_JOB_ID": "2", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n1"}
    ended = subprocess.run(
        ["bash", "-c", script.replace("/dev/shm/", f"{tmp_path}/")],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not any(path.exists() for path in mine)
    assert all(path.exists() for path in others)
    expected = [f"removed {path}, which a killed run of job 2 left on n1" for path in mine]
    assert ended.stdout.splitlines() == expected


# Requeueing: what the scripts call, with stand-ins for Slurm's commands.


def run_script(folder, name, statuses, scontrol=0, **more):
    """Run a script in a folder, with an `srun` of these statuses; return what was called.

    Args:
        more: variables that Slurm sets.
    """
    (folder / ".venv/bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv/bin/wagma").touch(mode=0o755)
    programs = {"srun": statuses, "scontrol": scontrol, "sbatch": 0}
    commands = folder / "commands"
    commands.mkdir()
    for program, status in programs.items():
        if status is not None:
            path = commands / program
            path.write_text(
                f'#!/bin/bash\necho "{program} $* WAGMA_RUN=$WAGMA_RUN" >> calls\nexit {status}\n'
            )
            path.chmod(0o755)
    variables = {
        "PATH": f"{commands}:/usr/bin:/bin",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "12",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_NNODES": "1",
        "WAGMA_RUN": "",
        **more,
    }
    ended = subprocess.run(
        ["bash", SCRIPTS / name, "--steps", "9"], env=variables, capture_output=True, text=True
    )
    return ended.returncode, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("name", ["train-cpu.sbatch", "train-gpu.sbatch"])
@pytest.mark.parametrize(("status", "scontrol"), [(0, 0), (85, 0), (85, 1), (85, None), (2, 0)])
def test_a_job_that_can_go_on_is_requeued(tmp_path, name, status, scontrol):
    """By scontrol, or else, as in a container, by a job that depends on it and has its name."""
    returned, calls = run_script(tmp_path, name, status, scontrol)
    assert returned == status
    assert "wagma train" in calls[0]
    assert "--name job-12 --checkpoint-every 10m --resume latest --steps 9" in calls[0]
    requeue = ["scontrol requeue 12 WAGMA_RUN="] if scontrol is not None else []
    depend = f"sbatch --dependency=afterany:12 slurm/{name} --steps 9 WAGMA_RUN=job-12"
    expected = [*requeue, *([depend] if scontrol != 0 else [])] if status == 85 else []
    assert calls[1:] == expected


@pytest.mark.parametrize("name", ["train-cpu.sbatch", "train-gpu.sbatch"])
def test_a_job_of_an_array_is_requeued_without_the_others(tmp_path, name):
    """Its own number may be the array's."""
    variables = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    _, calls = run_script(tmp_path, name, 85, scontrol=1, **variables)
    assert "--name job-12_3 " in calls[0]
    assert calls[1] == "scontrol requeue 12_3 WAGMA_RUN="
    assert calls[2].startswith("sbatch --dependency=afterany:12_3 ")
    assert calls[2].endswith("WAGMA_RUN=job-12_3")
