#!/usr/bin/env bash
# expect_output.sh EXPECTED COMMAND...: checks that the tests of a job pass and that its output contains EXPECTED. The
# exit code of the job is ignored, because a job that reported a failure does not exit with 0. Removes the temporary
# files of the job, which ranks that fail leave behind.
set -uo pipefail
expected=$1
shift
TMPDIR=$(mktemp -d) || exit 1
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
output=$("$@" 2>&1)
printf '%s\n' "$output"
if grep -qE '\] [A-Za-z.]+ failed$|  FAILED  ' <<<"$output"; then exit 1; fi
grep -qF '[  PASSED  ] 1 test.' <<<"$output" || { echo "no test passed"; exit 1; }
[ -z "$expected" ] || grep -qF "$expected" <<<"$output" || { echo "not in the output: $expected"; exit 1; }
