#!/bin/sh
# Make all runs, tables and pictures of results/teach.md:
#
# $ sh results/teach.sh SMOLLM2_FOLDER wikipedia.txt wikitext-2/test.txt novels.txt
#
# It trains two runs at a time, with one thread each, in about 4 hours of two cores. Finished runs
# are left out. The demo's BERT must be trained before (python pretrain.py configs/demo.py).
set -eu
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
model=$1 ordinary=$2 wikitext=$3 novels=$4

teach() {  # run each line of the input: a name, then settings
    while read -r name settings; do
        [ -e "results/teach/$name.jsonl" ] || echo "--out=results/teach/$name.jsonl $settings"
    done | xargs -P 2 -I {} sh -c "python results/teach.py --model=$model --ordinary=$ordinary \
        --wikitext=$wikitext --novels=$novels {}"
}

# 1. What is trained: rates, numbers of rows, sizes, chosen on seed 9
teach << END
search_full_2e-5 --seed=9 --method=full --lr=2e-5
search_full_5e-5 --seed=9 --method=full --lr=5e-5
search_full_1e-4 --seed=9 --method=full --lr=1e-4
search_lora_5e-4 --seed=9 --method=lora --lr=5e-4
search_lora_1e-3 --seed=9 --method=lora --lr=1e-3
search_step --seed=9 --method=step --rows=2000 --power=1
search_r10000_power1 --seed=9 --rows=10000 --power=1
search_r10000_lr0.1 --seed=9 --rows=10000 --lr=0.1
search_r3000 --seed=9 --goal=2 --steps=110
search_r6000 --seed=9 --goal=2 --steps=90 --rows=6000
search_r5000_p8 --seed=9 --goal=2 --steps=80 --rows=5000 --power=8 --blocks=160
search_l8 --seed=9 --goal=2 --steps=100 --rows=1500 --layers=2,3,4,5,6,7,8,9
search_phrasings10 --seed=9 --goal=2 --steps=110 --phrasings=10
search_n128 --seed=9 --goal=2 --steps=80 --n_keys=128 --rows=1500
search_512 --seed=9 --goal=2 --steps=90 --n_keys=512
search_topk64 --seed=9 --goal=2 --steps=80 --topk=64 --rows=4000
search_f30_r900 --seed=9 --goal=2 --steps=40 --facts=30 --rows=900
END

# 2. Claims 1 to 3
for seed in 1 2 3; do
    echo "rows_$seed --seed=$seed --goal=2 --steps=110"
    echo "all_$seed --seed=$seed --method=all --lr=0.1"
    echo "lora_$seed --seed=$seed --method=lora --lr=5e-4"
    echo "full_$seed --seed=$seed --method=full --lr=5e-5"
done | teach

# 3. Ten lessons, 1,000 facts (claims 4 and 5)
teach << END
lessons_rows --lessons=10 --facts=30
lessons_full --lessons=10 --facts=30 --method=full --lr=5e-5
lessons_lora --lessons=10 --facts=30 --method=lora --lr=5e-4
many_300 --facts=300 --rows=6000 --steps=160
many_1000 --facts=1000 --rows=20000 --steps=320
END

# 4. The demo's BERT, by masked words (claim 7)
[ -e out/demo_bert ] || python -m lib.for_transformers.export out/demo out/demo_bert
bert="--model=out/demo_bert --layers=1,2 --key_dim=64"
teach << END
bert_rows $bert --lr=0.1 --steps=400
bert_rows_512 $bert --lr=0.1 --steps=400 --n_keys=512
bert_full $bert --method=full --lr=1e-3 --steps=250
END

python results/teach_verdicts.py
