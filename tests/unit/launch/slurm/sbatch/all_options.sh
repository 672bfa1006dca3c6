#!/bin/bash
# Written by lockstep submit.
#SBATCH --job-name=gpt
#SBATCH --nodes=2-4
#SBATCH --gpus-per-node=a100:4
#SBATCH --ntasks-per-node=4                # ranks
#SBATCH --cpus-per-task=8                  # cores of a rank
#SBATCH --mem=200G                         # of each node
#SBATCH --time=1-12                        # 1 d 12 h
#SBATCH --partition=gpu
#SBATCH --account=physics
#SBATCH --chdir=/home/ada/train
#SBATCH --output=/scratch/ada/logs/%j.out  # what each rank prints is in %j/ as well
#SBATCH --requeue                          # when it ends with code 75
#SBATCH --open-mode=append                 # it then goes on in the same file
#SBATCH --signal=B:USR1@600                # to this shell, 10 min before the limit
#SBATCH --qos=high
#SBATCH --constraint nvlink
#SBATCH --exclusive

set -u
job=$SLURM_JOB_ID
logs=/scratch/ada/logs/$job${SLURM_RESTART_COUNT:+.$SLURM_RESTART_COUNT}

ended=no
/opt/lockstep/bin/lockstep run --output="$logs" --hang-timeout=900 -- \
  ./train --lr 0.1 &
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
