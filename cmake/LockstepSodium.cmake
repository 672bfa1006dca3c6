# Finds libsodium (ISC licence) and defines the target lockstep::sodium. It is linked statically, so that an agent that
# is copied to another host has no dependencies there. Debian's static library is not position-independent: a target
# with the property LOCKSTEP_SHARED_SODIUM, such as the Python extension, links the shared one.
find_path(LOCKSTEP_SODIUM_INCLUDE sodium.h)
find_library(LOCKSTEP_SODIUM_LIBRARY NAMES libsodium.a sodium)
find_library(LOCKSTEP_SODIUM_SHARED_LIBRARY NAMES sodium)
if(NOT LOCKSTEP_SODIUM_INCLUDE OR NOT LOCKSTEP_SODIUM_LIBRARY)
  message(FATAL_ERROR "libsodium was not found (Debian: libsodium-dev)")
endif()
add_library(lockstep::sodium INTERFACE IMPORTED)
set(lockstep_shared "$<BOOL:$<TARGET_PROPERTY:LOCKSTEP_SHARED_SODIUM>>")
set_target_properties(
  lockstep::sodium
  PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${LOCKSTEP_SODIUM_INCLUDE}"
    INTERFACE_LINK_LIBRARIES
    "Threads::Threads;$<IF:${lockstep_shared},${LOCKSTEP_SODIUM_SHARED_LIBRARY},${LOCKSTEP_SODIUM_LIBRARY}>")
