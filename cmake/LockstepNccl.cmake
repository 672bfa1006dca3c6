# Finds the header of NCCL. GPU support requires a CUDA build of libtorch, and NCCL support requires the header of the
# libnccl that this libtorch uses; the wheel nvidia-nccl installs both beside libtorch. Lockstep links neither CUDA nor
# NCCL: programs load libtorch's CUDA library when they use a GPU (lockstep/comm/gpu/cuda.h).
if(LOCKSTEP_TORCH_FLAVOUR STREQUAL cuda)
  set(LOCKSTEP_CUDA_SOURCES cuda.cc device_transport.cc)
  file(GLOB LOCKSTEP_NCCL_INCLUDE "${LOCKSTEP_TORCH_ROOT}/../nvidia/nccl/include/nccl.h"
       "${LOCKSTEP_TORCH_ROOT}/include/nccl.h")
  list(TRANSFORM LOCKSTEP_NCCL_INCLUDE REPLACE "/nccl.h$" "")
  if(NOT LOCKSTEP_NCCL_INCLUDE)
    find_path(LOCKSTEP_NCCL_HEADER nccl.h)  # for a libtorch that was built from source
    set(LOCKSTEP_NCCL_INCLUDE ${LOCKSTEP_NCCL_HEADER})
    list(FILTER LOCKSTEP_NCCL_INCLUDE EXCLUDE REGEX NOTFOUND)
  endif()
else()
  set(LOCKSTEP_CUDA_SOURCES no_cuda.cc)
  set(LOCKSTEP_NCCL_INCLUDE)
endif()
if(LOCKSTEP_NCCL_INCLUDE)
  set(LOCKSTEP_NCCL yes)
  set(LOCKSTEP_NCCL_SOURCES nccl.cc communicator.cc library.cc failure.cc)
else()
  set(LOCKSTEP_NCCL no)
  set(LOCKSTEP_NCCL_SOURCES no_nccl.cc)
  if(LOCKSTEP_TORCH_FLAVOUR STREQUAL cuda)
    message(STATUS "nccl.h was not found (wheel nvidia-nccl-cu13): tensors on GPUs are transferred through host memory")
  endif()
endif()
