#!/bin/bash
# Written by lockstep submit.
#SBATCH --job-name=train
#SBATCH --chdir=/home/ada/train
#SBATCH --output=logs/%j.out  # the output of each rank is also in %j/
#SBATCH --no-requeue

set -u
job=$SLURM_JOB_ID
logs=logs/$job

exec /opt/lockstep/bin/lockstep run --output="$logs" -- \
  ./train
