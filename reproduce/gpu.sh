#!/bin/sh
# Try this code on a CUDA card: the tests, a training of the demo, every benchmark.
#
#   sh reproduce/gpu.sh        # writes results/gpu.md; whole outputs go to out/gpu/*.log
#
# It goes on after a failure. The exit status is the number of commands that failed.
cd "$(dirname "$0")/.." || exit 2
rm -rf out/gpu/*.log out/gpu/demo out/gpu/nccl out/gpu/resm && mkdir -p out/gpu || exit 2
page=results/gpu.md
failed=0

try() {  # name, command: run it, and put its tables and results on the page
    name=$1 && shift
    start=$(date +%s)
    "$@" > "out/gpu/$name.log" 2>&1
    status=$?
    [ $status = 0 ] || failed=$((failed + 1))
    printf '\n`%s`: status %d, %d s\n\n```\n' "$*" $status $(($(date +%s) - start)) >> $page
    grep -E '^\||^device |^done|: perplexity|[0-9] (passed|failed)|[Ee]rror' \
        "out/gpu/$name.log" | tail -n 30 >> $page
    echo '```' >> $page
}

{
    printf '# A GPU\n\nWritten by `reproduce/gpu.sh` at commit %s.\n\n' "$(git rev-parse --short HEAD)"
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
    python -c 'import torch; print("\ntorch", torch.__version__, "CUDA", torch.version.cuda)'
} > $page
try tests python -m pytest -q
try card env CUDA_VISIBLE_DEVICES=0 python -m pytest -q tests/test_device.py
try demo python pretrain.py configs/demo.py --out=out/gpu/demo
try nccl torchrun --standalone --nproc_per_node=gpu pretrain.py configs/demo.py --max_steps=400 \
    --out=out/gpu/nccl
try beside_cpu python -m reproduce.card out/gpu/demo
try resm python pretrain.py configs/demo_resm_init.py --init_from=out/gpu/demo --out=out/gpu/resm
try table python measure.py table out/gpu/demo out/gpu/resm --data docs
try inference python bench.py
try layer python bench.py layer --lengths 512 2048 8192 16384
try train python bench.py train
try large python bench.py train configs/large.py configs/large_resm.py --accumulation=4
try causal python bench.py causal
try slots python bench.py causal --slots
try reproduce sh reproduce.sh quick
exit $failed
