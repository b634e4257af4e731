#!/bin/sh
# Try this code on this machine's card, and write results/gpu_<card>.md: see results/gpu.py.
here=$(dirname "$0")
PYTHONPATH="$here/.." exec python "$here/gpu.py" "$@"
