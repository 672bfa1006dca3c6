# Sends SIGUSR1 to `lockstep run`, and starts the same command again.
if(LOCKSTEP_PYTHON)
  lockstep_page_test(
    how-to/lightning-slurm "${CMAKE_CURRENT_SOURCE_DIR}/programs/pages/stop_and_resume.sh" ${on_two_ranks}
    "${LOCKSTEP_PYTHON_INTERPRETER}" "${CMAKE_CURRENT_SOURCE_DIR}/programs/pages/lightning_slurm.py")
  set_tests_properties(docs/how-to/lightning-slurm PROPERTIES TIMEOUT 300 ENVIRONMENT
                                                             "PYTHONPATH=${PROJECT_BINARY_DIR}/python")
endif()
