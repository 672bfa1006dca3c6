#!/usr/bin/env bash
# programs_load_no_cuda.sh BIN: checks that no program in BIN loads a CUDA library that only GPU programs need, and that
# the program lockstep does not load libtorch. Two small CUDA libraries are allowed, libcudart and libcupti, because
# libtorch_cpu.so of a CUDA build requires them.
set -euo pipefail
bin=$1
checked=0

for program in "$bin"/*; do
  [ -f "$program" ] && [ -x "$program" ] || continue
  loads=$(ldd "$program")
  checked=$((checked + 1))
  if found=$(grep -E 'libtorch_cuda|libc10_cuda|libcublas|libcudnn|libnccl' <<<"$loads"); then
    printf '%s loads\n%s\n' "$program" "$found" >&2
    exit 1
  fi
done

if [ "$checked" = 0 ]; then
  echo "no program in $bin" >&2
  exit 1
fi
if found=$(ldd "$bin/lockstep" | grep -E 'libtorch|libc10'); then
  printf 'the program lockstep loads\n%s\n' "$found" >&2
  exit 1
fi
echo "$checked programs load no CUDA"
