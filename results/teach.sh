#!/bin/sh
# Make all runs, tables and pictures of results/teach.md:
#
# $ sh results/teach.sh SMOLLM2_FOLDER wikipedia.txt wikitext-2/test.txt novels.txt
#
# It trains two runs at a time, with one thread each, in about 8 hours of two cores. Finished runs
# are left out, interrupted ones go on. The demo's BERT must be trained before
# (python pretrain.py configs/demo.py).
set -eu
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
model=$1 ordinary=$2 wikitext=$3 novels=$4

teach() {  # run each line of the input: a name, then settings
    while read -r name settings; do
        [ -e "results/teach/$name.jsonl" ] || echo "--out=results/teach/$name.jsonl $settings"
    done | xargs -P 2 -I {} sh -c "python results/teach.py --model=$model --ordinary=$ordinary \
        --wikitext=$wikitext --novels=$novels {}"
}

# 1. What is trained: rates, scores, numbers of rows, sizes, chosen on seed 9
teach << END
search_full_1e-5 --seed=9 --method=full --lr=1e-5 --steps=250
search_full_2e-5 --seed=9 --method=full --lr=2e-5
search_full_5e-5 --seed=9 --method=full --lr=5e-5
search_full_1e-4 --seed=9 --method=full --lr=1e-4
search_lora_1e-4 --seed=9 --method=lora --lr=1e-4 --steps=250
search_lora_2.5e-4 --seed=9 --method=lora --lr=2.5e-4
search_lora_5e-4 --seed=9 --method=lora --lr=5e-4
search_lora_1e-3 --seed=9 --method=lora --lr=1e-3
search_lora_2e-3 --seed=9 --method=lora --lr=2e-3 --steps=80
search_all_0.01 --seed=9 --method=all --lr=0.01
search_all_0.03 --seed=9 --method=all --lr=0.03 --steps=120
search_all_0.1 --seed=9 --method=all --lr=0.1 --steps=80
search_all_0.3 --seed=9 --method=all --lr=0.3 --steps=60
search_step --seed=9 --method=step --rows=2000 --power=1 --tf=reads
search_r10000_power1 --seed=9 --rows=10000 --power=1 --tf=reads
search_r10000_lr0.1 --seed=9 --rows=10000 --lr=0.1 --tf=reads
search_r3000 --seed=9 --goal=2 --steps=110 --tf=reads
search_r3000_known --seed=9 --goal=2 --steps=110 --tf=reads
search_r3000_lr0.1 --seed=9 --lr=0.1 --goal=2 --steps=160 --tf=reads
search_r3000_lr1 --seed=9 --lr=1 --goal=2 --steps=80 --tf=reads
search_r6000 --seed=9 --goal=2 --steps=90 --rows=6000 --tf=reads
search_r5000_p8 --seed=9 --goal=2 --steps=80 --rows=5000 --power=8 --blocks=160 --tf=reads
search_l8 --seed=9 --goal=2 --steps=100 --rows=1500 --layers=2,3,4,5,6,7,8,9 --tf=reads
search_phrasings10 --seed=9 --goal=2 --steps=110 --phrasings=10 --tf=reads
search_n128 --seed=9 --goal=2 --steps=80 --n_keys=128 --rows=1500 --tf=reads
search_512 --seed=9 --goal=2 --steps=90 --n_keys=512 --tf=reads
search_topk64 --seed=9 --goal=2 --steps=80 --topk=64 --rows=4000 --tf=reads
search_f30_r900 --seed=9 --goal=2 --steps=40 --facts=30 --rows=900 --tf=reads
search_others_64 --seed=9 --goal=2 --steps=110 --others=64 --tf=reads
search_log_0 --seed=9 --goal=2 --steps=80
search_log_64 --seed=9 --goal=2 --steps=80 --others=64
search_log_300 --seed=9 --goal=2 --steps=80 --others=300
search_log_300_r8000 --seed=9 --goal=2 --steps=80 --others=300 --rows=8000
search_sgd_1e4 --seed=9 --sgd=True --lr=1e4 --steps=80 --dtype=float32
search_sgd_3e4 --seed=9 --sgd=True --lr=3e4 --steps=90 --dtype=float32
search_query_1e-4 --seed=9 --query_lr=1e-4 --steps=80 --dtype=float32
search_query_1e-3 --seed=9 --query_lr=1e-3 --steps=80 --dtype=float32
END

# 2. Claims 1 to 3, in two rounds
for seed in 1 2 3; do
    echo "round_1/rows_$seed --seed=$seed --goal=2 --steps=110 --tf=reads"
    echo "round_1/all_$seed --seed=$seed --method=all --lr=0.1"
    echo "round_1/lora_$seed --seed=$seed --method=lora --lr=5e-4"
    echo "round_1/full_$seed --seed=$seed --method=full --lr=5e-5"
    echo "rows_$seed --seed=$seed --goal=2 --steps=110"
    echo "keep_$seed --seed=$seed --goal=2 --steps=80 --others=300"
    echo "sgd_$seed --seed=$seed --sgd=True --lr=3e4 --steps=100 --dtype=float32"
    echo "all_$seed --seed=$seed --method=all --lr=0.01"
    echo "lora_$seed --seed=$seed --method=lora --lr=2.5e-4"
    echo "full_$seed --seed=$seed --method=full --lr=1e-5 --steps=260"
done | teach

# 3. Ten lessons, 1,000 facts (claims 4 and 5)
teach << END
lessons_rows --lessons=10 --facts=30 --tf=reads
lessons_full --lessons=10 --facts=30 --method=full --lr=5e-5
lessons_lora --lessons=10 --facts=30 --method=lora --lr=5e-4
lessons_100_sgd --lessons=10 --sgd=True --lr=3e4 --dtype=float32
lessons_100_keep --lessons=10 --keep_lessons=True --sgd=True --lr=3e4 --dtype=float32
lessons_100_full --lessons=10 --method=full --lr=1e-5 --steps=260 --dtype=float32
lessons_100_lora_4 --lessons=4 --method=lora --lr=2.5e-4 --dtype=float32
many_300 --facts=300 --rows=6000 --steps=160 --tf=reads
many_1000 --facts=1000 --rows=20000 --steps=320 --tf=reads
many_1000_sgd --facts=1000 --rows=20000 --sgd=True --lr=3e4 --steps=300 --dtype=float32
END

# 4. 100,000 tokens of torch's docstrings (claim 6)
text=out/docstrings.txt
python -c "import random
from lib.corpus.text import docstrings
files = [texts for package, texts in docstrings()[1] if package == 'torch']
random.Random(0).shuffle(files)
print('\n\n'.join(text for texts in files for text in texts))" > $text
learn="--text=$text --tokens=100000 --batch=8 --steps=48 --dtype=float32"
teach << END
text_rows $learn --rows=20000 --lr=0.1
text_lora $learn --method=lora --lr=3e-4
END

# 5. The demo's BERT, by masked words (claim 7)
[ -e out/demo_bert ] || python -m lib.for_transformers.export out/demo out/demo_bert
bert="--model=out/demo_bert --layers=1,2 --key_dim=64"
teach << END
bert_rows $bert --lr=0.1 --steps=400 --tf=reads
bert_rows_512 $bert --lr=0.1 --steps=400 --n_keys=512 --tf=reads
bert_full $bert --method=full --lr=1e-3 --steps=250
END

python results/teach_verdicts.py
