#!/usr/bin/env bash
# portable.sh TORCH WORK: collects the packages that the build needs as a user without root, hides the installed ones in
# a mount namespace, and then configures Lockstep with LOCKSTEP_DEPS and the libtorch of python3, builds its programs
# and runs a unit test.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source=$(realpath "$here/../..")
torch=$1 work=$2
unset Torch_DIR CMAKE_PREFIX_PATH
mkdir -p "$work"

fail() { echo "portable: $*" >&2; exit 1; }

if [ "${3-}" = hidden ]; then  # inside the namespace
  # An overlay over /usr, without the files of these packages and of what they install with.
  mount -t tmpfs tmpfs /mnt
  mkdir /mnt/upper /mnt/work
  mount -t overlay overlay -o lowerdir=/usr,upperdir=/mnt/upper,workdir=/mnt/work /usr
  read -r -a packages <"$work/deps/lockstep.stamp"
  dpkg-query -L "${packages[@]}" libopenmpi-dev libjpeg-dev googletest | while read -r file; do
    case "$file" in
      */lib/*.so.*) ;;
      /usr/*) [ -d "$file" ] || rm -f "$file" ;;
    esac
  done
  for header in zlib.h jpeglib.h sodium.h xxhash.h gtest/gtest.h gmock/gmock.h CLI/CLI.hpp nlohmann/json.hpp \
    gloo/algorithm.h; do
    [ ! -e "/usr/include/$header" ] || fail "/usr/include/$header is not hidden"
  done
  # Without .deps, so that libtorch is that of python3. Unoptimised: the test is about what is found. With a compiler
  # that links libstdc++ statically, as some wrappers do, the programs must use libtorch's all the same.
  rm -rf "$work/source"
  mkdir "$work/source"
  tar -C "$source" --exclude=./.deps --exclude=./build --exclude=./.git -cf - . | tar -C "$work/source" -xf -
  python=$(realpath "$torch/../../../../bin")
  [ -x "$python/python3" ] || fail "there is no python3 with the libtorch in $torch"
  PATH=$python:$PATH cmake -G Ninja -S "$work/source" -B "$work/build" -DLOCKSTEP_DEPS="$work/deps" \
    -DLOCKSTEP_UNITY=ON -DLOCKSTEP_OPTIMIZATION=-O0 -DCMAKE_EXE_LINKER_FLAGS=-static-libstdc++ | tee "$work/output"
  for found in "in $(realpath "$torch");" "mpi transport: no" "JPEG images: yes"; do
    grep -qF "$found" "$work/output" || fail "cmake did not print: $found"
  done
  cmake --build "$work/build" -j 2 --target lockstep_program lockstep_bench_program lockstep_probe_program unit_base \
    lockstep_data_datasets
  "$work/build/bin/lockstep" --version
  "$work/build/bin/unit_base" --gtest_brief=1
  "$work/build/bin/lockstep" bench step --model cnn-1m --impl lockstep --rounds 1
  exit
fi

[ "$(id -u)" = 0 ] || { echo "SKIPPED: hiding packages in a mount namespace requires root"; exit 77; }
# The user nobody cannot read every checkout, so it gets a copy of the script.
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
mkdir "$home/scripts"
cp "$source/scripts/setup.sh" "$source/scripts/portable_deps.py" "$home/scripts/"
chown -R nobody "$home"
setpriv --reuid=nobody --regid=nogroup --clear-groups env HOME="$home" "$home/scripts/setup.sh" --portable "$home/deps"
size=$(tar -C "$home" -cJf - deps | wc -c)
[ "$size" -le $((20 << 20)) ] || fail "the packed folder has $size bytes; expected at most 20 MiB"
echo "packed: $size bytes"
rm -rf "$work/deps"
cp -R "$home/deps" "$work/deps"
exec unshare --mount "$0" "$torch" "$work" hidden
