# pdb on rank 0 reads its commands from the standard input of lockstep run.
lockstep_page_test(
  how-to/debugging/pdb sh -c "printf 'p step * 1000\\nc\\n' | \"$@\" 2>&1 | grep -F '[0] (Pdb) 3000'" sh ${lockstep} run
  -n 2 --bind none --stdin 0 --hang-timeout 0 -- "${LOCKSTEP_PYTHON_INTERPRETER}"
  "${CMAKE_CURRENT_SOURCE_DIR}/programs/pages/debugging.py")
set_tests_properties(docs/how-to/debugging/pdb PROPERTIES LABELS "docs;shard:pages" PROCESSORS 2 ENVIRONMENT
                                                          "${page_environment}")
