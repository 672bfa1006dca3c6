# Finds libsodium (ISC licence) and defines the target lockstep::sodium. It is linked statically, so that an agent that
# is copied to another host has no dependencies there.
find_path(LOCKSTEP_SODIUM_INCLUDE sodium.h)
find_library(LOCKSTEP_SODIUM_LIBRARY NAMES libsodium.a sodium)
if(NOT LOCKSTEP_SODIUM_INCLUDE OR NOT LOCKSTEP_SODIUM_LIBRARY)
  message(FATAL_ERROR "libsodium was not found (Debian: libsodium-dev)")
endif()
add_library(lockstep::sodium UNKNOWN IMPORTED)
set_target_properties(lockstep::sodium PROPERTIES IMPORTED_LOCATION "${LOCKSTEP_SODIUM_LIBRARY}"
  INTERFACE_INCLUDE_DIRECTORIES "${LOCKSTEP_SODIUM_INCLUDE}" INTERFACE_LINK_LIBRARIES Threads::Threads)
