#!/bin/bash
# Remove from this node what a killed run of this Slurm job left in shared memory. A job that is
# requeued keeps its number, by which MPICH names its segments, and would die in MPI_Init of an old
# one ("Message truncated"). train-*.sbatch run it on every node of a job that has been requeued.
#
# The name has the FNV-1a hash of "job.step", as MPICH 5.0 makes it under pmi2. Other jobs' segments
# are left alone: a process that uses one may not be visible from here.
set -euo pipefail

segment_of() { # job.step
    local hash=$((16#811c9dc5)) code i
    for ((i = 0; i < ${#1}; i++)); do
        printf -v code %d "'${1:i:1}"
        hash=$((((hash ^ code) * 16#01000193) & 16#ffffffff))
    done
    printf 'mpich_shm_%x' "$hash"
}

for ((step = 0; step <= SLURM_STEP_ID + 1; step++)); do
    for segment in /dev/shm/"$(segment_of "$SLURM_JOB_ID.$step")"_*; do
        if [ -O "$segment" ]; then
            rm -f "$segment"
            echo "removed $segment, which a killed run of job $SLURM_JOB_ID left on $SLURMD_NODENAME"
        fi
    done
done
