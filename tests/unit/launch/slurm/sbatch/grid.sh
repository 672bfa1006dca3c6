#!/bin/bash
# Written by lockstep submit.
#SBATCH --job-name=python3
#SBATCH --nodes=2
#SBATCH --time=30                # 30 min
#SBATCH --array=0-3              # one task for each line of the grid below
#SBATCH --chdir=/home/ada/train
#SBATCH --output=logs/%A_%a.out  # the output of each rank is also in %A_%a/
#SBATCH --requeue                # if the exit code is 75
#SBATCH --open-mode=append       # a requeued job appends to the file
#SBATCH --signal=B:USR1@120      # to this shell, 2 min before the limit
#SBATCH --mail-user=ada@example.org
#SBATCH --mail-type=END,FAIL,REQUEUE

# --before: the job ends if one of them fails.
{ module load cuda/12
} || exit
{ source 'my env/bin/activate'
} || exit

set -u
job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
logs=logs/$job${SLURM_RESTART_COUNT:+.$SLURM_RESTART_COUNT}

case $SLURM_ARRAY_TASK_ID in
  0) grid=(--lr=0.1 '--note=a b') ;;
  1) grid=(--lr=0.1 '--note=$c') ;;
  2) grid=(--lr=0.01 '--note=a b') ;;
  3) grid=(--lr=0.01 '--note=$c') ;;
esac
echo "$job: ${grid[*]}"

ended=no
/opt/lockstep/bin/lockstep run --output="$logs" -- \
  python3 train.py --epochs 3 "${grid[@]}" &
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
