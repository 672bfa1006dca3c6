lockstep_console_test(how-to/two-jobs)
