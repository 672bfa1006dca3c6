# The transport mpi is libmpi itself; Debian's libopenmpi-dev brings it. Without it everything else is built.
find_package(MPI QUIET COMPONENTS C)
if(MPI_C_FOUND)
  set(LOCKSTEP_MPI yes)
else()
  set(LOCKSTEP_MPI no)
endif()
