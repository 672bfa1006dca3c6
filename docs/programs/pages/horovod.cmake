lockstep_python_page_test(how-to/from-apex 2 from_apex.py)
lockstep_python_page_test(how-to/horovod/before 2 from_horovod_before.py)
lockstep_python_page_test(how-to/horovod 2 from_horovod.py)
lockstep_torchrun_page_test(how-to/own-all-reduce/before 2 own_all_reduce_before.py)
lockstep_python_page_test(how-to/own-all-reduce/python 2 own_all_reduce.py)

lockstep_executable(
  docs_own_all_reduce
  SOURCES programs/pages/own_all_reduce.cc
  LINK Lockstep::lockstep
  PCH programs
  NEEDS lockstep_program)
lockstep_page_test(how-to/own-all-reduce ${on_two_ranks} "$<TARGET_FILE:docs_own_all_reduce>")
