# lockstep_module() defines one module: a folder of lockstep/ that is compiled to the static library lockstep_<folder>,
# in whose name an underscore replaces each slash.
#
#   lockstep_module(<folder> [TORCH] [DEPS <folder>...] [PRIVATE_DEPS <folder>...] [LEAVES <header>...]
#                   [LINK <target>...] [SOURCES <file>...])
#
# The sources are lockstep/<folder>/*.cc unless SOURCES names them. DEPS are the modules whose headers this module and
# the modules that depend on it may include. PRIVATE_DEPS are modules whose headers only this module may include, and
# headers of a transport only where it is chosen (lockstep/comm/world.cc). LEAVES are single headers that it may include
# from modules on which it does not depend. The lint rule tests/lint/rules/layers.py reads these calls and reports any
# other include, which would not link either. TORCH links libtorch; these modules share one precompiled header. With
# LOCKSTEP_UNITY, up to ten sources are compiled together.
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
  target_include_directories(${target} ${scope} "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>")
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

# lockstep_executable() defines an executable: a program, benchmark or example, or a program of the docs or the tests.
#
#   lockstep_executable(<target> SOURCES <file>... [LINK <target>...] [PCH core|torch|programs] [NEEDS <target>...]
#                       [DEFINITIONS <NAME="value">...])
#
# PCH names the precompiled header lockstep_<PCH>_pch. NEEDS are targets that the executable starts or loads.
function(lockstep_executable target)
  cmake_parse_arguments(ARG "" "PCH" "SOURCES;LINK;NEEDS;DEFINITIONS" ${ARGN})
  add_executable(${target} ${ARG_SOURCES})
  target_link_libraries(${target} PRIVATE ${ARG_LINK})
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_compile_options(${target} PRIVATE ${LOCKSTEP_WARNINGS})
  target_compile_definitions(${target} PRIVATE ${ARG_DEFINITIONS})
  if(ARG_PCH)
    target_precompile_headers(${target} REUSE_FROM lockstep_${ARG_PCH}_pch)
  endif()
  if(ARG_NEEDS)
    add_dependencies(${target} ${ARG_NEEDS})
  endif()
endfunction()
