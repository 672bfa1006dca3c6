# Compiler and linker flags that all targets of this project share. They must be the same everywhere: gcc rejects a
# precompiled header that was compiled with other flags.
include(CheckPIESupported)
check_pie_supported(LANGUAGES CXX)

# Programs are position independent as well. They are compiled with -fPIC like the libraries, because -fPIE would not
# match the precompiled header that they share.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_COMPILE_OPTIONS_PIE "-fPIC")

# -O3 takes longer to compile and gains nothing here: the expensive loops are in libtorch. The presets
# includes_modules and includes_tests, which only check that everything compiles, set -O0.
set(LOCKSTEP_OPTIMIZATION "-O2" CACHE STRING "optimisation of a release build")
set(CMAKE_CXX_FLAGS_RELEASE "${LOCKSTEP_OPTIMIZATION} -DNDEBUG")
set(CMAKE_CXX_FLAGS_DEBUG "-Og -g1")
# Tests, and the programs of the docs, need not be fast: -Og takes about 70 % of the time. g++ 13 and later would then
# reject the precompiled headers, which are compiled with -O2.
set(LOCKSTEP_TEST_OPTIONS)
if(NOT LOCKSTEP_OPTIMIZATION STREQUAL "-O0" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  set(LOCKSTEP_TEST_OPTIONS "$<$<CONFIG:Release>:-Og>")
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # g++ compiles a tenth faster if it does not collect garbage while its heap, which includes the precompiled header, is
  # smaller than 4 GB.
  add_compile_options(--param=ggc-min-heapsize=4000000)
endif()
set(LOCKSTEP_WARNINGS -Wall -Wextra -Wshadow -Wno-unused-parameter -Wno-missing-field-initializers)
if(LOCKSTEP_UNITY)
  # A unity source includes other sources, and g++ warns about their anonymous namespaces as it does in headers.
  list(APPEND LOCKSTEP_WARNINGS -Wno-subobject-linkage)
endif()

set(LOCKSTEP_SANITIZE
    ""
    CACHE STRING "sanitizers for all targets, in the syntax of -fsanitize: address,undefined or thread")
if(LOCKSTEP_SANITIZE)
  # vptr checks need type information that libtorch does not export.
  add_compile_options(-fsanitize=${LOCKSTEP_SANITIZE} -fno-sanitize=vptr -fno-sanitize-recover=all
                      -fno-omit-frame-pointer)
  add_compile_definitions(XXH_NO_INLINE_HINTS=1)  # g++ cannot inline sanitized functions that must be inlined
  add_link_options(-fsanitize=${LOCKSTEP_SANITIZE})
  # libtorch must not call the sanitized copies of inline functions of the standard library that our executables
  # contain: the sanitizer does not see the locks in libtorch that guard the data.
  add_link_options("LINKER:--version-script=${CMAKE_CURRENT_LIST_DIR}/local_std.map")
else()
  add_compile_options(-fstack-protector-strong)
  if(NOT LOCKSTEP_OPTIMIZATION STREQUAL "-O0")  # which _FORTIFY_SOURCE does not support
    add_compile_options("$<$<CONFIG:Release>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=2>")
  endif()
  add_link_options(LINKER:-z,relro,-z,now)
endif()
