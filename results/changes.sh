#!/bin/sh
# Make all runs, the table and the picture of results/changes.md:
#
# $ sh results/changes.sh wikipedia.txt novels.txt wikitext-2/
#
# It trains two runs at a time, with one thread each, in about 7 core hours. After an interruption
# the same command continues.
set -eu
export OMP_NUM_THREADS=1
texts="$1 $2"
wikitext2=$3
seeds="0 10 20"
more_seeds="30 40"
memory=configs/study/study_resm_init.py
without=configs/study/study_more.py

prepare() {  # NAME ARGUMENTS...: make data/NAME if it is missing
    name=$1; shift
    [ -d "data/$name" ] || python prepare_data.py "$@"
}
train() {  # run each line of the input: a script and its arguments
    xargs -P 2 -I {} sh -c "python {}"
}
change() {  # NAME SEED CHANGES CONFIG SETTINGS...: print a run's line
    name=$1 seed=$2 changes=$3 config=$4; shift 4
    echo "results/changes.py $changes $config --seed=$((seed + 1)) --warmup_steps=100" \
        "--eval_interval=200 --eval_sequences=256 --usage_interval=0" \
        "--init_from=out/changes/study_s$seed --out=out/changes/${name}_s$seed $*"
}

prepare natural text natural $texts --vocab_size 8192
prepare natural_docs docs --name natural_docs --vocab data/natural
prepare natural_wikitext2 wikitext2 --name natural_wikitext2 --vocab data/natural --from "$wikitext2"
for seed in $seeds $more_seeds; do
    echo "pretrain.py configs/study/study_short.py --seed=$seed --out=out/changes/short_s$seed"
done | train
for seed in $seeds $more_seeds; do
    echo "pretrain.py configs/study/study.py --seed=$seed --max_steps=6000" \
        "--init_from=out/changes/short_s$seed --out=out/changes/study_s$seed"
done | train
for lr in 5e-4 1e-3 2e-4; do  # 5e-4 is best, and study_more.py's own
    change lr${lr}_b 0 none $without --max_steps=800 --lr=$lr
done | train
for seed in $seeds $more_seeds; do
    change b $seed none $without --max_steps=800
    change f $seed none $memory --max_steps=800 --usage_interval=40  # for stale slots
    change zero_values $seed none $memory --max_steps=800 --values=zero
    change zero_topk_16 $seed none $memory --max_steps=800 --values=zero --topk=16
    change zero_slow_topk_16 $seed slow_search $memory --max_steps=800 --values=zero --topk=16 \
        --usage_interval=40
done | train
for seed in $seeds; do
    change b_2000 $seed none $without --max_steps=2000
    change wide_ffn $seed wide_ffn $without --max_steps=800
    for name in silu_gate slow_search decayed_values drop_reads drop_keys qk_norm \
        layer_norm shared_table learned_beta; do
        change $name $seed $name $memory --max_steps=800
    done
    change zero_gate $seed silu_gate $memory --max_steps=800 --values=zero
    change keys_lr $seed none $memory --max_steps=800 --keys_lr=0.1
    change topk_16 $seed none $memory --max_steps=800 --topk=16
    change topk_32 $seed none $memory --max_steps=800 --topk=32
    change keys_64 $seed none $memory --max_steps=800 --n_keys=64
    change keys_256 $seed none $memory --max_steps=800 --n_keys=256
done | train
longer="--max_steps=3200 --warmup_steps=300"
for seed in $seeds; do
    change b_3200 $seed none $without $longer
    change f_3200 $seed none $memory $longer
    change zero_values_3200 $seed none $memory $longer --values=zero
done | train
python results/changes_verdicts.py out/changes
