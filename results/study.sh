#!/bin/sh
# Claims 1 to 7 of results/study.md, on a small BERT and on MiniLM; fine-tuning is not in it:
# sh results/study.sh wikipedia.txt novels.txt wikitext-2/
# Two runs at a time, one thread each. Stopped, the same command goes on where it was.
# A rehearsal: STEPS=20 sh results/study.sh ...
set -eu
export OMP_NUM_THREADS=1
texts="$1 $2"
wikitext2=$3

prepare() {  # NAME ARGUMENTS...: makes data/NAME unless it is there
    name=$1; shift
    [ -d "data/$name" ] || python prepare_data.py "$@"
}
pretrain() {  # each line of the input is a run
    xargs -P 2 -L 1 python pretrain.py ${STEPS:+--max_steps=$STEPS}
}

prepare natural text natural $texts --vocab_size 8192
prepare natural_docs docs --name natural_docs --vocab data/natural
prepare natural_wikitext2 wikitext2 --name natural_wikitext2 --vocab data/natural --from "$wikitext2"

seeds="0 10 20"
for seed in $seeds; do
    for system in study study_pkm study_resm; do
        echo "configs/$system.py --seed=$seed --out=out/${system}_s$seed"
    done
done | pretrain
for seed in $seeds; do
    for system in study_more study_pkm_init study_resm_init study_resm_init_ffn; do
        echo "configs/$system.py --seed=$((seed + 1)) --init_from=out/study_s$seed --out=out/${system}_s$seed"
    done
done | pretrain

runs=""
for seed in $seeds; do
    for system in study study_more study_pkm study_resm study_pkm_init study_resm_init study_resm_init_ffn; do
        runs="$runs out/${system}_s$seed"
    done
done
python measure.py table $runs --data natural natural_docs natural_wikitext2 --out results/study/table2
python measure.py staleness out/study_pkm_s0 out/study_resm_s0 out/study_pkm_init_s0 out/study_resm_init_s0 \
    --out results/study/figure2
python measure.py curves out/study_s0 out/study_more_s0 out/study_pkm_init_s0 out/study_resm_init_s0 \
    out/study_resm_init_ffn_s0 --out results/study/figure3

# MiniLM: the masked-LM head is recovered, then every system is trained on from there
python prepare_data.py weights sentence-transformers/all-MiniLM-L6-v2
prepare natural_bert text natural_bert $texts --vocab data/weights/sentence-transformers/all-MiniLM-L6-v2/vocab.txt
prepare bert_wikitext2 wikitext2 --name bert_wikitext2 --vocab data/natural_bert --from "$wikitext2"
echo configs/minilm.py | pretrain
for system in minilm_more minilm_pkm_init minilm_resm_init minilm_resm_init_ffn; do
    echo configs/$system.py
done | pretrain
minilm="out/minilm out/minilm_more out/minilm_pkm_init out/minilm_resm_init"
python measure.py table $minilm out/minilm_resm_init_ffn --data natural_bert bert_wikitext2 --out results/study/minilm
python measure.py curves $minilm out/minilm_resm_init_ffn --out results/study/minilm_figure3
