# Finds what the Python package needs: the python3 that has the libtorch of this build, and its headers (Debian:
# python3-dev). pybind11 (BSD) is part of torch's headers. Without them, and with sanitizers, Lockstep is built without
# the package. LOCKSTEP_CPYTHONS names headers instead (python/CMakeLists.txt).
set(LOCKSTEP_PYTHON no)
if(LOCKSTEP_SANITIZE)
  return()
endif()
if(LOCKSTEP_CPYTHONS)
  set(LOCKSTEP_PYTHON yes)
  return()
endif()
file(GLOB interpreters "${LOCKSTEP_TORCH_ROOT}/../../../../bin/python3")
list(PREPEND interpreters ${Python_EXECUTABLE})  # set by scikit-build-core
list(APPEND interpreters python3)
foreach(interpreter IN LISTS interpreters)
  foreach(isolation "" -E)  # -E: as in LockstepTorch.cmake
    execute_process(
      COMMAND
        "${interpreter}" ${isolation} -c
        "import importlib.util, sysconfig; spec = importlib.util.find_spec('torch'); \
print(spec.submodule_search_locations[0], sysconfig.get_path('include'), \
sysconfig.get_config_var('EXT_SUFFIX'), sysconfig.get_python_version(), sep=';')"
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(NOT found OR LOCKSTEP_PYTHON)
      continue()
    endif()
    list(GET found 0 torch)
    list(GET found 1 include)
    list(GET found 2 LOCKSTEP_PYTHON_SUFFIX)
    list(GET found 3 LOCKSTEP_PYTHON_VERSION)
    get_filename_component(torch "${torch}" REALPATH)
    get_filename_component(own "${LOCKSTEP_TORCH_ROOT}" REALPATH)
    if(torch STREQUAL own AND EXISTS "${include}/Python.h" AND EXISTS "${own}/lib/libtorch_python.so")
      set(LOCKSTEP_PYTHON yes)
      set(LOCKSTEP_PYTHON_INTERPRETER "${interpreter}")
      set(LOCKSTEP_CPYTHONS "${include}=${LOCKSTEP_PYTHON_SUFFIX}")
    endif()
  endforeach()
endforeach()
