# How the commands of reproduce.sh run: one after the other, or side by side from a list for each GPU.
trap 'exit 130' INT TERM

refuse() { echo "$*" && exit 2; }
check_variables() {  # STEPS "SEEDS" "TASKS" START: set them, and what follows from them
    STEPS=$1 SEEDS=$2 TASKS=$3 START=${4%/} max_steps=$1 seeds=$2 few=$2
    variables="START=$4 STEPS=$1 SEEDS='$2' TASKS='$3' PRETRAIN='${PRETRAIN:-}' "
    names="squad|mnli|qqp|qnli|sst2|cola|mrpc|rte"
    echo "${1:-20}/$2/$3" |
        grep -qxE "([2-9][0-9]|[1-9][0-9]{2,})/[0-9]( [0-9])*/($names)( ($names))*" ||
        refuse "STEPS=$1 SEEDS=$2 TASKS=$3: expected 20 or more, digits, tasks of $names"
    [ -d "$START" ] || echo "$START" | grep -qxE '[^./][^/]*(/[^/]+)?' ||
        refuse "START=$START: no such folder"
    case "${START##*/}" in
    *" "* | $b | $e | $f) refuse "START=$START: a space, or a name of this recipe, in its name" ;;
    scratch) ;;
    *) start=${START##*/} ;;
    esac
    schedule=${1:+"--warmup_steps=$(($1 / 20)) --eval_interval=$(($1 / 20))
        --usage_interval=$(($1 / 5))"}
}
only() { for x in $1; do case " $TASKS " in *" $x "*) echo "$x" ;; esac; done; }

begin() {  # SCALE WORD...: read the command line, and find the GPUs
    export out=out/reproduce_$1 list=""
    wanted="" begun=nothing last=0 commands=""
    shift
    for word; do
        case "$word:  $steps " in
        --list:*) list=yes ;;
        *": "*" $word "*) wanted="$wanted $word" ;;
        *) refuse "$word: no such step of ${out#*_}:" $steps ;;
        esac
    done
    gpus=${CUDA_VISIBLE_DEVICES-$(nvidia-smi -L 2> /dev/null | sed -n 's/^GPU \([0-9]*\).*/\1/p')}
    gpus=$(echo "$gpus" | tr , ' ')
    [ "$gpus" ] || gpus=$(for x in $(seq "${JOBS:-2}"); do echo -1; done)  # no card
    workers=$(($(echo $gpus | wc -w)))
    ranks=$workers
    while [ $((${micro:-32} % ranks)) != 0 ]; do ranks=$((ranks - 1)); done  # they share micro-batches
    if [ ! "$list" ]; then
        if [ -e "$out/pid" ] && kill -0 "$(cat "$out/pid")" 2> /dev/null; then
            refuse "$out: another reproduce.sh works there"
        fi
        before=$(head -n 1 "$out/variables" 2> /dev/null || echo "$variables")
        [ "$before" = "$variables" ] || refuse "$out was begun with $before, not $variables: delete it to begin anew"
        mkdir -p "$out/logs" "$out/jobs"
        echo $$ > "$out/pid"
        printf '%s\n' "$variables" "table3 $steps" > "$out/variables"
        rm -f "$out"/jobs/* "$out/failed" "$out/logs/page.md"
    fi
}

run() {  # RESULT COMMAND...: run a command, unless it is done; its output goes to logs/
    result=$1 && shift
    log=$out/logs/$(echo "${result#"$out/"}" | tr / _)
    case $result in data/*) done=$result ;; *) done=$log ;; esac  # all scales share data/
    if [ "$list" ]; then
        printf '%s\n    makes %s\n' "$*" "$result"
        commands="$commands$*;"
    elif [ ! -e "$done" ]; then
        echo "$*"
        began=$(date +%s)
        if ! "$@" > "$log.part" 2>&1; then
            tail -n 5 "$log.part"
            echo "failed, see $log.part: $*" | tee -a "$out/failed"
            return 1
        fi
        echo $(($(date +%s) - began)) >> "$out/seconds"
        mv "$log.part" "$log"
    fi
}

job() {  # RESULT COMMAND...: put a command on the list of the next GPU
    if [ "$list" ]; then run "$@" && return; fi
    last=$((last % workers + 1))
    gpu=$(echo $gpus | cut -d ' ' -f $last)
    [ -e "$out/jobs/$last" ] ||
        echo "export CUDA_VISIBLE_DEVICES=$gpu OMP_NUM_THREADS=1" > "$out/jobs/$last"
    echo "run $*" >> "$out/jobs/$last"
}

finish() {  # run the lists side by side, and wait; a list goes on after a failure
    if [ "$list" ] || [ ! "$(ls "$out/jobs")" ]; then return; fi
    ls "$out"/jobs/* | xargs -P "$workers" -n 1 sh -c '. reproduce/run.sh && . "$0"' || true
    rm "$out"/jobs/*
    [ ! -e "$out/failed" ] || { echo "stopped:" && cat "$out/failed" && exit 1; }
}

step() {  # NAME NEEDED TITLE: begin a step, if it is wanted; the one before has ended then
    case " ${wanted:-$steps} end " in *" $1 "*) ;; *) return 1 ;; esac
    finish
    if [ ! "$list" ]; then
        touch "$out/logs/step_$begun"
        [ -e "$out/logs/step_$2" ] || { echo "$1 needs: sh reproduce.sh ${out#*_} $2" && exit 1; }
    fi
    begun=$1
    [ "$1" = end ] || printf '\n== %s (needs %s): %s\n' "$@"
}
