#!/bin/sh
# Make all runs and the table of results/minilm.md, in the folder out/minilm_2:
#
# $ python prepare_data.py glue SST-2 RTE
# $ sh results/minilm.sh wikipedia.txt novels.txt wikitext-2/
#
# It trains two runs at a time, with one thread each, in about 14 core hours. After an interruption
# the same command continues.
set -eu
export OMP_NUM_THREADS=1
texts="$1 $2"
wikitext2=$3
seeds="1 2 3"
weights=sentence-transformers/all-MiniLM-L6-v2
out=out/minilm_2

prepare() {  # NAME ARGUMENTS...: make data/NAME if it is missing
    name=$1; shift
    [ -d "data/$name" ] || python prepare_data.py "$@"
}
train() {  # run each line of the input: a script and its arguments
    xargs -P 2 -I {} sh -c "python {}"
}
pretrain() {  # NAME CHANGE CONFIG SETTINGS...: print a run's line
    name=$1 change=$2 config=$3; shift 3
    echo "results/changes.py $change configs/study/$config.py --dtype=float32 --batch_size=8" \
        "--usage_interval=0 --out=$out/$name $*"
}
finetune() {  # SCRIPT TASK WEIGHTS OUT SEEDS: print the line of a fine-tuning
    echo "$1 configs/study/finetune_minilm_glue.py --task=$2 --dtype=float32" \
        "--init_from=$3 --out=$out/$4 --seeds=$5"
}

python prepare_data.py weights $weights
prepare natural_bert text natural_bert $texts --vocab data/weights/$weights/vocab.txt
prepare bert_docs docs --name bert_docs --vocab data/natural_bert
prepare bert_wikitext2 wikitext2 --name bert_wikitext2 --vocab data/natural_bert --from "$wikitext2"
pretrain head head_only minilm --init_from=$weights --lr=1e-3 | train
for lr in 1e-4 3e-4; do  # 500 steps do not leave the plateau
    pretrain head_$lr none minilm_more --init_from=$out/head --lr=$lr --seed=1 --max_steps=500
done | train
pretrain base none minilm_more --init_from=$out/head --lr=3e-4 --seed=0 --max_steps=3000 | train
for lr in 1e-5 3e-5 1e-4; do
    pretrain rate_$lr none minilm_more --init_from=$out/base --lr=$lr --seed=1 --max_steps=500
done | train
for seed in $seeds; do
    settings="--init_from=$out/base --lr=1e-5 --seed=$seed"
    pretrain b_s$seed none minilm_more $settings
    pretrain f_s$seed none minilm_resm_init $settings
    pretrain f_zero_s$seed none minilm_resm_init $settings --values=zero
    pretrain e_s$seed none minilm_pkm_init $settings
done | train
{  # a check: does the gain stay at a rate where the model without memory gains more?
    pretrain b_1e-4_s1 none minilm_more --init_from=$out/base --lr=1e-4 --seed=1
    pretrain f_1e-4_s1 none minilm_resm_init --init_from=$out/base --lr=1e-4 --seed=1
} | train
{
    finetune finetune.py SST-2 $weights own_sst2 10
    finetune results/trainer.py SST-2 $weights trainer_sst2.json 10
    finetune finetune.py SST-2 $out/head head_sst2 3
    finetune finetune.py SST-2 $out/base base_sst2 3
    finetune finetune.py RTE $weights own_rte 1
    for seed in $seeds; do
        for system in b f f_zero e; do
            finetune finetune.py SST-2 $out/${system}_s$seed ${system}_s${seed}_sst2 3
        done
        for system in b f; do
            finetune finetune.py RTE $out/${system}_s$seed ${system}_s${seed}_rte 1
        done
    done
} | train
python results/minilm_verdicts.py $out
