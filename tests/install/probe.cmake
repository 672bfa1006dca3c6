# Included by the project() of Lockstep, before there is any target: adds the probe when all of it has been read.
set(probe_source "${CMAKE_CURRENT_LIST_DIR}/torch_probe.cc")

function(add_torch_probe source)
  add_executable(torch_probe "${source}")
  target_link_libraries(torch_probe PRIVATE lockstep_base lockstep::torch)
endfunction()

cmake_language(EVAL CODE "cmake_language(DEFER CALL add_torch_probe [[${probe_source}]])")
