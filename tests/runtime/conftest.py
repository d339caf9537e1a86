"""One thread per process: the tests' tensors are tiny, and several threads on few cores wait for each other."""

import torch

torch.set_num_threads(1)
