#!/bin/bash
# Written by lockstep submit.
#SBATCH --job-name=train
#SBATCH --time=90             # 1 h 30 min
#SBATCH --chdir=/home/ada/train
#SBATCH --output=logs/%j.out  # what each rank prints is in %j/ as well
#SBATCH --no-requeue
#SBATCH --signal=B:USR1@120   # to this shell, 2 min before the limit

set -u
job=$SLURM_JOB_ID
logs=logs/$job

/opt/lockstep/bin/lockstep run --output="$logs" -- \
  ./train &
ranks=$!

# SLURM sends USR1 to this shell alone; it is for the ranks, which save and leave.
trap 'kill -USR1 "$ranks"' USR1
# TERM, when the time is up or somebody cancels the job, SLURM sends to the ranks as well.
trap ':' TERM

# Not wait alone: bash can lose the code of what ends while a signal interrupts it.
while [ "$(jobs -r)" ]; do
  sleep 0.5
done
trap '' USR1 TERM
wait "$ranks"
code=$?
exit $code
