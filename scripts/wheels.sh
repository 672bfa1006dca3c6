#!/usr/bin/env bash
# wheels.sh OUT [MINOR...]: builds the wheel for every CPython, or 3.N for each N in the variable CPYTHONS, and for
# torch 2.MINOR (default: 2.11 to 2.15), and puts it into OUT. Building needs only the headers and three libraries of
# each torch, which come from PyPI, and the headers of each CPython: those of the interpreters on this machine
# (python3.N, pyenv), else Debian's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -ge 1 ] || { echo "usage: scripts/wheels.sh OUT [MINOR...]" >&2; exit 2; }
out=$1
shift
minors=("${@:-11 12 13 14 15}")
read -r -a minors <<<"${minors[*]}"
python=$PWD/.deps/python/bin/python
extensions=$PWD/build/wheels/extensions
site_packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

say() { printf 'wheels: %s\n' "$*" >&2; }

# Prints the numbers N of the CPythons 3.N for which there is a torch 2.$1.
cpythons_of() {
  local numbers="10 11 12 13 14"
  [ "$1" -lt 15 ] || numbers="11 12 13 14 15"
  echo "${CPYTHONS-$numbers}"
}

# Puts headers and libraries of torch 2.$1 into .deps/torch/2.$1/torch. NCCL's header, which is the same for all of
# them, is that of .deps/python.
get_torch() {
  local minor=$1 folder=.deps/torch/2.$1
  [ ! -e "$folder/lockstep.stamp" ] || return 0
  say "torch 2.$minor: headers and libraries to $folder (0.6 GB)"
  rm -rf "$folder"
  mkdir -p "$folder/download"
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --dest "$folder/download" "torch==2.$minor.*"
  "$python" - "$folder" <<'EOF'
import pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
wanted = ("torch/include/", "torch/lib/libtorch_cpu.so", "torch/lib/libc10.so", "torch/lib/libtorch_python.so")
with zipfile.ZipFile(next(folder.glob("download/*.whl"))) as wheel:
    wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(wanted)])
EOF
  rm -rf "$folder/download"
  touch "$folder/torch/lib/libtorch_cuda.so"  # CMake looks whether there is one; nothing links it
  ln -s "$site_packages/nvidia" "$folder/nvidia"
  touch "$folder/lockstep.stamp"
}

# Prints INCLUDE=SUFFIX of CPython 3.$1 for LOCKSTEP_CPYTHONS, or nothing.
cpython_headers() {
  local number=$1 interpreter
  for interpreter in "$python" "$HOME"/.pyenv/versions/3."$number".*/bin/python3 "/usr/bin/python3.$number"; do
    [ -x "$interpreter" ] || continue
    "$interpreter" - "$number" <<'EOF' && return
import pathlib, sys, sysconfig
include = sysconfig.get_path("include")
if sys.version_info[:2] != (3, int(sys.argv[1])) or not pathlib.Path(include, "Python.h").exists():
    sys.exit(1)
print(include, sysconfig.get_config_var("EXT_SUFFIX"), sep="=")
EOF
  done
  local folder=$PWD/.deps/cpython
  get_debian_headers "$number" "$folder" >&2 || return 0
  echo "$folder/usr/include/python3.$number=.cpython-3$number-x86_64-linux-gnu.so"
}

# Unpacks the headers of CPython 3.$1 of Debian's unstable distribution below $2, without root.
get_debian_headers() {
  local number=$1 folder=$2
  [ ! -e "$folder/usr/include/python3.$number/Python.h" ] || return 0
  mkdir -p "$folder"/state/lists/partial "$folder"/cache/archives/partial
  local keys=/usr/share/keyrings/debian-archive-keyring.gpg
  echo "deb [signed-by=$keys] http://deb.debian.org/debian sid main" >"$folder/sources.list"
  local apt=(-q -o "Dir::State=$folder/state" -o Dir::State::status=/dev/null -o "Dir::Cache=$folder/cache"
    -o "Dir::Etc::sourcelist=$folder/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Debug::NoLocking=1
    -o APT::Sandbox::User=)
  apt-get "${apt[@]}" update && (cd "$folder" && apt-get "${apt[@]}" download "libpython3.$number-dev") &&
    dpkg-deb -x "$folder"/libpython3."$number"-dev_*.deb "$folder" || return 1
  cp "$folder/usr/include/$(uname -m)-linux-gnu/python3.$number/pyconfig.h" "$folder/usr/include/python3.$number/"
  rm -rf "$folder"/*.deb "$folder/usr/lib"
}

rm -rf "$extensions"
for minor in "${minors[@]}"; do
  get_torch "$minor"
  cpythons=()
  for number in $(cpythons_of "$minor"); do
    headers=$(cpython_headers "$number")
    if [ -n "$headers" ]; then cpythons+=("$headers"); else say "CPython 3.$number: no headers; left out"; fi
  done
  build=build/wheels/torch-2.$minor
  cmake -G Ninja -S . -B "$build" --log-level=WARNING -DCMAKE_BUILD_TYPE=Release -DLOCKSTEP_UNITY=ON \
    -DLOCKSTEP_TESTS=OFF -DLOCKSTEP_EXAMPLES=OFF -DTorch_DIR="$PWD/.deps/torch/2.$minor/torch/share/cmake/Torch" \
    -DLOCKSTEP_CPYTHONS="$(IFS=\;; echo "${cpythons[*]}")"
  cmake --build "$build" -j "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}" --target lockstep_python
  cmake --install "$build" --component extension --prefix "$extensions" --strip >/dev/null
done
LOCKSTEP_EXTENSIONS=$extensions scripts/wheel.sh build/release "$out"
