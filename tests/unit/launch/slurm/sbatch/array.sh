#!/bin/bash
# Written by lockstep submit.
#SBATCH --job-name=python3
#SBATCH --ntasks=8               # ranks in all
#SBATCH --time=30                # 30 min
#SBATCH --array=0-15%4
#SBATCH --chdir=/home/ada/train
#SBATCH --output=logs/%A_%a.out  # what each rank prints is in %A_%a/ as well
#SBATCH --requeue                # when it ends with code 75
#SBATCH --open-mode=append       # it then goes on in the same file
#SBATCH --signal=B:USR1@120      # to this shell, 2 min before the limit

set -u
job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
logs=logs/$job${SLURM_RESTART_COUNT:+.$SLURM_RESTART_COUNT}

ended=no
/opt/lockstep/bin/lockstep run --output="$logs" -- \
  python3 train.py --epochs 3 &
ranks=$!

# SLURM sends USR1 to this shell alone; it is for the ranks, which save and leave.
trap 'kill -USR1 "$ranks"' USR1
# TERM, when the time is up or somebody cancels the job, SLURM sends to the ranks as well.
trap 'ended=yes' TERM

# Not wait alone: bash can lose the code of what ends while a signal interrupts it.
while [ "$(jobs -r)" ]; do
  sleep 0.5
done
trap '' USR1 TERM
wait "$ranks"
code=$?

# 75: all ranks have left together, and are to be started again.
if [ $code -eq 75 ] && [ $ended = no ]; then
  echo "$job: requeued, because its ranks ended with code 75" >&2
  scontrol requeue "$job"
fi
exit $code
