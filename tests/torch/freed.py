"""One rank that frees memory under an operation, past the backend: AddressSanitizer must notice
(test_torch_sanitized.py)."""

import os
import time

import torch.distributed as dist
import unbroken.torch  # noqa: F401
from unbroken import coll

import torch

dist.init_process_group("unbroken")
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
if dist.get_rank() == 1:
    time.sleep(1)
tensor = torch.ones(300_000)
at = tensor.data_ptr()
backend._comm.begin("AllReduce", at, at, tensor.numel(), coll.Type.FLOAT32, coll.Op.SUM)
del tensor
time.sleep(3)
os._exit(0)
