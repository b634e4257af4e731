#!/bin/sh
# Try this code on a card or several: is it right, and how fast? About ten minutes.
#
#   sh reproduce/gpu.sh               # writes out/gpu/page.md: please send it as an issue
#   DEVICE=cpu sh reproduce/gpu.sh    # the same without a card, cut short
#
# It goes on after a failure. The exit status is the number of commands that failed; the page names
# them first. The whole output of a command is in out/gpu/*.log.
cd "$(dirname "$0")/.." || exit 2
rm -rf out/gpu && mkdir -p out/gpu || exit 2
device=${DEVICE:-cuda} failed="" cut="" sizes="--sizes base" lengths="2048 16384" reads="" ranks=1
trained="configs/base.py configs/base_resm.py"
for n in 8 4 2 1; do [ "$(nvidia-smi -L 2> /dev/null | wc -l)" -lt $n ] || { ranks=$n && break; }; done
if [ "$device" = cpu ]; then
    cut="--max_steps=20 --warmup_steps=2 --eval_sequences=64" sizes="--sizes demo --lengths 16 --rounds 1"
    lengths="64 --keys 64" reads="64 64" trained="configs/demo.py configs/demo_resm.py" ranks=2
    export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
fi

try() {  # NAME COMMAND...: run it, and put its tables and results on the page
    name=$1 && shift
    began=$(date +%s)
    "$@" > "out/gpu/$name.log" 2>&1
    status=$?
    [ $status = 0 ] || failed="$failed $name"
    printf '\n`%s`: status %d, %d s\n\n' "$*" $status $(($(date +%s) - began)) >> out/gpu/body.md
    shown='^\||^step .*: perplexity|[0-9] (passed|failed)|[Ee]rror|^(ranks|pilot|paper):'
    grep -E "$shown" "out/gpu/$name.log" | tail -n 20 >> out/gpu/body.md
}

try card env CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-0}" python -m pytest -q tests/test_device.py
try demo python pretrain.py configs/demo.py --out=out/gpu/demo $cut
try beside_cpu python -m reproduce.card steps out/gpu/demo "$device"
same="reproduce.card same out/gpu/demo $device out/gpu/one.pt"
try one python -m $same
try all torchrun --standalone --nproc_per_node=$ranks -m $same
try layer python bench.py layer --lengths $lengths
try bandwidth python -m reproduce.card bandwidth "$device" $reads
try train python bench.py train $trained
try inference python bench.py $sizes
for scale in pilot paper; do try hours_$scale sh reproduce.sh $scale --list; done
[ "$device" = cpu ] || try tests python -m pytest -q

{
    printf '# A card, at commit %s\n\n' "$(git rev-parse --short HEAD)"
    [ "$device" = cpu ] || nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
    python -c 'import torch; print("\ntorch", torch.__version__, "CUDA", torch.version.cuda)'
    printf '\nNot as expected:%s\n' "${failed:- nothing}"
    cat out/gpu/body.md
} > out/gpu/page.md
cat out/gpu/page.md
exit "$(echo $failed | wc -w)"
