#!/usr/bin/env bash
# programs_hardened.sh BIN: checks that all programs in BIN are position independent, bind all symbols at start-up, and
# have stack protectors.
set -euo pipefail
bin=$1
checked=0

for program in "$bin"/*; do
  [ -f "$program" ] || continue
  header=$(readelf -hW "$program")
  dynamic=$(readelf -dlW "$program")
  grep -q 'Type: *DYN' <<<"$header" || { echo "$program is not position independent" >&2; exit 1; }
  grep -q 'FLAGS.*NOW' <<<"$dynamic" || { echo "$program does not bind symbols at start-up (-z now)" >&2; exit 1; }
  grep -q GNU_RELRO <<<"$dynamic" || { echo "$program has no GNU_RELRO (-z relro)" >&2; exit 1; }
  checked=$((checked + 1))
done

[ "$checked" -gt 0 ] || { echo "no program in $bin" >&2; exit 1; }
symbols=$(nm -D --undefined-only "$bin/lockstep")
grep -q __stack_chk_fail <<<"$symbols" || { echo "the program lockstep has no stack protector" >&2; exit 1; }
echo "$checked programs are hardened"
