# Tests with the fake CUDA and NCCL of tests/support/gpu, with one GPU per rank or fewer. `way` says how tensors on GPUs
# are transferred.

function(lockstep_gpu_tests file)
  cmake_parse_arguments(ARG "" "" "SIZES;CASES;LINK" ${ARGN})
  get_filename_component(suite ${file} NAME)
  get_filename_component(module ${file} DIRECTORY)
  # conformance_gpu is a program of its own, because the tests of messages below run all of its cases.
  set(target conformance_gpu)
  set(pch core)
  if(NOT module STREQUAL comm)
    set(target conformance_${module})
    set(pch torch)
  endif()
  lockstep_conformance_source(${target} ${module} ${file} PCH ${pch} LINK ${ARG_LINK} NEEDS lockstep_test_fake_gpu)
  lockstep_filter_of(filter ${file}_test.cc)
  set(ways nccl shm shared tcp hierarchy)
  foreach(size IN LISTS ARG_SIZES)
    foreach(way IN LISTS ways)
      set(gpus ${size})
      set(transport ${way})
      set(hosts)
      if(way STREQUAL shared)  # two ranks per GPU, which NCCL does not support
        math(EXPR gpus "(${size} + 1) / 2")
        set(transport auto)
      elseif(way STREQUAL hierarchy)
        set(hosts "${fake_hosts}" "${LOCKSTEP_HOSTS_hierarchy_${size}}")
      endif()
      if((size EQUAL 1 AND NOT way MATCHES "shared|nccl")
         OR (way STREQUAL hierarchy AND NOT LOCKSTEP_HOSTS_hierarchy_${size}))
        continue()
      endif()
      set(job ${lockstep} run -n ${size} --bind none --transport ${transport} -- ${hosts}
              env FAKE_GPUS=${gpus} FAKE_GPU_DELAY_US=300 ${LOCKSTEP_FAKE_GPU} "$<TARGET_FILE:${target}>")
      set(test conformance/${suite}/${way}/n${size})
      foreach(case IN LISTS ARG_CASES)
        lockstep_conformance_test(${test}/${case} ${module} ${size} 1 ${job} --gtest_filter=${case})
      endforeach()
      if(NOT ARG_CASES)
        lockstep_conformance_test(${test} ${module} ${size} 2 ${job} "--gtest_filter=${filter}-*Desync*:*Failures*")
      endif()
    endforeach()
  endforeach()
endfunction()

lockstep_gpu_tests(comm/gpu SIZES 1 2 3)
lockstep_gpu_tests(comm/gpu SIZES 2 CASES GpuDesync.OneRankOnCpu)
lockstep_gpu_tests(ddp/ddp_gpu SIZES 1 2 3 LINK lockstep_ddp)
lockstep_gpu_tests(
  ddp/ddp_gpu SIZES 2 CASES DdpGpuFailures.ChangedParameterIsReported DdpGpuFailures.RankInBarrierIsDetectedAtOnce)
lockstep_gpu_tests(data/data_gpu SIZES 1 2 LINK lockstep_data)

# Tests which GPU each rank selects, which libraries this loads, and the messages.
lockstep_executable(
  conformance_gpu_probe
  SOURCES comm/gpu_probe.cc
  LINK lockstep_comm
  PCH core
  NEEDS lockstep_program lockstep_test_fake_gpu)
lockstep_module_target(comm conformance_gpu_probe)
function(lockstep_gpu_output_test case expected)
  set(test conformance/gpu_selection/${case})
  add_test(NAME ${test} COMMAND ${ARGN})
  set_tests_properties(
    ${test} PROPERTIES LABELS "conformance;module:comm" TIMEOUT 60 PROCESSORS 1 PASS_REGULAR_EXPRESSION "${expected}")
endfunction()
set(two_gpus env ${LOCKSTEP_FAKE_GPU} FAKE_GPUS=2)
set(one_gpu env ${LOCKSTEP_FAKE_GPU} FAKE_GPUS=1)
set(run ${lockstep} run -n 2 --bind none)
set(probe "$<TARGET_FILE:conformance_gpu_probe>")
set(suite "$<TARGET_FILE:conformance_gpu>")
lockstep_gpu_output_test(no_gpu "on cpu, libtorch_cuda is not loaded" ${probe})
lockstep_gpu_output_test(alone "on cuda:0, libtorch_cuda is loaded" ${two_gpus} ${probe})
lockstep_gpu_output_test(device_cpu "on cpu, libtorch_cuda is not loaded" ${two_gpus} LOCKSTEP_DEVICE=cpu ${probe})
lockstep_gpu_output_test(none_visible "on cpu, libtorch_cuda is not loaded" ${two_gpus} CUDA_VISIBLE_DEVICES= ${probe})
lockstep_gpu_output_test(
  device_by_index "on cuda:1, libtorch_cuda is loaded" ${two_gpus} LOCKSTEP_DEVICE=cuda:1 ${probe})
lockstep_gpu_output_test(
  device_index_out_of_range
  "LOCKSTEP_DEVICE. is cuda:2, but this rank sees 2 GPUs. expected cuda:0 to cuda:1" ${two_gpus}
  LOCKSTEP_DEVICE=cuda:2 ${probe})
lockstep_gpu_output_test(
  cuda_requested_without_gpu "is cuda, but there is no GPU: this host has no NVIDIA driver" env LOCKSTEP_DEVICE=cuda
  ${probe})
lockstep_gpu_output_test(
  init_after_cuda_query "libtorch checked for GPUs before lockstep::init.*manual_seed" ${two_gpus} ${probe} late)
lockstep_gpu_output_test(
  driver_too_old "GPUs are not used: NVIDIA's driver is too old: it supports CUDA 13.*on cpu" ${two_gpus}
  FAKE_CUDA_ERROR=cudaGetDeviceCount:35 ${probe})
lockstep_gpu_output_test(
  two_ranks_share_a_gpu "warning: ranks 0,1 share one GPU, GPU-[0-9a-f-]+ of host .*PASSED  . 1 test" ${run} --
  ${one_gpu} ${suite} --gtest_filter=Gpu.AllReduce)
lockstep_gpu_output_test(
  named_transport_used_for_gpus "GPU tensors through host memory over shm.*PASSED" ${run} --transport shm --
  ${two_gpus} ${suite} --gtest_filter=Gpu.AllReduce)
lockstep_gpu_output_test(
  nccl_rejects_shared_gpu "cause=CONFIG_MISMATCH .*transport nccl: ranks 0,1 share one GPU" ${run} --transport nccl --
  ${one_gpu} ${suite})
file(STRINGS "${LOCKSTEP_NCCL_INCLUDE}/nccl.h" nccl REGEX "define NCCL_MINOR ([0-9]+)")
string(REGEX MATCH "[0-9]+$" nccl "${nccl}")
if(nccl LESS 30)  # a build refuses an older NCCL than its own
  lockstep_gpu_output_test(
    nccl_rejects_shared_gpu_before_2_30 "share one GPU, .* and NCCL 2.[0-9.]* does not support that; expected 2.30.0"
    ${run} --share-gpus --transport nccl -- ${one_gpu} ${suite})
endif()
lockstep_gpu_output_test(
  nccl_2_30_with_shared_gpu "GPU tensors by NCCL 2.40.0.*PASSED" ${run} --share-gpus --transport nccl -- ${one_gpu}
  FAKE_NCCL_VERSION=24000 ${suite} --gtest_filter=Gpu.*)
lockstep_gpu_output_test(
  nccl_2_30_without_share_gpus "NCCL_MULTI_RANK_GPU_ENABLE is not 1; lockstep run --share-gpus sets it" ${run}
  --transport nccl -- ${one_gpu} FAKE_NCCL_VERSION=24000 ${suite})
lockstep_gpu_output_test(
  one_rank_over_nccl "GPU tensors by NCCL.*PASSED.*fake ncclCommDestroy" ${lockstep} run -n 1 --bind none --transport
  nccl -- ${one_gpu} ${suite} --gtest_filter=Gpu.*)
lockstep_gpu_output_test(
  nccl_without_gpu "transport nccl: this host has no NVIDIA driver" ${run} --transport nccl -- ${suite})
lockstep_gpu_output_test(
  one_rank_on_cpu "CONFIG_MISMATCH.*device" ${run} -- sh -c
  "LOCKSTEP_DEVICE=\$(test $LOCKSTEP_RANK = 1 && echo cpu || echo cuda) exec \"$@\"" sh ${two_gpus} ${suite})
lockstep_gpu_output_test(
  gpus_option "GPU tensors by NCCL.*PASSED" ${run} --gpus 1,0 -- ${two_gpus} ${suite} --gtest_filter=Gpu.*)
lockstep_gpu_output_test(
  one_visible_gpu_per_rank "GPU tensors by NCCL.*PASSED" ${run} -- sh -c
  "CUDA_VISIBLE_DEVICES=$LOCKSTEP_LOCAL_RANK exec \"$@\"" sh ${two_gpus} ${suite} --gtest_filter=Gpu.*)
add_test(
  NAME conformance/gpu_selection/split_uses_nccl_comm_split
  COMMAND "${CMAKE_CURRENT_SOURCE_DIR}/comm/expect_output.sh" "fake ncclCommSplit" ${run} -- ${two_gpus} ${suite}
          --gtest_filter=Gpu.SplitGroups)
set_tests_properties(
  conformance/gpu_selection/split_uses_nccl_comm_split
  PROPERTIES LABELS "conformance;module:comm" TIMEOUT 60 PROCESSORS 1)

# lockstep_gpu_failure_test(<case> <fault of NCCL> <error text of NCCL> <text in the output of the job>)
lockstep_executable(
  conformance_gpu_failures
  SOURCES comm/gpu_failures_test.cc
  LINK lockstep_test_rank_main
  PCH core
  NEEDS lockstep_program lockstep_test_fake_gpu)
lockstep_module_target(comm conformance_gpu_failures)
function(lockstep_gpu_failure_test case fault text expected)
  set(test conformance/gpu_failures/${case})
  add_test(
    NAME ${test}
    COMMAND
      "${CMAKE_CURRENT_SOURCE_DIR}/comm/expect_output.sh" "${expected}" ${run} -- ${two_gpus} "FAKE_NCCL_FAULT=${fault}"
      "FAKE_NCCL_ERROR_TEXT=${text}" LOCKSTEP_TIMEOUT=3 NCCL_SOCKET_IFNAME=wire7
      "$<TARGET_FILE:conformance_gpu_failures>" --gtest_filter=GpuFailures.${case})
  set_tests_properties(${test} PROPERTIES LABELS "conformance;module:comm" TIMEOUT 120 PROCESSORS 1)
endfunction()
lockstep_gpu_failure_test(OutOfMemoryInCommInit ncclCommInitRankConfig=1@1 "Cuda failure 2 'out of memory'" "")
lockstep_gpu_failure_test(
  DriverTooOldInFirstBroadcast ncclBroadcast=1@1
  "Cuda failure 35 'CUDA driver version is insufficient for CUDA runtime version'" "fake ncclCommAbort")
lockstep_gpu_failure_test(
  InvalidDeviceOrdinal ncclAllReduce=1@1 "Cuda failure 101 'invalid device ordinal'" "fake ncclCommAbort")
lockstep_gpu_failure_test(UnknownCudaError ncclAllReduce=1@1 "" "fake ncclCommAbort")
lockstep_gpu_failure_test(
  SystemError ncclAllReduce=2@1 "socketStartConnect: Connect to 10.0.0.7<4242> failed : Connection refused"
  "fake ncclCommAbort")
lockstep_gpu_failure_test(
  AsyncCudaError async=1@1 "Cuda failure 700 'an illegal memory access was encountered'" "fake ncclCommAbort")
lockstep_gpu_failure_test(RankNeverStartsOperation hang@1 "" "fake ncclCommAbort")
lockstep_gpu_failure_test(DeadlineEndsOperation hang@1 "" "fake ncclCommAbort")
lockstep_gpu_failure_test(RankDies hang@1 "" "fake ncclCommAbort")
lockstep_gpu_failure_test(
  ErrorAfterLastCall async=1@1 "Cuda failure 700 'an illegal memory access was encountered'"
  "FATAL cause=RESOURCE rank=1")
