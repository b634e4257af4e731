#!/bin/sh
# Reproduce the paper: from text to a page with every table and figure, the paper's numbers beside.
#
#   sh reproduce.sh quick            # some minutes: every step, cut short
#   sh reproduce.sh demo             # about an hour on two cores, no network: every system, small
#   sh reproduce.sh paper            # the paper's sizes, on all GPUs of this machine: weeks
#   sh reproduce.sh paper table2     # one step, or several; those that it needs must be done
#   sh reproduce.sh paper --list     # print what would run, and run nothing
#   Steps: data, pretrain, finetune, table1, 2, 4 to 7, figure2 to 4, causal, slots, page.
# All results lie in out/reproduce_SCALE/. A command that is done is skipped; its output is in logs/.
# After a failure or an interruption the same line goes on. Delete the folder to begin anew. Jobs run
# side by side: one on each GPU of CUDA_VISIBLE_DEVICES or of the machine; JOBS=2 on one without.
set -eu
cd "$(dirname "$0")"
scale=${1:-}
# 1) A scale: its systems by the paper's letters, texts, tasks, seeds, and what cuts a command short
train_cut="" tune_cut="" bench_cut="" sizes="" slots="" short="" more_seeds=""
case $scale in
paper)
    tests="wikitext2 wikitext103 pg19"
    a=base b=base_500k_more c=base_pkm d=base_resm e=base_pkm_init f=base_resm_init
    google="bert-base-uncased bert-large-uncased"  # (g) and (h)
    small=distilbert-base-uncased small_resm=distil_resm_init middle=bert-base-uncased  # Table 7
    causal="causal_12 causal_24 causal_12_pkm causal_12_memory"
    table4="squad mnli qqp qnli sst2 cola" table5="squad mnli sst2 cola"
    table6="mnli sst2 cola" table7="squad mnli sst2" figure4=sst2
    first=$a scratch="$c $d" seeds="0 1 2 3 4"
    ;;
demo | quick)
    tests=docs
    a=demo b=demo_more c=demo_pkm d=demo_resm e=demo_pkm_init f=demo_resm_init
    google=demo_large small=demo_distil small_resm=demo_distil_resm_init middle=demo
    causal="demo_causal demo_causal_8 demo_causal_pkm demo_causal_memory"
    table4=docs_task table5=docs_task table6=docs_task table7=docs_task figure4=docs_task
    first="$a $small" scratch="$c $d $google" short="--lengths 128"  # its positions
    more_seeds="1 2"  # of pretraining (a), (b), (e) and (f): out/reproduce_demo/demo_s1
    seeds="0 1 2" tune_cut="--train_examples=6000 --epochs=3" bench_cut="--rounds 3"
    ;;
*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
if [ "$scale" = quick ]; then
    train_cut="--max_steps=20 --warmup_steps=2 --checkpoint_interval=5 --eval_interval=10
               --usage_interval=10 --eval_sequences=16"
    seeds=0 more_seeds=1 tune_cut="--train_examples=64 --epochs=1"
    bench_cut="--lengths 16 --rounds 1" sizes="--sizes demo" slots="32 64"
fi

# 2) Where runs lie, and the commands that make them; run, job, finish and step are in run.sh
. reproduce/run.sh
begin "$@"

runs() {  # NAME...: the folders of runs, and the names of public weights
    for name; do [ ! -e "configs/$name.py" ] || name=$out/$name; echo "$name"; done
}

more() {  # NAME...: the folders of the other seeds
    for n in $more_seeds; do for name; do echo "$out/${name}_s$n"; done; done
}

tuned() {  # "NAMES" "TASKS" [_fixed]: the folders of fine-tuned runs
    for name in $1; do for task in $2; do echo "$out/${name}_$task${3:-}"; done; done
}

pretrain() {  # NAME [INITIAL [SEED]]: train configs/NAME.py; the paper's sizes take all GPUs
    folder=$out/$1${3:+_s$3} initial=${2:+$(runs $2)${3:+_s$3}}
    how="job $folder python"
    [ "$scale" != paper ] ||
        how="run $folder torchrun --standalone --nproc_per_node=$ranks --max-restarts=3"
    $how pretrain.py "configs/$1.py" "--out=$folder" ${initial:+"--init_from=$initial"} \
        ${3:+"--seed=${3}${2:+1}"} $train_cut
}

tune() {  # "NAMES" "TASKS" [SETTING]: fine-tune each model on each task, with each seed
    for name in $1; do for task in $2; do for seed in $seeds; do
        recipe=finetune_glue folder=$(tuned "$name" "$task" ${3:+_fixed})
        case $task in squad) recipe=finetune_squad ;; docs_task) recipe=demo_finetune ;; esac
        job "$folder/seed$seed" python finetune.py "configs/$recipe.py" "--task=$task" \
            "--init_from=$(runs "$name")" "--out=$folder" "--seed=$seed" ${3:-} $tune_cut
    done; done; done
}

measure() {  # NAME COMMAND ARGUMENT...: make a table or a figure
    name=$1 && shift
    run "$out/$name.md" python measure.py "$@" --out "$out/$name"
}

# 3) The recipe
if step data nothing "texts, tasks, public weights"; then
    get="python prepare_data.py"
    if [ "$scale" = paper ]; then
        run data/wikibooks $get wikibooks  # 25 GB of text: some 3 CPU hours
        for x in $tests; do run data/$x $get $x --vocab bert-base-uncased; done
        for x in $google $small; do run data/weights/$x/model.safetensors $get weights $x; done
        for x in MNLI QQP QNLI SST-2 CoLA; do run data/glue/$x $get glue $x; done
        run data/squad $get squad
    else
        run data/docs $get docs  # the docstrings of Python, torch and numpy
        run data/docs_task $get docs_task  # which package is one of?
    fi
fi

if step pretrain data "all systems, (a) first"; then
    for x in $first; do pretrain $x; done
    for n in $more_seeds; do pretrain $a "" $n; done
    finish
    for x in $scratch; do pretrain $x; done
    for x in $b $e $f ${f}_ffn; do pretrain $x $a; done
    for n in $more_seeds; do for x in $b $e $f; do pretrain $x $a $n; done; done
    pretrain $small_resm $small
fi
step table2 pretrain "perplexity of test texts, and usage of the memory on the longest" &&
    measure table2 table $(runs $a $b $c $d $e $f) $(more $a $b $e $f) --data $tests
step figure2 pretrain "when slots were last in use" &&
    measure figure2 staleness $(runs $c $d $e $f)
step figure3 pretrain "the curves of PKM, ResM and ResM' from one trained model" &&
    measure figure3 curves $(runs $b $e $f ${f}_ffn)

if step finetune pretrain "for Tables 4 to 7 and Figure 4, a job for each seed"; then
    tune "$a $b $c $d $e $f $google" "$table4"
    tune "$c $d $e $f" "$table5" --update_memory=False
    tune "$small $small_resm" "$table7"
fi
step table4 finetune "scores, medians over the seeds" &&
    measure table4 glue $(tuned "$a $b $c $d $e $f $google" "$table4")
step table5 finetune "the memory learns in fine-tuning, or is frozen" &&
    measure table5 glue $(tuned "$c $d $e $f" "$table5") $(tuned "$c $d $e $f" "$table5" _fixed)
step table6 finetune "usage of the memory after fine-tuning" &&
    measure table6 table $(tuned "$c $d $e $f" "$table6")
if step table7 finetune "a small model with a memory, beside a larger one"; then
    measure table7 glue $(tuned "$small $small_resm $middle" "$table7")
    measure table7_text table $(runs $small $small_resm $middle) --data ${tests##* }
fi
step figure4 finetune "do two classes read different slots?" &&
    measure figure4 by_class $(tuned "$c $f" "$figure4")

if step causal data "Lample et al.: n layers and a memory against 2n layers"; then
    for x in $causal; do pretrain $x; done
    finish
    measure causal table $(runs $causal) --data $tests
    configs=$(for x in $causal; do echo "configs/$x.py"; done)
    run "$out/causal_time" python bench.py causal $configs $short $bench_cut
fi
step slots nothing "Lample et al.: time by number of slots, flat and product keys" &&
    run "$out/slots" python bench.py causal --slots $slots $short $bench_cut
step table1 nothing "inference speed at the real sizes, with random weights" &&
    run "$out/table1" python bench.py $sizes $bench_cut
step page nothing "every table and figure, with the paper's numbers" &&
    run "$out/page.md" python -m reproduce.page "$out"
step end nothing
