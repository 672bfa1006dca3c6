lockstep_python_page_test(how-to/batch-size/trainings 2 batch_size.py)
