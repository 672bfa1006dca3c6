#!/usr/bin/env bash
# gpu_failure.sh EXPECTED COMMAND...: the job's tests pass (a job that has failed ends with another code than 0 all the same), and it says EXPECTED.
set -uo pipefail
expected=$1
shift
said=$("$@" 2>&1)
printf '%s\n' "$said"
if grep -qE '\] [A-Za-z.]+ failed$|  FAILED  ' <<<"$said"; then exit 1; fi
grep -qF '[  PASSED  ] 1 test.' <<<"$said" || { echo "no test has passed"; exit 1; }
[ -z "$expected" ] || grep -qF "$expected" <<<"$said" || { echo "nobody said: $expected"; exit 1; }
