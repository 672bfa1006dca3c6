lockstep_python_page_test(how-to/troubleshooting 2 troubleshooting.py)
