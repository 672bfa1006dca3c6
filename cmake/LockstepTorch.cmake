# Finds libtorch and defines an imported target that links only torch_cpu and c10, the libraries that a CPU program
# needs. Does not use the TorchConfig.cmake of libtorch, which enables the CUDA language, requires nvcc, and links the
# CUDA libraries into every program. The build of Lockstep includes this file. It is also installed beside
# LockstepConfig.cmake, for projects that use Lockstep.
#
#   lockstep::torch    include folders, torch_cpu, c10
#   LOCKSTEP_TORCH_ROOT, LOCKSTEP_TORCH_VERSION, LOCKSTEP_TORCH_FLAVOUR (cpu | cuda)
#
# LOCKSTEP_TORCH_HINT: the root to use if the user names none.

# Searches Torch_DIR and CMAKE_PREFIX_PATH, as variables or in the environment; then LOCKSTEP_TORCH_HINT; then, unless
# pip builds (SKBUILD), the libtorch that scripts/setup.sh installed, which searches the same places; then the libtorch
# of the torch of Python_EXECUTABLE, or of python3. While pip builds in isolation, PYTHONPATH hides this torch.
function(lockstep_find_torch_root out)
  set(torch_dir "$ENV{Torch_DIR}")
  if(Torch_DIR)
    set(torch_dir "${Torch_DIR}")
  endif()
  set(candidates "")
  if(torch_dir)
    get_filename_component(root "${torch_dir}/../../.." ABSOLUTE)
    list(APPEND candidates "${root}")
  else()
    string(REPLACE ":" ";" from_environment "$ENV{CMAKE_PREFIX_PATH}")
    foreach(prefix IN LISTS CMAKE_PREFIX_PATH from_environment)
      get_filename_component(root "${prefix}/../.." ABSOLUTE)
      list(APPEND candidates "${prefix}" "${prefix}/torch" "${root}")
    endforeach()
    set(installed "")
    if(NOT SKBUILD)
      get_filename_component(source "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/.." ABSOLUTE)
      file(GLOB installed "${source}/.deps/python/lib/python3*/site-packages/torch")
    endif()
    list(APPEND candidates ${LOCKSTEP_TORCH_HINT} ${installed})
    if(NOT installed)
      set(interpreter python3)
      if(Python_EXECUTABLE)
        set(interpreter "${Python_EXECUTABLE}")
      endif()
      foreach(isolation "" -E)
        execute_process(
          COMMAND
            "${interpreter}" ${isolation} -c
            "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
          OUTPUT_VARIABLE of_python OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
        list(APPEND candidates ${of_python})
      endforeach()
    endif()
  endif()
  foreach(candidate IN LISTS candidates)
    if(EXISTS "${candidate}/include/ATen/core/Tensor.h" AND EXISTS "${candidate}/lib/libtorch_cpu.so")
      set(${out} "${candidate}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  string(JOIN "\n  " looked ${candidates})
  if(SKBUILD)
    message(FATAL_ERROR "${interpreter} has no torch, or its torch is hidden by the isolation of the build. Install "
                        "torch first; if it is installed, pip install scikit-build-core and use --no-build-isolation.")
  endif()
  message(FATAL_ERROR "libtorch was not found. Run scripts/setup.sh, or pass -DTorch_DIR=.../share/cmake/Torch or "
                      "-DCMAKE_PREFIX_PATH=/path/to/libtorch. Searched:\n  ${looked}")
endfunction()

function(lockstep_read_torch_version root out)
  set(file "${root}/include/torch/headeronly/version.h")
  if(NOT EXISTS "${file}")
    set(file "${root}/include/torch/csrc/api/include/torch/version.h")
  endif()
  file(STRINGS "${file}" lines REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
  string(REGEX REPLACE "[^0-9;]" "" version "${lines}")
  string(REPLACE ";" "." version "${version}")
  set(${out} "${version}" PARENT_SCOPE)
endfunction()

lockstep_find_torch_root(LOCKSTEP_TORCH_ROOT)
lockstep_read_torch_version("${LOCKSTEP_TORCH_ROOT}" LOCKSTEP_TORCH_VERSION)
if(LOCKSTEP_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "libtorch ${LOCKSTEP_TORCH_VERSION} in ${LOCKSTEP_TORCH_ROOT} is too old; expected 2.11 to 2.15")
elseif(LOCKSTEP_TORCH_VERSION VERSION_GREATER_EQUAL 2.16)
  message(WARNING "libtorch ${LOCKSTEP_TORCH_VERSION} in ${LOCKSTEP_TORCH_ROOT} is newer than the tested versions "
                  "2.11 to 2.15")
endif()

if(EXISTS "${LOCKSTEP_TORCH_ROOT}/lib/libtorch_cuda.so")
  set(LOCKSTEP_TORCH_FLAVOUR cuda)
else()
  set(LOCKSTEP_TORCH_FLAVOUR cpu)
endif()

if(NOT TARGET lockstep::torch)
  add_library(lockstep::c10 SHARED IMPORTED)
  set_target_properties(lockstep::c10 PROPERTIES IMPORTED_LOCATION "${LOCKSTEP_TORCH_ROOT}/lib/libc10.so")
  add_library(lockstep::torch SHARED IMPORTED)
  set_target_properties(lockstep::torch PROPERTIES
    IMPORTED_LOCATION "${LOCKSTEP_TORCH_ROOT}/lib/libtorch_cpu.so"
    INTERFACE_INCLUDE_DIRECTORIES "${LOCKSTEP_TORCH_ROOT}/include;${LOCKSTEP_TORCH_ROOT}/include/torch/csrc/api/include"
    INTERFACE_LINK_LIBRARIES "lockstep::c10")
  # libtorch_cpu.so of a CUDA build needs libcudart and libcupti, which its own RPATH finds at start-up.
  set_property(TARGET lockstep::torch APPEND PROPERTY INTERFACE_LINK_OPTIONS "LINKER:--allow-shlib-undefined")
  # libtorch uses the shared libstdc++. With a compiler that links the static one by itself, as some wrappers do, a
  # program would have both, and crash in free() when libtorch's destructors call functions of either.
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -print-file-name=libstdc++.so.6
                  OUTPUT_VARIABLE LOCKSTEP_LIBSTDCXX OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(IS_ABSOLUTE "${LOCKSTEP_LIBSTDCXX}")
    set_property(TARGET lockstep::torch APPEND PROPERTY INTERFACE_LINK_LIBRARIES "-l:libstdc++.so.6")
  endif()
endif()

#   lockstep::torch_cuda   adds libtorch's CUDA library, for the programs that link it
if(LOCKSTEP_TORCH_FLAVOUR STREQUAL cuda AND NOT TARGET lockstep::torch_cuda)
  add_library(lockstep::c10_cuda SHARED IMPORTED)
  set_target_properties(lockstep::c10_cuda PROPERTIES IMPORTED_LOCATION "${LOCKSTEP_TORCH_ROOT}/lib/libc10_cuda.so")
  add_library(lockstep::torch_cuda SHARED IMPORTED)
  set_target_properties(lockstep::torch_cuda PROPERTIES IMPORTED_LOCATION "${LOCKSTEP_TORCH_ROOT}/lib/libtorch_cuda.so"
    INTERFACE_LINK_LIBRARIES "lockstep::torch;lockstep::c10_cuda")
endif()
