#!/bin/sh
# Usage: stop_and_resume.sh COMMAND...
# Runs the command in an empty folder, sends it SIGUSR1 when the files ready.0 and ready.1 exist, and expects exit code
# 75. Then runs it again, and expects that it ends with code 0.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 1
"$@" &
job=$!
while [ ! -e ready.0 ] || [ ! -e ready.1 ]; do
  kill -0 $job || exit 1
  sleep 0.1
done
kill -USR1 $job
wait $job
code=$?
[ $code = 75 ] || { echo "exit code $code; expected 75"; exit 1; }
"$@"
