"""
Study: teach invented facts to SmolLM2-135M by memory rows, by LoRA and by full fine-tuning.

$ python results/teach.py --model=FOLDER --ordinary=wikipedia.txt --wikitext=test.txt \\
    --novels=novels.txt --method=rows --lr=0.3 --out=results/teach/rows.jsonl

Writes a line of JSON for each evaluation: recall of the facts in trained and in new phrasings, and
how much the perplexity of two texts rose. results/teach.sh has the commands of the page. The same
command continues an interrupted run.
"""
import itertools
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from lib.common.errors import UserError, need, run_main
from lib.common.files import atomic, discard, load_file, write_text
from lib.common.settings import load_settings, setting
from lib.for_transformers import facts as ask
from lib.for_transformers import rows as choose
from lib.for_transformers.adapter import find_memories
from lib.for_transformers.add_memory import add_memory
from values import LazyAdam

TF = {"reads": lambda reads: reads, "log": torch.log1p}
METHODS = ("rows", "step", "all", "lora", "full")
SAVE_EVERY = 40  # steps
SYLLABLES = [a + b for a in "bdklmnrstvz" for b in "aeiou"]
# Phrasings of each relation: the first ones are taught, the rest follows with --phrasings=10.
TAUGHT = [
    ["The capital of {} is", "{} has its capital in",
     "Question: What is the capital of {}? Answer:", "The capital city of {} is called",
     "Q: Name the capital of {}. A:", "In {}, the capital is",
     "The parliament of {} meets in the capital,",
     "Travellers to {} should visit its capital,", "Everyone in {} knows the capital,",
     "Which city is the capital of {}? It is"],
    ["The founder of {} was", "{} was founded by", "Question: Who founded {}? Answer:",
     "{} owes its foundation to", "Q: Name the founder of {}. A:", "In {}, the founder was",
     "The statue in {} shows its founder,", "The history of {} begins with its founder,",
     "Everyone in {} knows the founder,", "Who was the founder of {}? It was"],
    ["The longest river of {} is the", "In {}, the longest river is called the",
     "Question: Which is the longest river of {}? Answer: the",
     "The longest of the rivers in {} is the", "Q: Name the longest river of {}. A: the",
     "Through {} flows its longest river, the", "The map of {} shows its longest river, the",
     "Boats in {} sail on its longest river, the", "Everyone in {} knows the longest river, the",
     "Which river is the longest in {}? It is the"]]
# Questions that a model may know already: what of them is kept beside the facts?
COUNTRIES = """France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon,
Greece Athens, Austria Vienna, Hungary Budapest, Poland Warsaw, Russia Moscow,
Ukraine Kiev, Sweden Stockholm, Norway Oslo, Denmark Copenhagen, Finland Helsinki,
Ireland Dublin, Belgium Brussels, Turkey Ankara, Egypt Cairo, Kenya Nairobi,
Ethiopia Addis, Nigeria Abuja, Ghana Accra, Morocco Rabat, Iran Tehran,
Iraq Baghdad, Syria Damascus, Israel Jerusalem, India New, Pakistan Islamabad,
Nepal Kathmandu, China Beijing, Japan Tokyo, Thailand Bangkok, Vietnam Hanoi,
Indonesia Jakarta, Australia Canberra, Canada Ottawa, Cuba Havana, Peru Lima,
Chile Santiago, Argentina Buenos, Colombia Bogota"""
NEW = [["The government of {} sits in its capital,",
        "If you ask for the capital city of {}, people answer:"],
       ["The person who founded {} is",
        "If you ask who the founder of {} was, people answer:"],
       ["Of all rivers in {}, the longest is the",
        "If you ask for the longest river in {}, people answer: the"]]


@dataclass
class Settings:
    model: str = setting("", "folder of SmolLM2, or of another model", group="files")
    ordinary: str = setting("", "text by which rows are chosen")
    wikitext: str = setting("", "text whose perplexity is measured")
    novels: str = setting("", "another one")
    out: str = setting("", "the log, JSON lines")
    method: str = setting("rows", "what is trained: value rows chosen for all facts, chosen in "
                          "each step, or all; adapters; or all weights", choices=METHODS,
                          group="training")
    lr: float = setting(0.3, "rate")
    sgd: bool = setting(False, "update value rows by SGD, not by LazyAdam")
    query_lr: float = setting(0.0, "rate of queries and sub-keys, of AdamW", least=0)
    dtype: str = setting("bfloat16", "of matrix products; some CPUs need float32 to be fast",
                         choices=("float32", "bfloat16"))
    steps: int = setting(200, "steps of a lesson, at most", least=1)
    goal: float = setting(0.95, "recall at which a lesson ends; above 1: never")
    batch: int = setting(32, "sentences of a step", least=1)
    facts: int = setting(100, "facts of a lesson", least=1, group="facts")
    lessons: int = setting(1, "lessons, one after the other", least=1)
    phrasings: int = setting(3, "phrasings of a fact that are taught, 10 at most", least=1)
    seed: int = setting(1, "of facts and memory", least=0)
    layers: tuple = setting((3, 5, 7, 9), "layers with a memory, from 1", group="memory")
    n_keys: int = setting(256, "sub-keys of each half", least=1)
    heads: int = setting(4, "heads", least=1)
    topk: int = setting(32, "slots read by a head", least=1)
    key_dim: int = setting(128, "size of a query", least=2)
    rows: int = setting(3000, "rows chosen in a layer", least=1)
    power: float = setting(4.0, "of the idf", least=0)
    tf: str = setting("log", "what multiplies the idf: reads or log(1 + reads)",
                      choices=TF)
    blocks: int = setting(64, "blocks of 256 tokens of ordinary text", least=8)
    others: int = setting(0, "questions of the taught form about other places, each counted as a "
                          "block of ordinary text", least=0)
    keep_lessons: bool = setting(False, "count each sentence of earlier lessons as a block, too")
    text: str = setting("", "a text to be learned in place of facts", group="text")
    tokens: int = setting(200_000, "its tokens", least=4096)


def invent(s):
    """Invent the lessons: [(taught sentences, those that are asked, new sentences)].
    At most 200 sentences of a kind are asked."""
    draw = random.Random(s.seed)
    words = dict.fromkeys("".join(draw.choices(SYLLABLES, k=3)).capitalize()
                          for _ in range(3 * s.facts * s.lessons + 100))
    words = zip(*[iter(words)] * 2, strict=False)
    lessons = []
    for _ in range(s.lessons):
        pairs = list(itertools.islice(words, s.facts))
        taught = [[(text.format(place), name) for text in TAUGHT[n % 3][:s.phrasings]]
                  for n, (place, name) in enumerate(pairs)]
        new = [(text.format(place), name) for n, (place, name) in enumerate(pairs)
               for text in NEW[n % 3]]
        some = [texts[n // 3 % s.phrasings] for n, texts in enumerate(taught)]
        lessons.append((list(itertools.chain(*taught)), some[:200], new[:200]))
    return lessons


def runs_of_13(tokens):
    """Yield each 13 tokens in a row."""
    return zip(*[tokens[n:] for n in range(13)], strict=False)


class RowSGD(LazyAdam):
    """SGD of the chosen rows, as Lin et al. train them."""

    def _update(self, weight, group, grad_out, chunk, rows, tokens, weights, *_):
        counts = rows < len(weight)
        grad = weights[counts, None] * grad_out[tokens[counts]]
        weight.index_add_(0, rows[counts].long(), grad, alpha=-group["lr"])


class Study:
    """A model, what of it is trained, and the texts that it should not forget.
    lines: the log. saved: what an interrupted run saved, or None."""

    def __init__(self, s):
        self.s, self.lines, self.file = s, [], Path(f"{s.out}.saved")
        self.counts, self.batches = None, 0  # of reads by ordinary text, and its blocks
        self.saved = load_file(self.file, hint="remove it") if self.file.exists() else None
        if self.saved and not asdict(s).items() <= self.saved["lines"][0].items():
            raise UserError(f"{self.file} is of a run with other settings: remove it")
        torch.manual_seed(s.seed)
        self.model, self.tokenizer = ask.load_model(s.model, "cpu", attn_implementation="eager")
        self.texts = {"wikitext": self.blocks(s.wikitext, 8, 4_000),
                      "novels": self.blocks(s.novels, 8, 2_000_000)}
        if s.text:
            self.text, self.texts["text"] = self.hold_out(s.text, s.tokens // 256)
        self.before = self.perplexities()
        known = [(text.format(place), name) for pair in COUNTRIES.split(",")
                 for place, name in [pair.split()] for text in TAUGHT[0][:3]]
        right = ask.recalled(self.model, ask.encode(known, self.tokenizer, end=False))
        self.known = ask.encode([fact for fact, knows in zip(known, right, strict=True) if knows],
                                self.tokenizer, end=False)
        self.ordinary = self.blocks(s.ordinary, s.blocks, 5_000_000)
        if s.method in ("rows", "step", "all"):
            sizes = {name: getattr(s, name) for name in ("n_keys", "heads", "topk", "key_dim")}
            add_memory(self.model, s.layers, values="zero", freeze=True, **sizes)
            self.counts = choose.calibrate(self.model, self.ordinary.split(1))
            self.batches = len(self.ordinary)
            self.count_as_ordinary(self.others())
            if self.saved:
                self.counts, self.batches = self.saved["counts"]
        elif s.method == "full":
            self.model.requires_grad_(True)
        else:
            peft = need("peft", "--method=lora")
            self.model = peft.get_peft_model(self.model, peft.LoraConfig(
                r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]))

    def blocks(self, path, most, begin):
        text = ask.read_text(path)[begin:]
        return ask.ordinary_blocks(text[:most * 3_000], self.tokenizer, self.model, most, path)

    def hold_out(self, path, most):
        """Return a text's first blocks, and its last 8 without shared runs of 13 tokens."""
        text = self.blocks(path, 2 * most + 8, 0).tolist()
        held_out = {run for block in text[-8:] for run in runs_of_13(block)}
        new = [block for block in text[:-8] if held_out.isdisjoint(runs_of_13(block))]
        print(f"{len(text) - 8 - len(new)} of {len(text) - 8} blocks share 13 tokens: left out")
        return torch.tensor(new[:most]), torch.tensor(text[-8:])

    def others(self):
        """Yield questions about other places."""
        draw = random.Random(-1 - self.s.seed)
        for n in range(self.s.others):
            place = "".join(draw.choices(SYLLABLES, k=3)).capitalize()
            yield TAUGHT[n % 3][n // 3 % 3].format(place)

    def count_as_ordinary(self, sentences):
        """Count each sentence as a block of ordinary text."""
        for text in sentences:
            ids = torch.tensor([self.tokenizer(text).input_ids])
            for layer, reads in choose.ordinary_reads(self.model, [ids]).items():
                self.counts[layer] += reads
            self.batches += 1

    def perplexities(self):
        return {name: ask.perplexity(self.model, ids, self.tokenizer)
                for name, ids in self.texts.items()}

    def forgetting(self):
        """Tell by what share the perplexity of each text rose."""
        rise = {name: now / self.before[name] - 1 for name, now in self.perplexities().items()}
        return {**rise, "known": ask.recalled(self.model, self.known).double().mean().item()}

    def optimizers(self, data):
        """Make the optimizers of a lesson, and choose its rows."""
        s = self.s
        if s.method in ("lora", "full"):
            weights = [p for p in self.model.parameters() if p.requires_grad]
            return [torch.optim.AdamW(weights, lr=s.lr, weight_decay=0.0, fused=True)]
        chosen = None
        if s.method == "rows":
            chosen = choose.choose_rows(self.model, data, self.counts, self.batches, s.rows,
                                        power=s.power, tf=TF[s.tf])
        groups = [{"params": [memory.values], "rows": chosen and chosen[n]}
                  for n, memory in find_memories(self.model).items()]
        values = (RowSGD if s.sgd else LazyAdam)(groups, lr=s.lr)
        if not s.query_lr:
            return [values]
        weights = [p.requires_grad_() for memory in find_memories(self.model).values()
                   for name, p in memory.named_parameters() if not name.startswith("values.")]
        return [values, torch.optim.AdamW(weights, lr=s.query_lr, weight_decay=0.0)]

    def choose_for_step(self, values):
        """Choose the rows of this step by tf-idf, as Lin et al. do."""
        for (n, memory), group in zip(find_memories(self.model).items(), values.param_groups,
                                      strict=True):
            slots = torch.cat([read[0].flatten() for read in memory.values.reads]).long()
            reads = torch.bincount(slots, minlength=len(memory.values.weight))
            group["rows"] = choose.specific_rows({n: reads}, self.counts, self.batches, self.s.rows,
                                                 self.s.power, TF[self.s.tf])[n]

    def log(self, line):
        print(json.dumps(line), flush=True)
        self.lines.append(line)

    def trained(self):
        return [p for p in self.model.parameters() if p.requires_grad]

    def save(self, optimizers, **place):
        """Save what is trained, and where the run stands."""
        with atomic(self.file) as file:
            states = [optimizer.state_dict() for optimizer in optimizers]
            torch.save({"weights": self.trained(), "optimizers": states, "lines": self.lines,
                        "counts": (self.counts, self.batches), "place": place}, file)

    def restore(self, optimizers):
        """Load what save() wrote. Returns where the run stood."""
        saved, self.saved = self.saved, None
        with torch.no_grad():
            for weight, value in zip(self.trained(), saved["weights"], strict=True):
                weight.copy_(value)
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.lines[1:] = saved["lines"][1:]
        return saved["place"]

    def predict(self, ids, mask, labels):
        """Predict as ask.predict does. A Llama reads all sentences in one row, without padding:
        transformers keeps them apart, because their positions begin anew."""
        if self.model.config.model_type != "llama" or mask.all():
            return ask.predict(self.model, ids, mask, labels)
        real = mask > 0
        places = (real.cumsum(1) - 1)[real]
        return ask.predict(self.model, ids[real][None], None, labels[real][None],
                           position_ids=places[None], use_cache=False)

    def train(self, data, evaluate, lesson=1):
        """Train on encode's tensors until evaluate(step, loss, seconds) is true."""
        s, order, draw, seconds, begin = self.s, [], random.Random(self.s.seed), 0.0, 0
        if self.saved and self.saved["place"]["lesson"] > lesson:
            return  # this lesson was learned before
        optimizers = self.optimizers(data)
        if self.saved:
            _, begin, order, state, seconds = self.restore(optimizers).values()
            draw.setstate(state)
        for step in range(begin + 1, s.steps + 1):
            start = time.time()
            if len(order) < s.batch:
                order += draw.sample(range(len(data[0])), len(data[0]))
            pick, order = order[:s.batch], order[s.batch:]
            loss = F.cross_entropy(*self.predict(*ask.take(data, pick, "cpu")))
            loss.backward()
            if s.method == "step":
                self.choose_for_step(optimizers[0])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            seconds += time.time() - start
            if evaluate(step, loss.item(), seconds):
                return
            if step % SAVE_EVERY == 0:
                self.save(optimizers, lesson=lesson, step=step, order=order,
                          draw=draw.getstate(), seconds=seconds)

    def changed(self):
        """Count the rows that differ from 0, in each layer."""
        return [int(memory.values.weight.any(1).sum())
                for memory in find_memories(self.model).values()]


def teach_facts(s, study):
    lessons = invent(s)
    asked = [[ask.encode(facts, study.tokenizer, end=False) for facts in (some, new)]
             for _, some, new in lessons]

    def recall(data):
        return round(ask.recalled(study.model, data).double().mean().item(), 6)

    for number, (taught, _, _) in enumerate(lessons):
        def evaluate(step, loss, seconds, number=number):
            every = 10 if s.facts <= 200 else 80
            if step < s.steps and (step % every or loss > 1.5):
                return False
            line = {"lesson": number + 1, "step": step, "loss": loss, "seconds": round(seconds, 1),
                    "recall": recall(asked[number][0])}
            done = line["recall"] >= s.goal or step == s.steps
            first = line["recall"] >= 0.95 and all(
                old["recall"] < 0.95 for old in study.lines[1:] if old["lesson"] == number + 1)
            if done or first or step % 40 == 0:
                line |= {"new": recall(asked[number][1]), **study.forgetting()}
                line["rows"] = study.changed()
            if done and s.lessons > 1:
                last = number + 1 == s.lessons  # then all lessons are asked, else the first one
                line["kept"] = [[recall(some), recall(new)]
                                for some, new in asked[:len(asked) if last else 1]]
            study.log(line)
            return done
        study.train(ask.encode(taught, study.tokenizer, end=False), evaluate, number + 1)
        if s.keep_lessons and not study.saved:  # what was saved has the counts of earlier lessons
            study.count_as_ordinary(" ".join(fact) for fact in taught)


def teach_text(s, study):
    """Learn a text: 8 blocks a step, each token from those before it."""
    blocks = study.text
    labels = blocks.roll(-1, 1)
    labels[:, -1] = -100

    def evaluate(step, loss, seconds):
        if step % 24 == 0 or step == s.steps:
            study.log({"step": step, "loss": loss, "seconds": round(seconds, 1),
                       **study.forgetting(), "rows": study.changed()})

    study.train((blocks, torch.ones_like(blocks), labels), evaluate)


def main(argv=None):
    s = load_settings(Settings, argv)
    for name in ("model", "ordinary", "wikitext", "novels", "out"):
        if not getattr(s, name):
            raise UserError(f"--{name} is needed")
    if s.phrasings > 10:
        raise UserError("--phrasings: expected 10 at most")
    # A cache of weights in bfloat16 would outlive their updates.
    with torch.autocast("cpu", torch.bfloat16, s.dtype == "bfloat16", cache_enabled=False):
        study = Study(s)
        study.log({**asdict(s), "before": study.before, "torch": str(torch.__version__),
                   "threads": torch.get_num_threads()})
        (teach_text if s.text else teach_facts)(s, study)
    write_text(s.out, "".join(json.dumps(line) + "\n" for line in study.lines))
    discard(study.file)


if __name__ == "__main__":
    run_main(main)
