"""Runs a script in fp64 and saves the weights it ends with: `plain_loop_worker.py SCRIPT OUTPUT`."""

import os
import runpy
import sys

import torch

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
model = runpy.run_path(sys.argv[1])["model"]
torch.save(model.state_dict(), f"{sys.argv[2]}.{os.environ.get('RANK', 'alone')}")
