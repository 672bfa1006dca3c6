#!/usr/bin/env bash
# wheel.sh BUILD OUT: builds the wheel for the torch and the CPython of .deps/python, and for those of the extensions in
# the folder LOCKSTEP_EXTENSIONS, the wheel of the C++ SDK, and the source distribution, and puts them into OUT. BUILD
# is the folder of a release build, which then compiles only what is missing. The source distribution is part of the
# wheel, for `lockstep build`; it contains headers and static libraries of the packages that Lockstep needs, in
# third_party. auditwheel gives the wheel the oldest manylinux tag that its symbols allow.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$1 out=$2
python=$PWD/.deps/python/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

third_party=build/third_party
[ -e "$third_party/lockstep.stamp" ] || "$python" scripts/portable_deps.py "$third_party" wheel
mkdir "$work/source"
git ls-files -z --cached --others --exclude-standard | tar -c --null -T - -f - | tar -x -C "$work/source" -f -
cp -R "$third_party" "$work/source/third_party"
(cd "$work/source" && "$python" -c 'import sys, scikit_build_core.build as build; build.build_sdist(sys.argv[1])' \
  "$work/repaired") >"$work/log"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --no-index \
  --config-settings=build-dir="$build" --config-settings=cmake.define.LOCKSTEP_EXTENSIONS="${LOCKSTEP_EXTENSIONS-}" \
  --config-settings=cmake.define.LOCKSTEP_SOURCE="$(echo "$work"/repaired/*.tar.gz)" --wheel-dir "$work/plain" .
# libtorch is that of the installed torch. libstdc++, libgcc_s and zlib are the system's on every manylinux.
PATH="$PWD/.deps/python/bin:$PATH" "$python" -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
  --wheel-dir "$work/repaired" "$work"/plain/*.whl >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
python3 scripts/split_sdk.py "$work"/repaired/*.whl
mkdir -p "$out"
rm -f "$out"/*.whl "$out"/*.tar.gz
mv "$work"/repaired/* "$out/"
ls -l "$out"
