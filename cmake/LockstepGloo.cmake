# Finds the headers of Gloo. The transport gloo uses c10d's ProcessGroupGloo, which is part of libtorch_cpu. Its header
# includes Gloo's own headers, which libtorch does not ship; Debian's libgloo-dev contains them. libgloo itself must not
# be linked.
find_path(LOCKSTEP_GLOO_INCLUDE gloo/algorithm.h)
if(LOCKSTEP_GLOO_INCLUDE)
  set(LOCKSTEP_GLOO yes)
  set(LOCKSTEP_GLOO_SOURCES gloo.cc c10d_store.cc)
else()
  set(LOCKSTEP_GLOO no)
  set(LOCKSTEP_GLOO_SOURCES no_gloo.cc)
  message(WARNING "the headers of Gloo were not found (package libgloo-dev): "
                  "Lockstep is built without the transport gloo")
endif()
