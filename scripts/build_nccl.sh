#!/usr/bin/env bash
# Builds NCCL for one kind of GPU, without the network. From 2.30 on, NCCL serves several ranks on one GPU.
#   scripts/build_nccl.sh SOURCE OUT [SM]
# SOURCE: a folder or .tar.gz of NVIDIA's repository nccl, of 2.30 or later; OUT: the folder that gets libnccl.so.2; SM:
# the GPU's compute capability, such as 90 (default: that of the first GPU). Requires nvcc, make and a C++ compiler;
# takes minutes.
set -euo pipefail

die() { printf 'build_nccl: %s\n' "$*" >&2; exit 1; }

case "${1-}" in -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
[ $# = 2 ] || [ $# = 3 ] || die "expected SOURCE OUT [SM]; --help explains them"
source=$1 out=$2 sm=${3-}
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || die "nvcc is not installed"
if [ -z "$sm" ]; then
  sm=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .) || true
  [ -n "$sm" ] || die "no GPU tells its compute capability; name it, such as 90"
fi
[[ $sm =~ ^[0-9]{2,3}[a-z]?$ ]] || die "SM is '$sm'; expected a number such as 90"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -d "$source" ]; then
  cp -R "$source/." "$work/"
else
  tar -xzf "$source" -C "$work" --strip-components=1 --no-same-owner
fi
version=$work/makefiles/version.mk
[ -f "$version" ] || die "$source is not NCCL: it has no makefiles/version.mk"
major=$(sed -n 's/^NCCL_MAJOR *:= *//p' "$version") minor=$(sed -n 's/^NCCL_MINOR *:= *//p' "$version")
[ "$major" -gt 2 ] || { [ "$major" = 2 ] && [ "$minor" -ge 30 ]; } ||
  die "$source is NCCL $major.$minor; expected 2.30 or later"
make -C "$work" -j "$(nproc)" src.build BUILDDIR="$work/build" CUDA_HOME="$(dirname "$(dirname "$nvcc")")" \
  NVCC_GENCODE="-gencode=arch=compute_$sm,code=sm_$sm" >"$work/log" 2>&1 ||
  { tail -20 "$work/log" >&2; die "make failed; its last lines are above"; }
mkdir -p "$out"
cp -L "$work/build/lib/libnccl.so.2" "$out/"
echo "built NCCL $major.$minor for sm_$sm: $out/libnccl.so.2"
