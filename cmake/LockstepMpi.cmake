# Finds MPI. The transport mpi calls libmpi directly; Debian's libopenmpi-dev contains it. Without MPI, Lockstep is
# built without this transport.
set(MPI_DETERMINE_LIBRARY_VERSION TRUE)
find_package(MPI QUIET COMPONENTS C)
if(MPI_C_FOUND)
  set(LOCKSTEP_MPI yes)
  set(LOCKSTEP_MPI_SOURCES mpi.cc runtime.cc library.cc)
  string(REGEX MATCH "^[^\r\n\";]*" LOCKSTEP_MPI_BUILT_WITH "${MPI_C_LIBRARY_VERSION_STRING}")
  # An installed Lockstep names the library itself: FindMPI would require the user's project to enable the language C.
  set(LOCKSTEP_MPI_LINK "$<BUILD_INTERFACE:MPI::MPI_C>" "$<INSTALL_INTERFACE:${MPI_C_LIBRARIES}>")
else()
  set(LOCKSTEP_MPI no)
  set(LOCKSTEP_MPI_SOURCES no_mpi.cc library.cc)
  set(LOCKSTEP_MPI_LINK)
  message(STATUS "MPI was not found (package libopenmpi-dev): Lockstep is built without the transport mpi")
endif()
