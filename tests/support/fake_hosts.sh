#!/bin/sh
# fake_hosts.sh "0 0 1" PROGRAM [ARG...]: runs PROGRAM as a rank of a job whose rank r is on the r-th of these hosts, though all are on
# one. For `lockstep run` or Open MPI's mpirun, which starts it as every rank.
hosts=$1
shift
place=$((${LOCKSTEP_RANK:-$OMPI_COMM_WORLD_RANK} + 1))
LOCKSTEP_HOST_ID=pretended-$(echo "$hosts" | cut -d' ' -f"$place")
export LOCKSTEP_HOST_ID
# What the launcher says of places is about the real host.
unset LOCKSTEP_LOCAL_RANK LOCKSTEP_LOCAL_WORLD_SIZE LOCKSTEP_NODE_RANK LOCKSTEP_NUM_NODES OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE
exec "$@"
