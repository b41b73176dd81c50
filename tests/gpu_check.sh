#!/usr/bin/env bash
# What only a GPU can show, in some minutes: kernels against float64, training steps on the device, speed.
# Run in the repository's folder with an environment that has a CUDA build of torch:
#
#     tests/gpu_check.sh          # PYTHON=python3 RANKS=8
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
RANKS=${RANKS:-8}

"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "no GPU"; print(torch.cuda.get_device_name(), torch.__version__)'
"$PYTHON" -m pytest -q -m gpu
"$PYTHON" tests/benchmarks/bench_optimizers.py --device cuda --ranks "$RANKS"
"$PYTHON" tests/benchmarks/bench_optimizers.py --device cuda --ranks "$RANKS" --deepspeed \
  || echo "DeepSpeed's kernels could not be compiled here; the rest was checked"
