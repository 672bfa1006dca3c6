# One module: one folder of lockstep/, one static library lockstep_<folder>, with an underscore for each slash.
#
#   lockstep_module(<folder> [TORCH] [DEPS <folder>...] [PRIVATE_DEPS <folder>...] [LEAVES <header>...]
#                   [LINK <target>...] [SOURCES <file>...])
#
# Sources are lockstep/<folder>/*.cc, or those named. DEPS are the modules whose headers this one may include, and so may
# who depends on it; PRIVATE_DEPS are for this module alone. LEAVES are single headers of modules that it does not depend
# on. tests/lint/rules/levels.py reads these calls, so that a wrong include is an error there and does not link here.
# TORCH modules share one precompiled header. With LOCKSTEP_UNITY several sources are compiled at once.
set(LOCKSTEP_MODULES "" CACHE INTERNAL "")

function(lockstep_module folder)
  cmake_parse_arguments(ARG "TORCH" "" "DEPS;PRIVATE_DEPS;LEAVES;LINK;SOURCES" ${ARGN})
  string(REPLACE "/" "_" name "${folder}")
  set(target lockstep_${name})
  if(ARG_SOURCES)
    list(TRANSFORM ARG_SOURCES PREPEND "${PROJECT_SOURCE_DIR}/lockstep/${folder}/")
    set(sources ${ARG_SOURCES})
  else()
    file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/lockstep/${folder}/*.cc")
  endif()
  if(sources)
    add_library(${target} STATIC ${sources})
    set(scope PUBLIC)
    target_compile_options(${target} PRIVATE ${LOCKSTEP_WARNINGS})
    set_target_properties(${target} PROPERTIES UNITY_BUILD ${LOCKSTEP_UNITY} UNITY_BUILD_BATCH_SIZE 10)
  else()
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(Lockstep::${name} ALIAS ${target})
  target_include_directories(
    ${target} ${scope} "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>" "$<INSTALL_INTERFACE:include>")
  target_compile_features(${target} ${scope} cxx_std_20)
  foreach(dep IN LISTS ARG_DEPS ARG_PRIVATE_DEPS)
    string(REPLACE "/" "_" dep "${dep}")
    target_link_libraries(${target} ${scope} lockstep_${dep})
  endforeach()
  target_link_libraries(${target} ${scope} ${ARG_LINK})
  if(ARG_TORCH)
    target_link_libraries(${target} ${scope} lockstep::torch)
    if(sources)
      target_precompile_headers(${target} REUSE_FROM lockstep_core_pch)
    endif()
  endif()
  set(LOCKSTEP_MODULES ${LOCKSTEP_MODULES} ${target} CACHE INTERNAL "")
endfunction()
