#!/usr/bin/env bash
# Puts known bugs back, one at a time, and shows that the tests catch each.
#
#   scripts/mutate.sh [PATCH...]      all of tests/mutations/*.patch when none is named
#
# A patch begins with three lines, before its first "diff --git":
#   Bug: what is broken, in one line
#   Targets: what to build, as names of CMake targets
#   Tests: a regular expression for ctest -R; these pass without the bug, and one at least must fail with it
#
# Works in build/mutate on a copy of what is committed; later runs build only what has changed. Ends with a table, and with 1 when
# a bug survived, a patch no longer applies, or one does not compile.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
tree=$root/build/mutate/tree
build=$root/build/mutate/build
log=$root/build/mutate/log
time_limit=600

die() { echo "mutate: $*" >&2; exit 2; }
field() { sed -n "1,/^diff --git/s/^$2: *//p" "$1" | head -n 1; }
in_tree() { git -C "$tree" "$@"; }

# At HEAD, with the times of unchanged files kept.
prepare_tree() {
  if [ -e "$tree/.git" ]; then
    in_tree checkout -q --detach --force "$(git rev-parse HEAD)"
    in_tree clean -qfd
  else
    git worktree prune
    git worktree add -q --detach "$tree" HEAD
  fi
  ln -sfn "$root/.deps" "$tree/.deps"
  cmake -S "$tree" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DLOCKSTEP_EXAMPLES=OFF >"$log" || die "cmake failed: $log"
}

# build_targets TARGET...; as many jobs as make would take.
build_targets() { cmake --build "$build" -j "${JOBS:-2}" --target "$@" >>"$log" 2>&1; }
run_tests() { timeout -k 10 "$time_limit" ctest --test-dir "$build" --no-tests=error --timeout 60 -j 2 -R "$1" >>"$log" 2>&1; }

# Without any bug all of it builds and passes.
check_baseline() {
  local patch
  local -a targets
  for patch; do
    read -r -a targets <<<"$(field "$patch" Targets)"
    build_targets "${targets[@]}" || die "$(basename "$patch"): ${targets[*]} does not build without the bug; see $log"
    run_tests "$(field "$patch" Tests)" || die "$(basename "$patch"): its tests fail without the bug; see $log"
  done
}

# Prints one word for what became of the bug.
verdict() {
  local patch=$1 word=caught
  local -a targets
  read -r -a targets <<<"$(field "$patch" Targets)"
  if ! in_tree apply "$patch" 2>>"$log"; then
    echo STALE
    return
  fi
  if ! build_targets "${targets[@]}"; then
    word=UNCOMPILABLE
  elif run_tests "$(field "$patch" Tests)"; then
    word=SURVIVED
  fi
  in_tree apply --reverse "$patch"
  echo "$word"
}

patches=("$root"/tests/mutations/*.patch)
[ $# = 0 ] || mapfile -t patches < <(realpath -- "$@")
[ -e "${patches[0]}" ] || die "there is no ${patches[0]}"
for patch in "${patches[@]}"; do
  for name in Bug Targets Tests; do
    [ -n "$(field "$patch" $name)" ] || die "$patch has no line '$name: ...' before its first 'diff --git'"
  done
done

prepare_tree
check_baseline "${patches[@]}"
survivors=0
printf '%-13s %-40s %s\n' verdict patch bug
for patch in "${patches[@]}"; do
  word=$(verdict "$patch")
  [ "$word" = caught ] || survivors=$((survivors + 1))
  printf '%-13s %-40s %s\n' "$word" "$(basename "$patch" .patch)" "$(field "$patch" Bug)"
done
printf '%s of %s bugs caught; what was built and run: %s\n' $((${#patches[@]} - survivors)) ${#patches[@]} "${log#"$root"/}"
[ "$survivors" = 0 ]
