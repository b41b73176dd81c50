"""What the ranks of forked_ranks.py share: imported once, before they are forked."""

import torch.utils.tensorboard

from pretraining import launch  # noqa: F401
from pretraining.distributed import import_deepspeed

import_deepspeed()
