lockstep_python_page_test(how-to/slow-networks 2 slow_networks.py)
