#!/bin/sh
# Make all runs, tables and figures of results/study.md:
#
# $ python prepare_data.py glue RTE SST-2 && python prepare_data.py squad
# $ sh results/study.sh wikipedia.txt novels.txt wikitext-2/
#
# It trains two runs at a time, with one thread each. After an interruption the same command
# continues. For a rehearsal, run `STEPS=20 sh results/study.sh ...` in another clone.
set -eu
export OMP_NUM_THREADS=1
texts="$1 $2"
wikitext2=$3
seeds="0 10 20"
mkdir -p results/study

prepare() {  # NAME ARGUMENTS...: make data/NAME if it is missing
    name=$1; shift
    [ -d "data/$name" ] || python prepare_data.py "$@"
}
train() {  # run each line of the input: a script and its arguments
    xargs -P 2 -I {} sh -c "python {} ${STEPS:+--max_steps=$STEPS}"
}

# 1. A small BERT from scratch, three seeds (claims 1 to 7)
prepare natural text natural $texts --vocab_size 8192
prepare natural_docs docs --name natural_docs --vocab data/natural
prepare natural_wikitext2 wikitext2 --name natural_wikitext2 --vocab data/natural --from "$wikitext2"
for seed in $seeds; do
    for system in study study_pkm study_resm; do
        echo "pretrain.py configs/study/${system}_short.py --seed=$seed --out=out/${system}_short_s$seed"
    done
done | train
for seed in $seeds; do
    for system in study study_pkm study_resm; do
        echo "pretrain.py configs/study/$system.py --seed=$seed --init_from=out/${system}_short_s$seed" \
            "--out=out/${system}_s$seed"
    done
done | train
for seed in $seeds; do
    for system in study_more study_pkm_init study_resm_init study_resm_init_ffn; do
        echo "pretrain.py configs/study/$system.py --seed=$((seed + 1)) --init_from=out/study_s$seed" \
            "--out=out/${system}_s$seed"
    done
done | train

runs=""
for system in study study_more study_pkm study_resm study_pkm_init study_resm_init study_resm_init_ffn; do
    for seed in $seeds; do
        runs="$runs out/${system}_s$seed"
    done
done
python measure.py table $runs --data natural natural_docs natural_wikitext2 --out results/study/table2
python measure.py staleness out/study_pkm_s0 out/study_resm_s0 out/study_pkm_init_s0 out/study_resm_init_s0 \
    --names "PKM, from scratch (c)" "ResM, from scratch (d)" "FFNs replaced, PKM (e)" \
    "memory added, ResM (f)" --out results/study/figure2
python measure.py curves out/study_more_s0 out/study_pkm_init_s0 out/study_resm_init_s0 \
    out/study_resm_init_ffn_s0 --names "without memory (b)" "FFNs replaced, PKM (e)" \
    "memory added, ResM (f)" "memory beside new FFNs, ResM'" --out results/study/figure3

# Why slots fall out of use: (b) and (f) of seed 0 at other rates, and (f) with one other change
more="--seed=1 --init_from=out/study_s0"
fast="$more --lr=2e-3 --out=out/lr2e-3"
train <<END
pretrain.py configs/study/study_more.py ${fast}_more
pretrain.py configs/study/study_resm_init.py ${fast}_resm_init
pretrain.py configs/study/study_resm_init.py ${fast}_warmup --warmup_steps=2000
pretrain.py configs/study/study_resm_init.py ${fast}_value_lr_low --value_lr=1e-3
pretrain.py configs/study/study_resm_init.py ${fast}_value_lr_high --value_lr=1.6e-2
pretrain.py configs/study/study_resm_init.py ${fast}_keys_lr --keys_lr=0.1
pretrain.py configs/study/study_resm_init.py ${fast}_no_norm --query_norm=False
pretrain.py configs/study/study_more.py $more --lr=2e-4 --out=out/lr2e-4_more
END
for seed in $seeds; do
    echo "pretrain.py configs/study/study_resm_init.py --keys_lr=0.1 --seed=$((seed + 1))" \
        "--init_from=out/study_s$seed --out=out/lr5e-4_keys_lr_s$seed"
done | train
python measure.py curves out/study_more_s0 out/study_pkm_init_s0 out/study_resm_init_s0 \
    out/lr2e-3_more out/lr2e-3_resm_init --names "without memory" "FFNs replaced (PKM)" \
    "memory added (ResM)" "without memory, rate x 4" "memory added (ResM), rate x 4" \
    --out assets/study  # README's picture
python measure.py curves out/lr2e-3_resm_init out/lr2e-3_warmup out/lr2e-3_value_lr_low \
    out/lr2e-3_value_lr_high out/lr2e-3_keys_lr out/lr2e-3_no_norm --names "rate x 4" \
    "long warm-up" "low rate of values" "high rate of values" "slower sub-keys" "no query norm" \
    --out results/study/drift

# 2. MiniLM: train a masked-LM head for it, then every system from there
weights=sentence-transformers/all-MiniLM-L6-v2
python prepare_data.py weights $weights
prepare natural_bert text natural_bert $texts --vocab data/weights/$weights/vocab.txt
prepare bert_docs docs --name bert_docs --vocab data/natural_bert
prepare bert_wikitext2 wikitext2 --name bert_wikitext2 --vocab data/natural_bert --from "$wikitext2"
echo pretrain.py configs/study/minilm.py | train
for system in minilm_more minilm_pkm_init minilm_resm_init minilm_resm_init_ffn; do
    echo pretrain.py configs/study/$system.py
done | train
trained_on="out/minilm_more out/minilm_pkm_init out/minilm_resm_init"
python measure.py table out/minilm $trained_on out/minilm_resm_init_ffn \
    --data natural_bert bert_docs bert_wikitext2 --dtype bfloat16 --out results/study/minilm
python measure.py curves $trained_on out/minilm_resm_init_ffn --names "without memory (b)" \
    "FFNs replaced, PKM (e)" "memory added, ResM (f)" "memory beside new FFNs, ResM'" \
    --out results/study/minilm_figure3
systems="out/minilm $trained_on"

# 3. Fine-tuning (claim 8), also with the memory's values frozen (claim 9)
for task in RTE SST-2; do
    for system in $systems; do
        echo "finetune.py configs/study/finetune_minilm_glue.py --task=$task --init_from=$system --seeds=3"
    done
done | train
for system in out/minilm_pkm_init out/minilm_resm_init; do
    echo "finetune.py configs/study/finetune_minilm_glue.py --task=SST-2 --init_from=$system --seeds=3" \
        "--update_memory=False"
done | train
for system in $systems; do
    echo "finetune.py configs/study/finetune_minilm_squad.py --init_from=$system"
done | train
python measure.py glue out/minilm*_rte out/minilm*_sst2 out/minilm*_squad out/minilm*_fixed \
    --out results/study/tables4_5
tuned="out/minilm_pkm_init_sst2 out/minilm_resm_init_sst2 --sequences 8192"  # of SST-2's 67,349
python measure.py table $tuned --out results/study/table6
python measure.py by_class $tuned --names "FFNs replaced (e)" "memory added (f)" \
    --out results/study/figure4

# 4. finetune.py beside transformers' Trainer, from MiniLM's own weights
for task in "RTE --seeds=3" "SST-2 --seeds=6"; do
    for script in finetune.py results/trainer.py; do
        echo "$script configs/study/finetune_minilm_glue.py --init_from=$weights --task=$task"
    done
done | train
for script in finetune.py results/trainer.py; do
    echo "$script configs/study/finetune_minilm_squad.py --init_from=$weights"
done | train
python results/verdicts.py out >results/study/verdicts.txt
