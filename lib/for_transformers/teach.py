"""
Teach facts to a frozen language model.

$ python -m lib.for_transformers.teach MODEL facts.txt --ordinary text.txt --out my_facts

A line of facts.txt is a question, a tab and its answer, or a sentence, whose last word is the
answer. --ordinary is any text of the kind that the model must not forget, 100 kB or more. --keep
has facts that the model knows, of earlier lessons too. Each counts as a block of ordinary text.

Memories with random queries and sub-keys are put into early layers. Their values start at 0, which
changes nothing. Training changes only the values of rows that the facts read far more than
ordinary text does (results/teach.md). my_facts gets these rows, for load_memory.
"""
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from lib.common.device import choose_device, use_device
from lib.common.errors import UserError, run_main
from lib.common.files import check_new_folder
from lib.common.settings import Parser, whole_number
from lib.for_transformers import facts as ask
from lib.for_transformers.adapter import find_memories, load_memory, save_memory, unload_memory
from lib.for_transformers.add_memory import add_memory, find_layers, freeze_all_but
from lib.for_transformers.rows import calibrate, choose_rows, ordinary_reads
from values import LazyAdam

DEPTHS = 0.07, 0.14, 0.21, 0.28  # of the layers with a memory: 3, 5, 7, 9 of 30; 2, 3, 4 of 12
MEMORY = {"n_keys": 256, "heads": 4, "topk": 32, "key_dim": 128}
BLOCKS, HELD_OUT = 64, 8  # blocks of ordinary text: to choose rows by, to measure perplexity on
BATCH, REPORT_EVERY = 32, 10  # facts a step, steps


def teach(model, data, ordinary, steps=300, lr=0.3, rows=3000, seed=1,
          report=lambda *progress: None):
    """Teach facts, encode's tensors, to a frozen model, until it recalls all.

    The model is in evaluation mode. If load_memory gave it earlier lessons, their rows stay as they
    are. ordinary: token ids of ordinary texts, each (1, time). report(step, loss, right, seconds)
    is called every REPORT_EVERY steps. right: (facts,) bool. Ctrl-C ends the lesson. UserError if
    no memory fits, or for too high a rate.
    """
    torch.manual_seed(seed)
    counts = put_memory(model, ordinary)
    chosen = choose_rows(model, data, counts, len(ordinary), rows)
    values = LazyAdam([{"params": [memory.values], "rows": chosen[n]}
                       for n, memory in find_memories(model).items()], lr=lr)
    draw, order, start = random.Random(seed), [], time.time()
    try:
        for step in range(1, steps + 1):
            if len(order) < BATCH:
                order += draw.sample(range(len(data[0])), len(data[0]))
            pick, order = order[:BATCH], order[BATCH:]
            loss = F.cross_entropy(*ask.predict(model, *ask.take(data, pick, model.device)))
            loss.backward()
            if not loss.isfinite():
                raise UserError(f"step {step}: the loss is {loss.item()}: take a lower --lr")
            values.step()
            values.zero_grad()
            if step % REPORT_EVERY == 0 or step == steps:
                right = ask.recalled(model, data)
                report(step, loss.item(), right, time.time() - start)
                if right.all():
                    break
    except KeyboardInterrupt:
        print("stopped: the lesson ends here")


def put_memory(model, ordinary):
    """Add a new memory if the model has none. Returns ordinary_reads."""
    if memories := find_memories(model):
        freeze_all_but({n: memory.values for n, memory in memories.items()}, model)
        return ordinary_reads(model, ordinary)
    try:
        depth = len(find_layers(model))
        layers = sorted({1 + round(share * (depth - 1)) for share in DEPTHS})
        add_memory(model, layers, values="zero", freeze=True, **MEMORY)
    except ValueError as error:
        raise UserError(str(error)) from None
    return calibrate(model, ordinary)


def main(argv=None):
    parser = Parser(description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="a name on the hub, or a folder")
    parser.add_argument("facts", help="a text file, a phrasing of a fact a line")
    parser.add_argument("--ordinary", required=True, help="a text file")
    parser.add_argument("--out", required=True, help="the new folder")
    parser.add_argument("--check", help="facts that are asked and not taught: other phrasings")
    parser.add_argument("--keep", help="facts that the model knows and should keep")
    parser.add_argument("--beside", nargs="+", default=(), help="folders of earlier lessons")
    parser.add_argument("--steps", type=whole_number, default=300, help="steps at most (300)")
    parser.add_argument("--lr", type=float, default=0.3, help="rate of the values (0.3)")
    parser.add_argument("--rows", type=whole_number, default=3000, help="rows that may change")
    parser.add_argument("--seed", type=whole_number, default=1, help="of a new memory (1)")
    parser.add_argument("--device", default="auto", help="cuda, mps or cpu")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    args = parser.parse_args(argv)

    facts, text = ask.read_facts(args.facts), ask.read_text(args.ordinary, most=2_000_000)
    questions, known = (ask.read_facts(path) if path else [] for path in (args.check, args.keep))
    if not 0 < args.lr < math.inf:
        raise UserError(f"--lr {args.lr}: expected a number above 0")
    check_new_folder(args.out)
    if choose_device(args.device, args.dtype)[1] == torch.float16:  # it would need a GradScaler
        args.dtype = "float32"
    device, dtype = use_device(args.device, args.dtype)
    model, tokenizer = ask.load_model(args.model, device)
    blocks = ask.ordinary_blocks(text, tokenizer, model, BLOCKS + HELD_OUT, args.ordinary)
    held_out, blocks = blocks[:HELD_OUT], blocks[HELD_OUT:]
    data = ask.encode(facts, tokenizer, model)
    check = questions and ask.encode(questions, tokenizer, model)
    keep = known and ask.encode(known, tokenizer, model, end=False)
    ordinary = [*blocks.split(1)] + [ids[mask > 0][None].to(device)
                                     for ids, mask, _ in zip(*keep, strict=True)]

    def report(step, loss, right, seconds):
        more = ask.perplexity(model, held_out, tokenizer) / before - 1
        line = f"step {step}: loss {loss:.3f}, recalls {int(right.sum())} of {len(right)}"
        if questions:
            line += f", answers {int(ask.recalled(model, check).sum())} of {len(questions)}"
        if known:
            kept = ask.recalled(model, keep)[right_before]
            line += f", keeps {int(kept.sum())} of {len(kept)}"
        print(f"{line}, ordinary text {more:+.1%}, {seconds / step:.1f} s a step", flush=True)

    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        before = ask.perplexity(model, held_out, tokenizer)
        print(f"perplexity of ordinary text {before:.2f}", flush=True)
        for folder in args.beside:
            load_memory(model, folder)
        right_before = ask.recalled(model, keep) if known else None
        teach(model, data, ordinary, args.steps, args.lr, args.rows, args.seed, report)
        for folder in args.beside:
            unload_memory(model, folder)
        right = ask.recalled(model, data)
    save_memory(model, args.out)
    size = sum(file.stat().st_size for file in Path(args.out).iterdir()) / 1e6
    alone = " alone" if args.beside else ""
    print(f"{args.out}{alone}: {int(right.sum())} of {len(facts)} lines, {size:.1f} MB")
    for fact in [fact for fact, known in zip(facts, right, strict=True) if not known]:
        print(f"not recalled: {' '.join(fact)}")


if __name__ == "__main__":
    run_main(main)
