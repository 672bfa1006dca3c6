#!/bin/bash
# Written by lockstep submit.
#SBATCH --job-name=python3
#SBATCH --ntasks=8               # total number of ranks
#SBATCH --time=30                # 30 min
#SBATCH --array=0-15%4
#SBATCH --chdir=/home/ada/train
#SBATCH --output=logs/%A_%a.out  # the output of each rank is also in %A_%a/
#SBATCH --requeue                # if the exit code is 75
#SBATCH --open-mode=append       # a requeued job appends to the file
#SBATCH --signal=B:USR1@120      # to this shell, 2 min before the limit

set -u
job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
logs=logs/$job${SLURM_RESTART_COUNT:+.$SLURM_RESTART_COUNT}

ended=no
/opt/lockstep/bin/lockstep run --output="$logs" -- \
  python3 train.py --epochs 3 &
ranks=$!

# SLURM sends USR1 to this shell only: forward it, so that the ranks save and exit.
trap 'kill -USR1 "$ranks"' USR1
# At the time limit and on scancel, SLURM sends TERM to the ranks as well: do not forward it.
trap 'ended=yes' TERM

# Not only wait: bash can lose the exit code if a signal interrupts wait.
while [ "$(jobs -r)" ]; do
  sleep 0.5
done
trap '' USR1 TERM
wait "$ranks"
code=$?

# 75: all ranks have exited together and want to be restarted.
if [ $code -eq 75 ] && [ $ended = no ]; then
  echo "$job: requeued, because its ranks exited with code 75" >&2
  scontrol requeue "$job"
fi
exit $code
