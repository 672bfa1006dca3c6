# Finds libsodium (ISC licence) and defines the target lockstep::sodium. It is linked statically, so that an agent that
# is copied to another host has no dependencies there, nor has the Python extension.
find_path(LOCKSTEP_SODIUM_INCLUDE sodium.h)
find_library(LOCKSTEP_SODIUM_LIBRARY NAMES libsodium.a sodium)
if(NOT LOCKSTEP_SODIUM_INCLUDE OR NOT LOCKSTEP_SODIUM_LIBRARY)
  message(FATAL_ERROR "libsodium was not found (Debian: libsodium-dev)")
endif()
add_library(lockstep::sodium INTERFACE IMPORTED)
set_target_properties(
  lockstep::sodium PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${LOCKSTEP_SODIUM_INCLUDE}"
                              INTERFACE_LINK_LIBRARIES "Threads::Threads;${LOCKSTEP_SODIUM_LIBRARY}")
