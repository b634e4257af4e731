#!/bin/sh
# Make all runs, tables and pictures of results/teach.md:
#
# $ sh results/teach.sh MODEL_FOLDER wikipedia.txt wikitext-2/test.txt novels.txt
#
# It trains two runs at a time, with one thread each, in 4 hours of two cores. Runs that are
# finished are left out.
set -eu
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
model=$1 ordinary=$2 wikitext=$3 novels=$4
teach() {  # run each line of the input: a name and settings
    while read -r name settings; do
        [ -e "results/teach/$name.jsonl" ] || echo "--out=results/teach/$name.jsonl $settings"
    done | xargs -P 2 -I {} sh -c "python results/teach.py --model=$model --ordinary=$ordinary \
        --wikitext=$wikitext --novels=$novels {}"
}
