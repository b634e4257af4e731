"""Estimate hours and disk of the commands that `reproduce.sh SCALE --list` hands over."""
import re
import sys
from pathlib import Path

LOG = Path("out/gpu/train.log")  # of reproduce/gpu.sh; without it the speed is an H100's
HOURS = {"distil_resm_init": 475, "causal_12": 279, "causal_24": 512, "causal_12_pkm": 379,
         "causal_12_memory": 379}  # of 500,000 steps (results/speed.md); the others are below
STEPS = {"mnli": 122_720, "qqp": 113_710, "qnli": 32_740, "sst2": 21_050, "squad": 8_313,
         "cola": 2_680, "mrpc": 1_150, "rte": 780}  # of ten epochs, squad's of three


def estimate(text):
    """Add up the commands that reproduce.sh --list prints. Returns the estimate in words."""
    pretraining, tuning = 0, 0
    disk = 40e9 if "wikibooks" in text else 16e9  # of texts, and of what comes and goes
    for config, given in re.findall(r"(?:train|tune)\.py configs/(\w+)\.py ([^;\n]*)", text):
        memory = re.search("_(pkm|resm|memory)", re.search(r"--out=\S*/(\S+)", given)[1])
        hours, weights = (305, 2.06e9) if memory else (140, 0.44e9)  # weights: bytes
        if task := re.search(r"--task=(\w+)", given):
            tuning += STEPS[task[1]] / 54_000  # 15 steps/s: a guess
            disk += weights
        else:  # a step of the pilot has a sixteenth of the paper's tokens; it keeps one checkpoint
            steps = re.findall(r"--max_steps=(\d+)", f"--max_steps=500000 {given}")[-1]
            whole, copies = (8e6, 3) if "--seq_len=128" in given else (5e5, 6)
            pretraining += HOURS.get(config, hours) * int(steps) / whole
            disk += copies * weights
    timed = LOG.exists() and re.search(r'"system": "configs/base_resm.py".*?"tokens/s": (\d+)',
                                       LOG.read_text())
    slower = 239_000 / int(timed[1]) if timed else 1
    return (f"about {slower * pretraining:,.1f} hours of pretraining on one card (base's size), "
            f"{slower * tuning:,.1f} of fine-tuning (a guess), {disk / 1e9:.0f} GB; speed: "
            f"{LOG if timed else 'assumed, one H100'}")


if __name__ == "__main__":
    print(f"{sys.argv[1]}: {estimate(sys.stdin.read())}")
