lockstep_python_page_test(how-to/several-models/programs 2 several_models.py)
lockstep_torchrun_page_test(how-to/several-models/before 2 several_models_before.py)
