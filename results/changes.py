"""
Train a model with some changes, then measure it on test text (results/changes.md).

$ python results/changes.py silu_gate configs/study/study_resm_init.py --seed=1 --init_from=RUN
$ python results/changes.py none configs/study/study_more.py --seed=1 --init_from=RUN

The first argument names the changes, joined by "+"; the others are pretrain.py's. A change
replaces functions and methods, in this process alone. The run gets a file test.json: results on
three texts, and the share of stale slots if it has usage snapshots.
"""
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from verdicts import stale_slots

import model
import pkm
import pretrain
import values
from lib.common.device import choose_device
from lib.common.errors import UserError
from lib.common.files import to_json, write_text
from lib.corpus.batches import masked_heldout
from lib.distributed.processes import run_ranks
from lib.slot_usage.contexts import open_corpus
from lib.slot_usage.evaluation import evaluate_language_model
from lib.training import trainer
from lib.weights import checkpoint

DROPPED = 0.1  # share of sub-keys or reads that training leaves out
WIDER = 1536  # hidden units that wide_ffn adds to an FFN: a step then takes 0.84 of (f)'s time
TEST = {  # by corpus: the texts to measure, and how many sequences of each; None: all
    "natural": {"natural": None, "natural_docs": 1500, "natural_wikitext2": 1500},
    "natural_bert": {"natural_bert": 2048, "bert_docs": 1500, "bert_wikitext2": 1500}}


def extend(owner, name):
    """Replace a function or method by the decorated one, which gets the old one first."""
    def replace(function):
        old = getattr(owner, name)
        setattr(owner, name, lambda *args, **named: function(old, *args, **named))
        return function
    return replace


def after_init(change):
    """Call change(memory, d_model) after a PKM is built."""
    @extend(pkm.PKM, "__init__")
    def init(old, memory, d_model, *args, **named):
        old(memory, d_model, *args, **named)
        change(memory, d_model)


def on_read(change):
    """Replace what a memory returns by change(memory, x, read)."""
    @extend(pkm.PKM, "forward")
    def forward(old, memory, x, mask=None):
        return change(memory, x, old(memory, x, mask))


def none():
    """Change nothing."""


def slow_search():
    """Train sub-keys and query at a tenth of the rate."""
    @extend(trainer, "optimizer_groups")
    def optimizer_groups(old, network, weight_decay, keys_lr=1.0):
        groups = old(network, weight_decay, keys_lr)
        slow = {p for name, p in network.named_parameters()
                if ".memory.query." in name or name.endswith(".memory.keys")}
        parts = []
        for group in groups:
            for chosen, factor in ((False, group["lr_factor"]), (True, 0.1)):
                part = [p for p in group["params"] if (p in slow) == chosen]
                parts += [{**group, "params": part, "lr_factor": factor}] if part else []
        return parts


def drop_keys():
    """Hide a tenth of the sub-keys from each token and head in training."""
    @extend(pkm.PKM, "search")
    def search(old, memory, query):
        if not memory.training:
            return old(memory, query)
        scores = split(memory, query) @ memory.keys.mT
        scores = scores.masked_fill(torch.rand_like(scores) < DROPPED, -torch.inf)
        return best_slots(memory, scores)


def drop_reads():
    """Drop a tenth of the reads in training, and scale up the others."""
    @extend(values.ValueTable, "forward")
    def forward(old, table, slots, weights, dtype=None):
        return old(table, slots, F.dropout(weights, DROPPED, table.training), dtype)


def layer_norm():
    """Normalize each query half by a layer norm, not by the batch norm."""
    def change(memory, d_model):
        half = memory.keys.shape[3]
        memory.query_norm = nn.ModuleList([nn.LayerNorm(half)])

    def normalize(memory, query, mask=None):
        half = memory.keys.shape[3]
        return memory.query_norm[0](query.view(-1, half)).view_as(query)

    after_init(change)
    pkm.PKM.normalize = normalize


def qk_norm():
    """Score by the cosine of query and sub-key times a learned scale, without batch norm."""
    def change(memory, d_model):
        heads, _, _, half = memory.keys.shape
        memory.query_norm = nn.Identity()
        # with the batch norm scores have this spread at the start: keys are uniform
        memory.scale = nn.Parameter(torch.full((heads, 2, 1, 1), (half / 3) ** 0.5))

    def search(memory, query):
        query, keys = F.normalize(split(memory, query), dim=3), F.normalize(memory.keys, dim=3)
        scores = query @ keys.mT * memory.scale
        return best_slots(memory, scores)

    after_init(change)
    pkm.PKM.search = search


def split(memory, query):
    """Cut queries (tokens, heads * key_dim) into halves: (heads, 2, tokens, half)."""
    heads, _, _, half = memory.keys.shape
    return query.view(-1, heads, 2, half).permute(1, 2, 0, 3)


def best_slots(memory, scores):
    """Find the best slots as PKM.search does. scores: (heads, 2, tokens, n_keys)."""
    with torch.no_grad():
        best, index = scores.topk(memory.topk)
        pairs = pkm.candidates(memory.topk, scores.device)
        sums = best[:, 0][..., pairs[0]] + best[:, 1][..., pairs[1]]
        index = index.gather(3, pairs[:, sums.topk(memory.topk).indices].transpose(0, 1))
        slots = (memory.n_keys * index[:, 0] + index[:, 1]).int()
    return slots.transpose(0, 1), scores.gather(3, index).sum(1).softmax(2).transpose(0, 1)


def silu_gate():
    """Multiply a read by silu(x W). Memory+ has another W behind it (Berges et al., 2024)."""
    def change(memory, d_model):
        memory.gate = nn.Linear(d_model, d_model, bias=False)
        nn.init.normal_(memory.gate.weight, std=d_model**-0.5)

    after_init(change)
    on_read(lambda memory, x, read: read * F.silu(memory.gate(x)))


def learned_beta():
    """Multiply a read by a learned number, which starts at 0."""
    after_init(lambda memory, d_model: setattr(memory, "factor", nn.Parameter(torch.zeros(()))))
    on_read(lambda memory, x, read: read * memory.factor)


def shared_table():
    """Give all memory layers one table of values."""
    @extend(model.Bert, "__init__")
    def init(old, bert, config):
        old(bert, config)
        tables = [layer.memory.values for layer in bert.layers if layer.beta]
        for table in tables:
            table.weight = tables[0].weight

    @extend(trainer, "value_tables")
    def value_tables(old, network):  # for LazyAdam: each weight once
        return dict(list(old(network).items())[:1])


def decayed_values():
    """Decay the values' rate as the others' is decayed."""
    @extend(trainer.Trainer, "step")
    def step(old, self, number):
        config = self.config
        left = (config.max_steps - number) / max(1, config.max_steps - config.warmup_steps)
        for group in self.value_optimizer.param_groups:
            group["lr"] = config.value_lr * min(1.0, left)
        return old(self, number)


def widen(network):
    """Widen the FFNs of layers 2 and 3 by units whose output weights are 0."""
    for layer in network.bert.layers[1:3]:
        (d_ff, d), up, down = layer.up.weight.shape, layer.up, layer.down
        layer.up, layer.down = nn.Linear(d, d_ff + WIDER), nn.Linear(d_ff + WIDER, d)
        network.bert.init_weights(layer.up)
        nn.init.zeros_(layer.down.weight)
        with torch.no_grad():
            layer.up.weight[:d_ff], layer.up.bias[:d_ff] = up.weight, up.bias
            layer.down.weight[:, :d_ff] = down.weight
            layer.down.bias.copy_(down.bias)


def wide_ffn():
    """Widen two FFNs of the initial model. A checkpoint of the run holds wide ones."""
    checkpoint.check_model_file = lambda saved, file: None  # the config does not tell of them

    @extend(pretrain, "make_model")
    def make_model(old, config, corpus, newest):
        network, origin = old(config, corpus, newest)
        if not newest:
            widen(network)
        return network, origin

    @extend(pretrain, "load_weights")  # of the run's checkpoint
    def load_weights(old, network, weights, newest):
        widen(network)
        old(network, weights, newest)


def head_only():
    """Train the masked-LM head alone. All of the encoder stays as it is, embeddings too."""
    @extend(pretrain, "make_model")
    def make_model(old, *args):
        network, origin = old(*args)
        network.bert.requires_grad_(False)
        return network, origin


def measure_after_training():
    """Write test.json after a run's last step: its results on the test splits."""
    networks = []

    @extend(pretrain, "make_model")
    def make_model(old, *args):
        network, origin = old(*args)
        networks.append(network)
        return network, origin

    @extend(pretrain, "prepare_and_train")
    def prepare_and_train(old, config, run, argv):
        if config.dataset not in TEST:
            raise UserError(f"dataset = {config.dataset}: expected {' or '.join(TEST)}")
        corpora = [open_corpus(name) for name in TEST[config.dataset]]
        status = old(config, run, argv)
        path, last = run.folder / "test.json", run.newest_checkpoint()
        if path.exists() or not last or last.name != f"step_{config.max_steps:06d}":
            return status
        device, dtype, _ = choose_device(config.device, config.dtype)
        results = {}
        for corpus, sequences in zip(corpora, TEST[config.dataset].values(), strict=True):
            batches = masked_heldout(corpus, "test", config.seq_len, config.batch_size, sequences)
            results[corpus.name], _ = evaluate_language_model(networks[-1], batches, device, dtype)
        if config.usage_interval and model.value_tables(networks[-1]):
            results["stale"] = stale_slots(run)
        write_text(path, to_json(results, indent=1))
        return status


CHANGES = {change.__name__: change for change in (
    none, slow_search, drop_keys, drop_reads, layer_norm, qk_norm, silu_gate, learned_beta,
    shared_table, decayed_values, wide_ffn, head_only)}

def main(argv):
    names = argv[0].split("+") if argv else []
    if not names or not CHANGES.keys() >= set(names):
        raise UserError(f"which change? {', '.join(CHANGES)}, or several joined by +")
    for name in names:
        CHANGES[name]()
    measure_after_training()
    return pretrain.main(argv[1:])


if __name__ == "__main__":
    run_ranks(lambda: main(sys.argv[1:]))
