lockstep_python_page_test(how-to/python-recipes/programs 2 python_recipes.py)
lockstep_torchrun_page_test(how-to/python-recipes/before 2 python_recipes_before.py)
# Stopped in the first start, resumed in the second one.
lockstep_page_test(
  how-to/python-recipes/stop
  sh
  -c
  "dir=$(mktemp -d) && trap 'rm -rf \"$dir\"' EXIT && cd \"$dir\" && (\"$@\" ck || test $? = 75) && \"$@\" ck"
  sh
  ${on_two_ranks}
  "${LOCKSTEP_PYTHON_INTERPRETER}"
  "${CMAKE_CURRENT_SOURCE_DIR}/programs/pages/python_stop_resume.py")
set_tests_properties(docs/how-to/python-recipes/stop PROPERTIES ENVIRONMENT "PYTHONPATH=${PROJECT_BINARY_DIR}/python")
