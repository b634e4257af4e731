#!/bin/sh
# Reproduce the paper: from text to a page with every table and figure, the paper's numbers beside.
#
#   sh reproduce.sh quick            # some minutes: every step, cut short
#   sh reproduce.sh demo             # two hours on two cores, no network: every system, small
#   sh reproduce.sh pilot            # a memory for Google's BERT: 10 hours of an H100
#   sh reproduce.sh paper            # the paper's sizes, on all GPUs of this machine: weeks
#   sh reproduce.sh paper table2     # one step, or several; those that it needs must be done
#   sh reproduce.sh paper --list     # print what would run, hours and disk, and run nothing
#   Steps: data, pretrain, finetune, table1, 2, 4 to 7, figure2 to 4, causal, slots, page, export.
#   STEPS=2000 SEEDS="0 1" TASKS="sst2 cola" sh reproduce.sh pilot    # less; paper takes them, too
#   START=FOLDER PRETRAIN="--memory_layers=2,4" sh reproduce.sh pilot    # another BERT, of 6 layers
# All results lie in out/reproduce_SCALE/, the output of commands in its logs/. After a failure or an
# interruption the same line goes on. Delete the folder to begin anew. Jobs run side by side: one on
# each GPU of CUDA_VISIBLE_DEVICES or of the machine; JOBS=2 on one without.
set -eu
cd "$(dirname "$0")"
. reproduce/run.sh
# 1) A scale: its systems by the paper's letters, texts, tasks, seeds, and what cuts a command short
time_ratio=220  # in %: 2.20 is a step of (f) / a step of (b) on one H100 (results/speed.md)
scale=${1:-} b=base_500k_more e=base_pkm_init f=base_resm_init c="" d="" ffn="" google="" small=""
small_resm="" table5="" table7="" figure4="" train_cut="" tune_cut="" bench_cut="" sizes="" slots=""
short="" first="" long="" longer="" start="" tunings="" variables="" others="table1 causal slots"
case $scale in
pilot)
    check_variables "${STEPS:-10000}" "${SEEDS:-0 1 2}" "${TASKS:-sst2 cola mrpc rte}" \
        "${START:-bert-base-uncased}"
    [ "$start" ] || refuse "START=scratch: a pilot starts from trained weights"
    texts="" tests=wikitext103 longer=${b}_long long_steps=$((STEPS * time_ratio / 100)) a=$start
    table4=$TASKS table6=$(only "mnli sst2 cola") micro=4 others=export
    # 64 x 128 tokens at a time: base ResM took 15.9 GB of an H100 with twice as many. The rate is
    # our reading of results/log.md: 3e-4 undoes what a trained head knows, 1e-5 suits far smaller
    # batches. New values are random as in the paper, because its sentences are tried.
    train_cut="--dataset=wikitext103 --seq_len=128 --batch_size=64 --accumulation=4 --lr=5e-5
               --keep_checkpoints=1 $schedule"
    ;;
paper)
    check_variables "${STEPS:-}" "${SEEDS:-0}" "${TASKS:-squad mnli qqp qnli sst2 cola}" \
        "${START:-scratch}"
    texts=wikibooks tests="wikitext2 wikitext103 pg19"  # 25 GB of text: some 3 CPU hours
    causal="causal_12 causal_24 causal_12_pkm causal_12_memory"
    a=base c=base_pkm d=base_resm ffn=${f}_ffn google="bert-base-uncased bert-large-uncased"  # g, h
    small=distilbert-base-uncased small_resm=distil_resm_init middle=bert-base-uncased  # Table 7
    table4=$TASKS table5=$(only "squad mnli sst2 cola") table6=$(only "mnli sst2 cola")
    table7=$(only "squad mnli sst2") figure4=$(only sst2) tunings="0 1 2 3 4"
    [ ! "$start" ] || a=$start c="" d="" google=$(echo "$google" | tr ' ' '\n' | grep -vx "$start")
    train_cut=$schedule
    ;;
demo | quick)
    tests=docs causal="demo_causal demo_causal_8 demo_causal_pkm demo_causal_memory"
    a=demo b=demo_more c=demo_pkm d=demo_resm e=demo_pkm_init f=demo_resm_init ffn=${f}_ffn
    google=demo_large small=demo_distil small_resm=demo_distil_resm_init middle=demo
    table4=docs_task table5=docs_task table6=docs_task table7=docs_task figure4=docs_task
    first=$small long="${c}_long ${d}_long" long_steps=3200 short="--lengths 128"  # its positions
    seeds="3 4 5 6 7" few="3 4 5"  # 0 to 2 were seen when the demo was made
    tune_cut="--train_examples=6000 --epochs=3" bench_cut="--rounds 3"
    ;;
*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
if [ "$scale" = quick ]; then
    train_cut="--max_steps=20 --warmup_steps=2 --checkpoint_interval=5 --eval_interval=10
               --usage_interval=10 --eval_sequences=16"
    seeds="3 4" few=3 tune_cut="--train_examples=64 --epochs=1"
    bench_cut="--lengths 16 --rounds 1" sizes="--sizes demo" slots="32 64"
fi
steps="data pretrain finetune table2 table4 ${table5:+table5} ${table6:+table6} ${table7:+table7}"
steps="$steps figure2 figure3 ${figure4:+figure4} $others page"

# 2) Where runs lie, and the commands that make them; run, job, finish and step are in run.sh
begin "$@"

runs() {  # "NAMES" ["SEEDS"]: the folders of runs, and the names of public weights
    for name in $1; do
        case $name in "$start") echo "$START" && continue ;; *uncased) echo "$name" && continue ;; esac
        for n in ${2:-$few}; do echo "$out/${name}_s$n"; done
    done
}
models() {  # NAME: a number for each model; public weights are one
    case $1 in "$start" | *uncased) echo "${few%% *}" ;; *) echo "$few" ;; esac
}
tuned() {  # "NAMES" "TASKS" [_fixed]: the folders of fine-tuned runs
    for name in $1; do for task in $2; do for n in $(models "$name"); do
        echo "$out/${name}_s${n}_$task${3:-}"
    done; done; done
}
pretrain() {  # NAME "SEEDS" [INITIAL]: train configs/NAME.py; large ones take all GPUs
    case $1 in *_long) length=$long_steps ;; *) length=${max_steps:-} ;; esac
    for n in $2; do
        folder=$(runs "$1" $n) initial=${3:+$(runs "$3" $n)} how="job $folder python" more=""
        seed=${3:+$((10 * n + 1))}  # another order of the text, other masks
        [ "${3:-none}" != "$start" ] || more="--model= ${PRETRAIN:-}"  # the start brings its sizes
        [ "${1%_long}" != $b ] || more="$more ${PRETRAIN:+--memory_layers= --init_values=random}"
        case "$scale $ranks" in paper* | "pilot "[24])
            how="run $folder torchrun --standalone --nproc_per_node=$ranks --max-restarts=3" ;;
        esac
        $how pretrain.py "configs/${1%_long}.py" "--out=$folder" "--seed=${seed:-$n}" \
            ${initial:+"--init_from=$initial"} ${length:+--max_steps=$length} $train_cut $more
    done
}
tune() {  # "NAMES" "TASKS" [SETTING]: fine-tune each model on each task
    for name in $1; do for task in $2; do for n in $(models "$name"); do
        folder=$out/${name}_s${n}_$task${3:+_fixed} recipe=finetune_glue own=$n
        case $task in squad) recipe=finetune_squad ;; docs_task) recipe=demo_finetune ;; esac
        [ "$name" != "$start" ] || own=$few
        for seed in ${tunings:-$own}; do
            job "$folder/seed$seed" python finetune.py "configs/$recipe.py" "--task=$task" \
                "--init_from=$(runs "$name" $n)" "--out=$folder" "--seed=$seed" ${3:-} $tune_cut
        done
    done; done; done
}
measure() {  # NAME COMMAND ARGUMENT...: make a table or a figure
    name=$1 && shift
    run "$out/$name.md" python measure.py "$@" --out "$out/$name"
}

# 3) The recipe
if step data nothing "texts, tasks, public weights"; then
    get="python prepare_data.py" vocab=bert-base-uncased public="$google $small"
    if [ "$variables" ]; then
        [ ! "$start" ] || vocab=$START
        [ ! "$start" ] || [ -d "$START" ] || public="$START $public" vocab=data/weights/$START
        for x in $public; do run "data/weights/$x/config.json" $get weights "$x"; done
        for x in $texts $tests; do run data/$x $get $x --vocab "$vocab"; done
        for x in $(echo $table4 | tr a-z A-Z); do
            case $x in SST2) x=SST-2 ;; COLA) x=CoLA ;; esac
            if [ $x = SQUAD ]; then run data/squad $get squad; else run data/glue/$x $get glue $x; fi
        done
    else  # the docstrings of Python, torch and numpy; which package is one of?
        for x in docs docs_task; do run data/$x $get $x; done
    fi
fi
if step pretrain data "all systems, (a) first"; then
    [ "$start" ] || for x in $a; do pretrain $x "$seeds"; done
    for x in $first; do pretrain $x "$few"; done
    finish
    for n in $seeds; do for x in $b $f $e $longer; do pretrain $x $n $a; done; done
    for x in $c $d $long; do pretrain $x "$few"; done
    case $google in demo*) pretrain $google "$few" ;; esac
    for x in $ffn; do pretrain $x "${few%% *}" $a; done
    for x in $small_resm; do pretrain $x "$few" $small; done
fi
step table2 pretrain "perplexity of test texts, and usage of the memory on the longest" &&
    measure table2 table $(runs "$a $b $longer $e $f" "$seeds") $(runs "$c $d $long") --data $tests
if step figure2 pretrain "when slots were last in use"; then
    measure figure2 staleness $(runs "$c $d $e $f" "${few%% *}")
    measure figure2_seeds staleness $(runs "${c:-$e} $f")
fi
if step figure3 pretrain "the curves of PKM, ResM and ResM' from one trained model"; then
    measure figure3 curves $(runs "$b $e $f $ffn" "${few%% *}")
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
if step export pretrain "(f) for transformers, with a model card"; then
    model=$out/$start-resm
    run "$model" python -m for_transformers.export "$out/${f}_s${few%% *}" "$model"
    [ "$list" ] || printf '%s\n' "tables: $out/page.md" "(f), for hf upload YOU/NAME FOLDER: $model"
fi
step end nothing
[ ! "$list" ] || [ ! "$variables" ] || echo "$commands" | python -m reproduce.hours "$scale"
