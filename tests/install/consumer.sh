#!/usr/bin/env bash
# consumer.sh BUILD WORK: installs the build in BUILD below WORK, then builds and runs a project that finds it there.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
build=$1 work=$2
prefix=$work/prefix
unset Torch_DIR CMAKE_PREFIX_PATH

fail() { echo "consumer: $*" >&2; exit 1; }

mkdir -p "$work"
rm -rf "$prefix"
cmake --install "$build" --prefix "$prefix" >"$work/installed"

cmake --fresh -G Ninja -S "$here/consumer" -B "$work/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release
cmake --build "$work/build" -j 1

"$work/build/consumer" | tee "$work/alone"
grep -q 'weights of rank 0 of 1: ' "$work/alone" || fail "the program alone did not report its weights"
"$prefix/bin/lockstep" run -n 2 "$work/build/consumer" | tee "$work/two"
[ "$(grep -c 'weights of rank [01] of 2: ' "$work/two")" = 2 ] || fail "two ranks did not report their weights"
[ "$(sed -n 's/.* of 2: //p' "$work/two" | sort -u | wc -l)" = 1 ] || fail "the ranks' weights differ"

[ "$("$work/build/names")" = "names: as expected" ] || fail "the program names did not call its own functions"
if cmake --build "$work/build" --target both_directives >"$work/ambiguous" 2>&1; then
  fail "using namespace lockstep and torch together compiled; docs/how-to/from-libtorch.md says that it does not"
fi
grep -q "‘nn’ is ambiguous\|'nn' is ambiguous" "$work/ambiguous" || fail "unexpected error: $(cat "$work/ambiguous")"

# find_package(Torch) beside Lockstep. That of a CUDA build of libtorch requires nvcc.
torch=$(sed -n 's/^ *set(LOCKSTEP_TORCH_HINT "\(\/.*\)")$/\1/p' "$prefix"/lib*/cmake/Lockstep/LockstepConfig.cmake)
if [ ! -e "$torch/lib/libtorch_cuda.so" ] || command -v nvcc >/dev/null; then
  cmake -B "$work/build" -S "$here/consumer" -DWITH_TORCH_PACKAGE=ON -DTorch_DIR="$torch/share/cmake/Torch"
  cmake --build "$work/build" -j 1 --target with_torch_package
  "$work/build/with_torch_package" | grep -q 'weights of rank 0 of 1: ' || fail "with find_package(Torch): no weights"
else
  echo "not tested: find_package(Torch) of $torch, which requires nvcc"
fi

# A libtorch of another version is rejected with an error that names both versions.
minor=12
if grep -q 'built with libtorch 2\.12\.' "$prefix"/lib*/cmake/Lockstep/LockstepConfig.cmake; then minor=13; fi
other=$work/other
mkdir -p "$other/include/ATen/core" "$other/include/torch/headeronly" "$other/lib"
touch "$other/include/ATen/core/Tensor.h" "$other/lib/libtorch_cpu.so"
printf '#define TORCH_VERSION_%s\n' 'MAJOR 2' "MINOR $minor" 'PATCH 9' >"$other/include/torch/headeronly/version.h"
if cmake --fresh -G Ninja -S "$here/consumer" -B "$work/refused" -DCMAKE_PREFIX_PATH="$prefix;$other" \
  >"$work/refusal" 2>&1; then
  fail "a project with another libtorch was configured"
fi
tr -s '[:space:]' ' ' <"$work/refusal" | grep -F "libtorch in $other is 2.$minor.9" >/dev/null ||
  fail "the refusal does not name libtorch 2.$minor.9: $(cat "$work/refusal")"

# The benchmark program finds its libtorch and its baselines.
installed=$("$prefix/bin/lockstep" bench all-reduce -n 2 --size 4K --rounds 1 --impl lockstep,gloo --json) ||
  fail "the installed lockstep bench failed"
[ "$(grep -c '"what":"all_reduce"' <<<"$installed")" = 2 ] || fail "the installed lockstep bench printed: $installed"
for file in mpi_all_reduce.c python_step.py models.py; do
  [ -e "$prefix/share/lockstep/bench/baselines/$file" ] || fail "the baseline $file was not installed"
done

# bash finds the completion of lockstep.
bash -c 'source "$1/share/bash-completion/completions/lockstep" && complete -p lockstep' bash "$prefix" >/dev/null ||
  fail "the completion was not installed"
[ -f "$prefix/share/man/man1/lockstep.1" ] || fail "the man page was not installed"
