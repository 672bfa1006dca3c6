#!/bin/sh
# pinned.sh PROGRAM [ARG...]: runs PROGRAM as a rank (RANK is set) on one core, the RANK-th modulo their number.
core=$((RANK % $(nproc --all)))
exec taskset -c "$core" "$@"
