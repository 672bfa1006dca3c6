#!/bin/sh
# fake_hosts.sh "0 0 1" PROGRAM [ARG...]: runs PROGRAM as a rank of a job whose rank r appears to be on the r-th of
# these hosts, although all ranks are on one host. Started as every rank by `lockstep run` or Open MPI's mpirun.
hosts=$1
shift
field=$((${LOCKSTEP_RANK:-$OMPI_COMM_WORLD_RANK} + 1))
LOCKSTEP_HOST_ID=fake-$(echo "$hosts" | cut -d' ' -f"$field")
export LOCKSTEP_HOST_ID
# The launcher's values describe the real host.
unset LOCKSTEP_LOCAL_RANK LOCKSTEP_LOCAL_WORLD_SIZE LOCKSTEP_NODE_RANK LOCKSTEP_NUM_NODES
unset OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE
exec "$@"
