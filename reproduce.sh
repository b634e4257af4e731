#!/bin/sh
# Reproduce the paper: from text to a page with every table and figure, the paper's numbers beside.
#
#   sh reproduce.sh quick            # some minutes: every step, cut short
#   sh reproduce.sh demo             # two hours on two cores, no network: every system, small
#   sh reproduce.sh paper            # the paper's sizes, on all GPUs of this machine: weeks
#   sh reproduce.sh paper table2     # one step, or several; those that it needs must be done
#   sh reproduce.sh paper --list     # print what would run, and run nothing
#   Steps: data, pretrain, finetune, table1, 2, 4 to 7, figure2 to 4, causal, slots, page.
# All results lie in out/reproduce_SCALE/, the output of commands in its logs/. After a failure or an
# interruption the same line goes on. Delete the folder to begin anew. Jobs run side by side: one on
# each GPU of CUDA_VISIBLE_DEVICES or of the machine; JOBS=2 on one without.
set -eu
cd "$(dirname "$0")"
# 1) A scale: its systems by the paper's letters, texts, tasks, seeds, and what cuts a command short
scale=${1:-} train_cut="" tune_cut="" bench_cut="" sizes="" slots="" short="" long=""
case $scale in
paper)
    tests="wikitext2 wikitext103 pg19" causal="causal_12 causal_24 causal_12_pkm causal_12_memory"
    a=base b=base_500k_more c=base_pkm d=base_resm e=base_pkm_init f=base_resm_init
    google="bert-base-uncased bert-large-uncased"  # (g) and (h)
    small=distilbert-base-uncased small_resm=distil_resm_init middle=bert-base-uncased  # Table 7
    table4="squad mnli qqp qnli sst2 cola" table5="squad mnli sst2 cola"
    table6="mnli sst2 cola" table7="squad mnli sst2" figure4=sst2
    first="" seeds=0 few=0 tunings="0:0 0:1 0:2 0:3 0:4"  # seeds of pretraining : fine-tuning
    ;;
demo | quick)
    tests=docs causal="demo_causal demo_causal_8 demo_causal_pkm demo_causal_memory"
    a=demo b=demo_more c=demo_pkm d=demo_resm e=demo_pkm_init f=demo_resm_init
    google=demo_large small=demo_distil small_resm=demo_distil_resm_init middle=demo
    table4=docs_task table5=docs_task table6=docs_task table7=docs_task figure4=docs_task
    first=$small long="${c}_long ${d}_long" short="--lengths 128"  # its positions
    seeds="3 4 5 6 7" few="3 4 5" tunings="3:3 4:4 5:5"  # 0 to 2 were seen when the demo was made
    tune_cut="--train_examples=6000 --epochs=3" bench_cut="--rounds 3"
    ;;
*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
if [ "$scale" = quick ]; then
    train_cut="--max_steps=20 --warmup_steps=2 --checkpoint_interval=5 --eval_interval=10
               --usage_interval=10 --eval_sequences=16"
    seeds="3 4" few=3 tunings=3:3 tune_cut="--train_examples=64 --epochs=1"
    bench_cut="--lengths 16 --rounds 1" sizes="--sizes demo" slots="32 64"
fi

# 2) Where runs lie, and the commands that make them; run, job, finish and step are in run.sh
. reproduce/run.sh
begin "$@"

runs() {  # "NAMES" ["SEEDS"]: the folders of runs, and the names of public weights
    for name in $1; do for n in ${2:-$few}; do
        case $name in *uncased) echo "$name" ;; *) echo "$out/${name}_s$n" ;; esac
    done; done
}
tuned() {  # "NAMES" "TASKS" [_fixed]: the folders of fine-tuned runs
    for name in $1; do for task in $2; do for n in $few; do
        echo "$out/${name}_s${n}_$task${3:-}"
    done; done; done
}
pretrain() {  # NAME "SEEDS" [INITIAL]: train configs/NAME.py; the paper's sizes take all GPUs
    case $1 in *_long) steps=--max_steps=3200 ;; *) steps="" ;; esac  # as many as after Init
    for n in $2; do
        folder=$(runs "$1" $n) initial=${3:+$(runs "$3" $n)} how="job $folder python"
        seed=${3:+$((10 * n + 1))}  # another order of the text, other masks
        [ "$scale" != paper ] ||
            how="run $folder torchrun --standalone --nproc_per_node=$ranks --max-restarts=3"
        $how pretrain.py "configs/${1%_long}.py" "--out=$folder" "--seed=${seed:-$n}" \
            ${initial:+"--init_from=$initial"} $steps $train_cut
    done
}
tune() {  # "NAMES" "TASKS" [SETTING]: fine-tune each model on each task
    for name in $1; do for task in $2; do for pair in $tunings; do
        n=${pair%:*} seed=${pair#*:} recipe=finetune_glue
        folder=$out/${name}_s${n}_$task${3:+_fixed}
        case $task in squad) recipe=finetune_squad ;; docs_task) recipe=demo_finetune ;; esac
        job "$folder/seed$seed" python finetune.py "configs/$recipe.py" "--task=$task" \
            "--init_from=$(runs "$name" $n)" "--out=$folder" "--seed=$seed" ${3:-} $tune_cut
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
    else  # the docstrings of Python, torch and numpy; which package is one of?
        for x in docs docs_task; do run data/$x $get $x; done
    fi
fi
if step pretrain data "all systems, (a) first"; then
    for x in $a; do pretrain $x "$seeds"; done
    for x in $first; do pretrain $x "$few"; done
    finish
    for x in $b $e $f; do pretrain $x "$seeds" $a; done
    for x in $c $d $long; do pretrain $x "$few"; done
    [ "$scale" = paper ] || pretrain $google "$few"
    pretrain ${f}_ffn "${few%% *}" $a
    pretrain $small_resm "$few" $small
fi
step table2 pretrain "perplexity of test texts, and usage of the memory on the longest" &&
    measure table2 table $(runs "$a $b $e $f" "$seeds") $(runs "$c $d $long") --data $tests
if step figure2 pretrain "when slots were last in use"; then
    measure figure2 staleness $(runs "$c $d $e $f" "${few%% *}")
    measure figure2_seeds staleness $(runs "$c $f")
fi
if step figure3 pretrain "the curves of PKM, ResM and ResM' from one trained model"; then
    measure figure3 curves $(runs "$b $e $f ${f}_ffn" "${few%% *}")
    measure figure3_seeds curves $(runs "$e $f" "$seeds")
fi
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
    measure table7_text table $(runs "$small $small_resm $middle") --data ${tests##* }
fi
if step figure4 finetune "do two classes read different slots?"; then
    measure figure4 by_class $(few=${few%% *} && tuned "$c $f" "$figure4")
    measure figure4_seeds by_class $(tuned "$c $f" "$figure4")
fi
if step causal data "Lample et al.: n layers and a memory against 2n layers"; then
    for x in $causal; do pretrain $x "$few"; done
    finish
    measure causal table $(runs "$causal") --data $tests
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
