lockstep_python_page_test(how-to/python-gpus/program 2 python_gpus.py)
lockstep_torchrun_page_test(how-to/python-gpus/before 2 python_gpus_before.py)
