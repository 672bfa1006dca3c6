#!/bin/bash
# Written by lockstep submit.
#SBATCH --job-name=my_train
#SBATCH "--chdir=/home/ada/a \"b\" #1"
#SBATCH "--output=my 100%% 'logs'/%j.out"  # what each rank prints is in %j/ as well
#SBATCH --requeue                          # when it ends with code 75
#SBATCH --open-mode=append                 # it then goes on in the same file
#SBATCH --signal=B:USR1@120                # to this shell, 2 min before the limit
#SBATCH "--comment=a \"b\" # c\\d"

set -u
job=$SLURM_JOB_ID
logs='my 100% '\''logs'\''/'$job${SLURM_RESTART_COUNT:+.$SLURM_RESTART_COUNT}

ended=no
'/opt/lock step/lockstep' run --output="$logs" -- \
  './my train' '' 'it'\''s' '$(id)' '`id`' '$HOME' $'a\nb' $'\r\t\'\\' 'grüße' '*' '~' a=b -- '&' &
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
