lockstep_torchrun_page_test(how-to/accelerate-transformers/before 2 accelerate_before.py)
lockstep_python_page_test(how-to/accelerate-transformers/accelerate 2 accelerate_training.py)
lockstep_python_page_test(how-to/accelerate-transformers/transformers 2 transformers_training.py)
