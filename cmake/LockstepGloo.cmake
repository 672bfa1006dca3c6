# The gloo transport is c10d's ProcessGroupGloo, which is inside libtorch_cpu. Its header includes gloo's own headers, which
# libtorch does not ship; Debian's libgloo-dev brings them. Headers only: libgloo must not be linked.
find_path(LOCKSTEP_GLOO_INCLUDE gloo/algorithm.h)
if(LOCKSTEP_GLOO_INCLUDE)
  set(LOCKSTEP_GLOO yes)
  set(LOCKSTEP_GLOO_SOURCES gloo.cc c10d_store.cc)
else()
  set(LOCKSTEP_GLOO no)
  set(LOCKSTEP_GLOO_SOURCES no_gloo.cc)
  message(WARNING "gloo's headers were not found (package libgloo-dev): Lockstep is built without the transport gloo")
endif()
