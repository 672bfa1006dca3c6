#!/bin/bash
# Written by lockstep submit.
#SBATCH --job-name=my_train
#SBATCH "--chdir=/home/ada/a \"b\" #1"
#SBATCH "--output=my 100%% 'logs'/%j.out"  # the output of each rank is also in %j/
#SBATCH --requeue                          # if the exit code is 75
#SBATCH --open-mode=append                 # a requeued job appends to the file
#SBATCH --signal=B:USR1@120                # to this shell, 2 min before the limit
#SBATCH "--comment=a \"b\" # c\\d"

set -u
job=$SLURM_JOB_ID
logs='my 100% '\''logs'\''/'$job${SLURM_RESTART_COUNT:+.$SLURM_RESTART_COUNT}

ended=no
'/opt/lock step/lockstep' run --output="$logs" -- \
  './my train' '' 'it'\''s' '$(id)' '`id`' '$HOME' $'a\nb' $'\r\t\'\\' 'grüße' '*' '~' a=b -- '&' &
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
