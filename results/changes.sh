#!/bin/sh
# Make all runs, the table and the picture of results/changes.md:
#
# $ sh results/changes.sh wikipedia.txt novels.txt wikitext-2/
#
# It trains two runs at a time, with one thread each, in about 5 core hours. After an interruption
# the same command continues. The rates are tried first: see the page for the chosen one.
set -eu
export OMP_NUM_THREADS=1
texts="$1 $2"
wikitext2=$3
seeds="0 10 20"
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
    name=$1 seed=$2; shift 2
    echo "results/changes.py $* --seed=$((seed + 1)) --init_from=out/changes/study_s$seed" \
        "--warmup_steps=100 --eval_interval=200 --eval_sequences=256 --usage_interval=0" \
        "--out=out/changes/${name}_s$seed"
}

prepare natural text natural $texts --vocab_size 8192
prepare natural_docs docs --name natural_docs --vocab data/natural
prepare natural_wikitext2 wikitext2 --name natural_wikitext2 --vocab data/natural --from "$wikitext2"
for seed in $seeds; do
    echo "pretrain.py configs/study/study_short.py --seed=$seed --out=out/changes/short_s$seed"
done | train
for seed in $seeds; do
    echo "pretrain.py configs/study/study.py --seed=$seed --max_steps=6000" \
        "--init_from=out/changes/short_s$seed --out=out/changes/study_s$seed"
done | train
for lr in 5e-4 1e-3 2e-4; do
    change lr${lr}_b 0 none $without --lr=$lr --max_steps=800
done | train
