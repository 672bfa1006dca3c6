# LOCKSTEP_DEPS names a folder that `scripts/setup.sh --portable` made, for machines where nothing can be installed. Its
# packages are used instead of the machine's; it has the layout of Debian's packages.
set(LOCKSTEP_DEPS "" CACHE PATH "folder made by scripts/setup.sh --portable, instead of installed packages")
if(LOCKSTEP_DEPS)
  get_filename_component(deps "${LOCKSTEP_DEPS}" ABSOLUTE BASE_DIR "${CMAKE_BINARY_DIR}")
  if(NOT EXISTS "${deps}/lockstep.stamp")
    message(FATAL_ERROR "LOCKSTEP_DEPS=${LOCKSTEP_DEPS} was not made by scripts/setup.sh --portable")
  endif()
  file(GLOB deps_libraries RELATIVE "${deps}/usr/lib" "${deps}/usr/lib/*-linux-gnu")
  set(CMAKE_LIBRARY_ARCHITECTURE "${deps_libraries}")  # find_library() and find_package() search lib/ARCHITECTURE
  list(PREPEND CMAKE_PREFIX_PATH "${deps}/usr")
  include_directories(SYSTEM "${deps}/usr/include")  # compilers search /usr/include by themselves, but not this
endif()
