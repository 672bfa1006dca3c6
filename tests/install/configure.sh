#!/usr/bin/env bash
# configure.sh SITUATION TORCH WORK: configures Lockstep in one situation, then builds and runs a probe.
#
#   cuda_with_toolkit     CUDA build of libtorch, with nvcc (skipped with exit code 77 if it is not installed)
#   cuda_without_toolkit  CUDA build of libtorch, without nvcc
#   cpu_only              libtorch without CUDA: no code for CUDA and NCCL is compiled
#   no_optional           no headers of Gloo and libjpeg-turbo: cmake reports it, and builds without JPEG and Gloo's
#                         benchmarks
#   wrong_torch_dir       wrong Torch_DIR: an error that names it, instead of using another libtorch
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source=$(realpath "$here/../..")
situation=$1 torch=$2 work=$3
mkdir -p "$work"
unset Torch_DIR CMAKE_PREFIX_PATH CUDACXX CUDA_HOME CUDA_PATH

fail() { echo "$situation: $*" >&2; exit 1; }
skip() { echo "SKIPPED: $*"; exit 77; }

# configure [OPTION...]: runs cmake and also writes its output to $work/output.
configure() {
  cmake --fresh -G Ninja -S "$source" -B "$work/build" -DLOCKSTEP_TESTS=OFF -DLOCKSTEP_EXAMPLES=OFF \
    -DCMAKE_PROJECT_Lockstep_INCLUDE="$here/probe.cmake" "$@" 2>&1 | tee "$work/output"
}

# has_words LIBRARY WORD: whether the library contains the word.
has_words() { grep -qa -- "$2" "$work/build/lib$1.a"; }

# The modules for GPUs need neither a toolkit nor a GPU; without CUDA in libtorch they contain only stubs.
build_gpu_modules() { cmake --build "$work/build" -j 1 --target lockstep_comm_gpu lockstep_comm_nccl; }

# expect TEXT: fails unless cmake printed TEXT. cmake wraps the lines of its messages.
expect() { tr -s '[:space:]' ' ' <"$work/output" | grep -F -- "$1" >/dev/null || fail "cmake did not print: $1"; }

run_probe() {
  cmake --build "$work/build" -j 1 --target torch_probe
  "$work/build/bin/torch_probe"
}

# Makes a libtorch without CUDA: a directory of links to all files of libtorch except those for CUDA. The
# libtorch_cpu.so of a CUDA build finds libcudart and libcupti beside the real one.
make_cpu_only() {
  rm -rf "$work/site"
  mkdir -p "$work/site/torch/lib" "$work/site/torch/share/cmake"
  ln -s "$torch/include" "$work/site/torch/include"
  ln -s "$torch/share/cmake/Torch" "$work/site/torch/share/cmake/Torch"
  [ ! -e "$torch/../nvidia" ] || ln -s "$torch/../nvidia" "$work/site/nvidia"
  local file
  for file in "$torch"/lib/*; do
    case "$(basename "$file")" in
      *cuda* | *nvrtc* | *nvshmem*) ;;
      *) ln -s "$file" "$work/site/torch/lib/" ;;
    esac
  done
}

case "$situation" in
  cuda_with_toolkit)
    [ -e "$torch/lib/libtorch_cuda.so" ] || skip "$torch is not a CUDA build"
    PATH=$PATH:/usr/local/cuda/bin
    command -v nvcc >/dev/null || skip "nvcc is not installed"
    configure -DTorch_DIR="$torch/share/cmake/Torch"
    expect "(cuda) in $torch"
    run_probe
    ;;
  cuda_without_toolkit)
    [ -e "$torch/lib/libtorch_cuda.so" ] || skip "$torch is not a CUDA build"
    mkdir -p "$work/hidden"
    rm -f "$work/called"
    printf '#!/bin/sh\ntouch "%s"\nexit 1\n' "$work/called" >"$work/hidden/nvcc"
    chmod +x "$work/hidden/nvcc"
    export PATH=$work/hidden:$PATH CUDACXX=/nonexistent/nvcc CUDAToolkit_ROOT=/nonexistent
    configure -DTorch_DIR="$torch/share/cmake/Torch"
    expect "(cuda) in $torch"
    run_probe
    expect "nccl: yes"
    build_gpu_modules
    has_words lockstep_comm_nccl ncclAllReduce || fail "NCCL was left out"
    [ ! -e "$work/called" ] || fail "nvcc was called"
    if grep -E 'CMAKE_CUDA_COMPILER|/usr/local/cuda' "$work/build/CMakeCache.txt"; then
      fail "the build found a CUDA toolkit"
    fi
    ;;
  cpu_only)
    make_cpu_only
    configure -DCMAKE_PREFIX_PATH="$work/site/torch"
    expect "(cpu) in $work/site/torch"
    run_probe
    expect "nccl: no"
    build_gpu_modules
    for word in ncclAllReduce cudaGetDeviceCount libtorch_cuda; do
      if has_words lockstep_comm_nccl "$word" || has_words lockstep_comm_gpu "$word"; then
        fail "a build without CUDA contains $word"
      fi
    done
    ;;
  no_optional)
    configure -DTorch_DIR="$torch/share/cmake/Torch" -DCMAKE_IGNORE_PATH="/usr/include;/usr/local/include" \
      -DZLIB_INCLUDE_DIR=/usr/include -DXXHASH_INCLUDE_DIR=/usr/include \
      -DLOCKSTEP_SODIUM_INCLUDE=/usr/include -DLOCKSTEP_CLI11_INCLUDE=/usr/include \
      -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON
    expect "package libgloo-dev"
    expect "package libjpeg-dev"
    expect "JPEG images: no"
    # The objects alone: the modules that they use compile in the same way as elsewhere.
    cmake --build "$work/build" -j 1 --target lockstep_data_jpeg \
      bench/CMakeFiles/lockstep_bench_ranks.dir/ranks/no_c10d_baselines.cc.o
    ;;
  wrong_torch_dir)
    if configure -DTorch_DIR="$work/nowhere/share/cmake/Torch"; then fail "cmake used another libtorch"; fi
    expect "libtorch was not found"
    expect "$work/nowhere"
    ;;
  *) fail "unknown situation" ;;
esac
