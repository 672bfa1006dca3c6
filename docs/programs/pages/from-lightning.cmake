lockstep_torchrun_page_test(how-to/from-lightning/before 2 from_lightning_before.py)
lockstep_python_page_test(how-to/from-lightning/loop 2 from_lightning.py)
