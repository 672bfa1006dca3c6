lockstep_torchrun_page_test(how-to/from-torch-ddp/before 2 from_torch_ddp_before.py)
lockstep_python_page_test(how-to/from-torch-ddp/backend 2 from_torch_ddp_backend.py)
lockstep_python_page_test(how-to/from-torch-ddp/package 2 from_torch_ddp.py)
