#!/bin/bash
# Written by lockstep submit.
#SBATCH --job-name=train
#SBATCH --time=90             # 1 h 30 min
#SBATCH --chdir=/home/ada/train
#SBATCH --output=logs/%j.out  # the output of each rank is also in %j/
#SBATCH --requeue             # if the exit code is 75
#SBATCH --open-mode=append    # a requeued job appends to the file

set -u
job=$SLURM_JOB_ID
logs=logs/$job${SLURM_RESTART_COUNT:+.$SLURM_RESTART_COUNT}

ended=no
/opt/lockstep/bin/lockstep run --output="$logs" -- \
  ./train &
ranks=$!

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
