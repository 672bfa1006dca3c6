#!/usr/bin/env bash
# test_module.sh FOLDER: prints the module whose tests cover a folder of lockstep/ or bench/, as tests/CMakeLists.txt
# names it: comm for comm/shm, train/report for train/loggers.
set -euo pipefail
case "$1" in
  train/report* | train/loggers*) echo train/report ;;
  bench/harness | bench/ranks) echo "$1" ;;
  *) echo "${1%%/*}" ;;
esac
