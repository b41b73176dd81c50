"""What the ranks of forked_ranks.py share: imported once, before they are forked."""

import torch._dynamo
import torch._inductor.compile_fx
import torch.utils.tensorboard  # noqa: F401

from pretraining import launch  # noqa: F401
from pretraining.distributed import import_deepspeed

import_deepspeed()

import deepspeed.runtime.zero.muon.original_muon  # noqa: E402, F401 (the engine imports it, and with it a compiler)
