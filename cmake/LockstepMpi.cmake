# The transport mpi is libmpi itself; Debian's libopenmpi-dev brings it. Without it everything else is built.
find_package(MPI QUIET COMPONENTS C)
if(MPI_C_FOUND)
  set(LOCKSTEP_MPI yes)
  set(LOCKSTEP_MPI_SOURCES mpi.cc session.cc)
  # An installed Lockstep names the library itself: FindMPI would ask its user's project for the language C.
  set(LOCKSTEP_MPI_LINK "$<BUILD_INTERFACE:MPI::MPI_C>" "$<INSTALL_INTERFACE:${MPI_C_LIBRARIES}>")
else()
  set(LOCKSTEP_MPI no)
  set(LOCKSTEP_MPI_SOURCES no_mpi.cc)
  set(LOCKSTEP_MPI_LINK)
  message(STATUS "MPI was not found (package libopenmpi-dev): Lockstep is built without the transport mpi")
endif()
