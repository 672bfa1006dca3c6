#!/bin/bash
# Written by lockstep submit.
#SBATCH --job-name=train
#SBATCH --time=90             # 1 h 30 min
#SBATCH --chdir=/home/ada/train
#SBATCH --output=logs/%j.out  # the output of each rank is also in %j/
#SBATCH --no-requeue
#SBATCH --signal=B:USR1@120   # to this shell, 2 min before the limit

set -u
job=$SLURM_JOB_ID
logs=logs/$job

/opt/lockstep/bin/lockstep run --output="$logs" -- \
  ./train &
ranks=$!

# SLURM sends USR1 to this shell only: forward it, so that the ranks save and exit.
trap 'kill -USR1 "$ranks"' USR1
# At the time limit and on scancel, SLURM sends TERM to the ranks as well: do not forward it.
trap ':' TERM

# Not only wait: bash can lose the exit code if a signal interrupts wait.
while [ "$(jobs -r)" ]; do
  sleep 0.5
done
trap '' USR1 TERM
wait "$ranks"
code=$?
exit $code
