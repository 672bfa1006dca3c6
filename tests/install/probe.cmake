# Included by Lockstep's project() command, before any target exists: adds the probe after all targets have been
# defined.
set(probe_source "${CMAKE_CURRENT_LIST_DIR}/torch_probe.cc")

function(add_torch_probe source)
  add_executable(torch_probe "${source}")
  target_link_libraries(torch_probe PRIVATE lockstep_base_net lockstep::torch)
endfunction()

cmake_language(EVAL CODE "cmake_language(DEFER CALL add_torch_probe [[${probe_source}]])")
