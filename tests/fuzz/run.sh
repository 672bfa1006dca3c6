#!/usr/bin/env bash
# run.sh FOLDER NAME SECONDS: runs the fuzzer NAME, built in FOLDER, on the corpus in this directory and on mutations of
# it. Exits with 77 if the fuzzer is not built. An input that takes more than five seconds of wall time (other processes
# may use the core) or more than 512 MiB of memory counts as a failure. Failing inputs are kept in FOLDER/found.
set -euo pipefail
folder=$1 name=$2 seconds=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=$folder/${name}_fuzz
[ -x "$program" ] || { echo "SKIPPED: $program is not built (Debian: clang-14, libfuzzer-14-dev)"; exit 77; }
corpus=$(mktemp -d)
trap 'rm -rf "$corpus"' EXIT
mkdir -p "$folder/found"
options=(-max_total_time="$seconds" -timeout=5 -rss_limit_mb=512 -malloc_limit_mb=256 -max_len=8192 -print_final_stats=1
  -artifact_prefix="$folder/found/$name.")
[ ! -e "$here/$name.dict" ] || options+=(-dict="$here/$name.dict")
[ ! -d "$here/corpus/$name" ] || cp "$here/corpus/$name/"* "$corpus/"
# libFuzzer itself exits with 77 on a failure, which would mean "skipped" here.
"$program" "${options[@]}" "$corpus" 2>&1 | tail -n 25 || exit 1
