#!/usr/bin/env bash
# setup_test.sh TORCH: tests scripts/setup.sh. Small programs at the front of PATH imitate a machine that lacks
# software.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
torch=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/clone/scripts" "$work/bin"
cp "$here/../../scripts/setup.sh" "$here/../../scripts/portable_deps.py" "$work/clone/scripts/"
setup=$work/clone/scripts/setup.sh
# The formatters are installed already.
mkdir -p "$work/clone/.deps/lint"
sed -n 's/^LINT_PYTHON=("lint \(.*\)")$/\1/p' "$setup" >"$work/clone/.deps/lint/lockstep.stamp"
unset CMAKE_PREFIX_PATH
export Torch_DIR=$torch/share/cmake/Torch

fail() { echo "$*" >&2; exit 1; }
# play NAME SCRIPT: makes a fake program NAME that logs its arguments and runs SCRIPT.
play() {
  printf '#!/bin/bash\necho "%s $*" >>"%s"\n%s\n' "$1" "$work/calls" "$2" >"$work/bin/$1"
  chmod +x "$work/bin/$1"
}
# run [ARG...]: runs setup.sh with the fake programs; its output is in $work/said, its exit code in $rc.
run() {
  : >"$work/calls"
  rc=0
  PATH="$work/bin:/usr/bin:/bin" "$setup" "$@" >"$work/said" 2>&1 </dev/null || rc=$?
}
said() { grep -qF -- "$1" "$work/said" || fail "setup.sh did not print '$1' but: $(cat "$work/said")"; }
called() { grep -qF -- "$1" "$work/calls" || fail "setup.sh did not call '$1' but: $(cat "$work/calls")"; }

# With everything installed, setup.sh prints nothing and downloads nothing.
play dpkg-query 'shift 2; for package; do echo "$package installed"; done'
play apt-get ''
run
[ "$rc" = 0 ] || fail "with everything installed setup.sh exited with $rc: $(cat "$work/said")"
[ ! -s "$work/said" ] || fail "with everything installed setup.sh printed: $(cat "$work/said")"
if grep -q apt-get "$work/calls"; then fail "with everything installed apt-get was called"; fi
[ ! -e "$work/clone/.deps/python" ] || fail "libtorch was downloaded although Torch_DIR names one"

# A Torch_DIR without libtorch is an error that names it.
Torch_DIR=$work/nowhere run
[ "$rc" = 1 ] || fail "with a wrong Torch_DIR setup.sh exited with $rc"
said "Torch_DIR=$work/nowhere"

# If a package is missing and the user has no rights, setup.sh prints the command to run and exits with 1.
play dpkg-query 'shift 2; for package; do [ "$package" = cmake ] || echo "$package installed"; done'
play id 'echo 1000'
play sudo 'exit 1'
run
[ "$rc" = 1 ] || fail "without rights setup.sh exited with $rc"
said "missing packages: cmake"
said "sudo apt-get install -y --no-install-recommends cmake"
if grep -q apt-get "$work/calls"; then fail "apt-get was called without rights"; fi

# With sudo, setup.sh installs only the missing package.
play sudo '[ "$1" != -n ] || shift
[ "$1" != tee ] || { cat >/dev/null; exit; }
case "$1" in chmod | rm) exit ;; esac
exec "$@"'
run
[ "$rc" = 0 ] || fail "with sudo setup.sh exited with $rc: $(cat "$work/said")"
called "apt-get update -q"
called "apt-get install -y -q --no-install-recommends cmake"

# Packages for test tools are installed only with --test-tools.
play dpkg-query 'shift 2; for package; do [ "$package" = iproute2 ] || echo "$package installed"; done'
run
if grep -q apt-get "$work/calls"; then fail "packages for test tools were installed without --test-tools"; fi
[ ! -e "$work/clone/.deps/tensorboard" ] || fail "packages for test tools were installed from PyPI without --test-tools"
play python3 'mkdir -p "$3/bin"
printf "#!/bin/bash\necho pip \$* >>%q\n" "$(dirname "$0")/../calls" | tee "$3/bin/pip" >"$3/bin/python"
chmod +x "$3/bin/pip" "$3/bin/python"'
run --test-tools
[ "$rc" = 0 ] || fail "--test-tools ended with $rc: $(cat "$work/said")"
called "apt-get install -y -q --no-install-recommends iproute2"
called "python3 -m venv .deps/tensorboard"
called "python3 -m venv .deps/site"

run --test-tool
[ "$rc" = 1 ] || fail "an unknown option ended with $rc"
said "unknown option '--test-tool'; expected --test-tools, --site, --baselines, --torch VERSION [PYTHON] or \
--portable DIR"
run --test-tools --baselines
[ "$rc" = 1 ] || fail "two options ended with $rc"
said "unexpected argument '--baselines'; expected at most one option"

# --portable needs a directory, and deletes none that it has not made. tests/install/portable.sh tests what it collects.
run --portable
[ "$rc" = 1 ] || fail "--portable without a directory ended with $rc"
said "--portable needs a directory"
mkdir "$work/own"
touch "$work/own/file"
mv "$work/bin/python3" "$work/fake_python3"
run --portable "$work/own"
mv "$work/fake_python3" "$work/bin/python3"
[ "$rc" = 1 ] || fail "--portable with a directory of the user's own ended with $rc"
said "$work/own exists and is not a folder that --portable made"
[ -e "$work/own/file" ] || fail "--portable deleted a file of the user's own"

# Baselines from PyPI are installed only with --baselines, each into a directory of its own, and only once.
play dpkg-query 'shift 2; for package; do echo "$package installed"; done'
run
[ ! -e "$work/clone/.deps/baselines" ] || fail "baselines were installed without --baselines"
run --baselines
[ "$rc" = 0 ] || fail "--baselines ended with $rc: $(cat "$work/said")"
called "python3 -m venv .deps/baselines/mpich"
called "--disable-pip-version-check impi-rt==2021.18.1 impi-devel==2021.18.1"
run --baselines
if grep -q pip "$work/calls"; then fail "baselines that are there were installed again"; fi

# With nothing to do, setup.sh takes less than a second on this machine. Three attempts, because other processes may be
# busy.
for _ in 1 2 3; do
  start=$(date +%s%N)
  "$here/../../scripts/setup.sh"
  milliseconds=$((($(date +%s%N) - start) / 1000000))
  [ "$milliseconds" -ge 1000 ] || break
done
[ "$milliseconds" -lt 1000 ] || fail "setup.sh with nothing to do took $milliseconds ms; expected less than 1000"
echo "setup.sh with nothing to do took $milliseconds ms"
