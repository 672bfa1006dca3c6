// An empty header: nccl.h includes cuda_fp16.h and uses nothing from it.
#pragma once
