#!/bin/bash
# Written by lockstep submit.
#SBATCH --job-name=train
#SBATCH --chdir=/home/ada/train
#SBATCH --output=logs/%j.out  # what each rank prints is in %j/ as well
#SBATCH --no-requeue

set -u
job=$SLURM_JOB_ID
logs=logs/$job

exec /opt/lockstep/bin/lockstep run --output="$logs" -- \
  ./train
