"""
BERT, by hand (Devlin et al., 2018), with a product-key memory in some of its layers.

x' = LN(x + alpha * FFN(x) + beta * PKM(x))      Kim & Jung (2020), section 4.2
(alpha, beta) = (1, 0) is the FFN layer, (0, 1) the PKM layer, (1, 1) the residual memory (ResM).

>>> model = MaskedLM(BertConfig(**SIZES["base"], memory_layers=(4, 8)))  # 515M parameters
>>> logits = model(ids)                             # (batch, time) -> (batch, time, vocab_size)
"""
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from configs import Failure, UserError, atomic, discard
from pkm import PKM

SIZES = {
    "base": {"n_layer": 12, "n_head": 12, "d_model": 768, "d_ff": 3072},
    "large": {"n_layer": 24, "n_head": 16, "d_model": 1024, "d_ff": 4096},
    "distil": {"n_layer": 6, "n_head": 12, "d_model": 768, "d_ff": 3072},
    # init_std: 0.02 at width 768 is 0.07 at width 64, by 1 / sqrt(width); with 0.02 the demo ends
    # at perplexity 77.3, not at 41.3 (one seed, configs/demo.py)
    "demo": {"n_layer": 4, "n_head": 4, "d_model": 64, "d_ff": 128, "max_len": 128,
             "init_std": 0.07},
}


@dataclass
class BertConfig:
    vocab_size: int = 30522
    n_layer: int = 12
    n_head: int = 12
    d_model: int = 768
    d_ff: int = 3072
    max_len: int = 512  # learned positions
    type_vocab: int = 2  # token types: first and second sentence
    dropout: float = 0.1
    init_std: float = 0.02  # of every Linear and Embedding but the memory's
    memory_layers: tuple = ()  # counted from 1: (4, 8) of 12, (2, 4) of 6 in section 5.1
    alpha: float = 1.0  # of the FFN, in memory layers; 0: no FFN parameters there
    beta: float = 1.0  # of the memory; 0: none, plain layers
    n_keys: int = 512  # n_keys^2 slots
    memory_heads: int = 4
    topk: int = 32
    key_dim: int = 256

    def __post_init__(self):
        self.memory_layers = tuple(self.memory_layers)
        if self.d_model % self.n_head:
            raise UserError(f"d_model = {self.d_model} is no multiple of n_head = {self.n_head}")
        if self.alpha == self.beta == 0:
            raise UserError("alpha = beta = 0: memory layers would have neither FFN nor memory")
        if self.memory_heads < 1:
            raise UserError(f"memory_heads = {self.memory_heads}: expected at least 1")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout = {self.dropout}: expected 0 to less than 1")
        if bad := [n for n in self.memory_layers if not 1 <= n <= self.n_layer]:
            raise UserError(f"memory_layers = {self.memory_layers}: there is no layer {bad[0]}, "
                            f"layers are counted from 1 to {self.n_layer}")


class Layer(nn.Module):
    """One encoder layer: self-attention, then FFN, memory or both, each with post-LN."""

    def __init__(self, config, alpha, beta):
        super().__init__()
        d = config.d_model
        self.n_head, self.dropout = config.n_head, config.dropout
        self.alpha, self.beta = alpha, beta
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.attention_norm = nn.LayerNorm(d, eps=1e-12)
        if alpha:
            self.up = nn.Linear(d, config.d_ff)
            self.down = nn.Linear(config.d_ff, d)
        self.norm = nn.LayerNorm(d, eps=1e-12)

    def forward(self, x, mask=None):
        batch, time, d = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=None if mask is None else mask[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0)  # (batch, n_head, time, d_head)
        attended = self.out(attended.transpose(1, 2).reshape(batch, time, d))
        x = self.attention_norm(x + F.dropout(attended, self.dropout, self.training))
        y = x
        if self.alpha:
            ffn = self.down(F.gelu(self.up(x)))
            y = y.add(F.dropout(ffn, self.dropout, self.training), alpha=self.alpha)
        if self.beta:  # without dropout, as in XLM's memory layers: our reading
            y = y.add(self.memory(x, mask), alpha=self.beta)
        return self.norm(y)


class Bert(nn.Module):
    """The encoder: token ids to hidden states, and a pooler over [CLS] for classification."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        d = config.d_model
        self.words = nn.Embedding(config.vocab_size, d)
        self.positions = nn.Embedding(config.max_len, d)
        self.token_types = nn.Embedding(config.type_vocab, d)
        self.norm = nn.LayerNorm(d, eps=1e-12)
        switch = {n: (config.alpha, config.beta) for n in config.memory_layers}
        self.layers = nn.ModuleList(Layer(config, *switch.get(n, (1.0, 0.0)))
                                    for n in range(1, config.n_layer + 1))
        self.pooler = nn.Linear(d, d)
        self.apply(self.init_weights)
        for layer in self.layers:  # after that: the memory's initialisation is its own
            if layer.beta:
                try:
                    layer.memory = PKM(d, config.n_keys, config.memory_heads, config.topk,
                                       config.key_dim)
                except ValueError as error:
                    raise UserError(str(error)) from None

    def init_weights(self, module):
        """Normal (Devlin et al.'s is truncated), biases 0."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.init_std)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, ids, mask=None, token_types=None):
        """ids: (batch, time) token ids; mask: (batch, time) bool, True at real tokens, None
        without padding; token_types: (batch, time), default 0. Returns (batch, time, d_model)."""
        if ids.shape[1] > self.config.max_len:
            raise UserError(f"sequence of {ids.shape[1]} tokens: the model has "
                            f"{self.config.max_len} positions (max_len)")
        x = self.words(ids) + self.positions.weight[:ids.shape[1]]
        x = x + (self.token_types.weight[0] if token_types is None else
                 self.token_types(token_types))
        x = F.dropout(self.norm(x), self.config.dropout, self.training)
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def pool(self, hidden):
        """(batch, time, d_model) to (batch, d_model): tanh of a projection of [CLS]."""
        return self.pooler(hidden[:, 0]).tanh()


class MaskedLM(nn.Module):
    """BERT with its masked-language-model head; the decoder is tied to the word embeddings."""

    def __init__(self, config):
        super().__init__()
        self.bert = Bert(config)
        self.transform = nn.Linear(config.d_model, config.d_model)
        self.transform_norm = nn.LayerNorm(config.d_model, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.bert.init_weights(self.transform)

    def forward(self, ids, positions=None, labels=None, mask=None, token_types=None):
        """Logits at `positions` (batch, masked) only, or everywhere: the vocabulary is most of
        the head's work. With `labels` (batch, masked; -100 does not count) their mean
        cross-entropy in nats instead."""
        x = self.bert(ids, mask, token_types)
        if positions is not None:
            x = x.gather(1, positions[..., None].expand(-1, -1, x.shape[2]))  # (batch, masked, d)
        x = self.transform_norm(F.gelu(self.transform(x)))
        logits = F.linear(x, self.bert.words.weight, self.bias)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Classifier(nn.Module):
    """BERT with a linear layer over the pooled [CLS]: one or two sentences to a class, or to a
    number where n_classes is 1 (GLUE)."""

    def __init__(self, config, n_classes):
        super().__init__()
        self.bert = Bert(config)
        self.head = nn.Linear(config.d_model, n_classes)
        self.bert.init_weights(self.head)

    def forward(self, ids, mask=None, token_types=None):
        """(batch, time) to logits (batch, n_classes)."""
        pooled = self.bert.pool(self.bert(ids, mask, token_types))
        return self.head(F.dropout(pooled, self.bert.config.dropout, self.training))


class SpanReader(nn.Module):
    """BERT with a linear layer over each token: where an answer starts and ends (SQuAD)."""

    def __init__(self, config):
        super().__init__()
        self.bert = Bert(config)
        self.head = nn.Linear(config.d_model, 2)
        self.bert.init_weights(self.head)

    def forward(self, ids, mask=None, token_types=None):
        """(batch, time) to logits (batch, time, 2): of starts and of ends."""
        return self.head(self.bert(ids, mask, token_types))


MASKED = 0.15  # share of the tokens to predict


def mask_tokens(ids, rng, vocab_size, special_ids, mask_id):
    """Choose tokens to predict: of 100, 80 become [MASK], 10 a random token, 10 stay.

    ids: (batch, time) integers; rng: numpy Generator. Special tokens are never chosen, nor drawn.
    The number of positions is the same for every sequence, round(0.15 * time), so that shapes
    are static; should a sequence have fewer ordinary tokens, the rest get the label -100.
    Returns int64 tensors: inputs (batch, time), positions and labels (batch, masked).
    """
    count = max(1, round(MASKED * ids.shape[1]))
    special = np.isin(ids, special_ids)
    order = rng.random(ids.shape) + special  # special tokens sort behind all others
    positions = np.sort(np.argpartition(order, count - 1, axis=1)[:, :count], axis=1)
    labels = np.take_along_axis(ids, positions, axis=1).astype(np.int64)
    chosen = ~np.take_along_axis(special, positions, axis=1)
    random = rng.integers(vocab_size - len(special_ids), size=labels.shape)
    for number in sorted(special_ids):  # step over them, one by one
        random += random >= number
    fate = rng.random(labels.shape)
    new = np.where(fate < 0.8, mask_id, np.where(fate < 0.9, random, labels))
    inputs = ids.astype(np.int64)
    np.put_along_axis(inputs, positions, np.where(chosen, new, labels), axis=1)
    labels[~chosen] = -100
    return tuple(torch.from_numpy(array) for array in (inputs, positions, labels))


def value_tables(model):
    """{layer, counted from 1: ValueTable}: the memories' values, which update themselves."""
    layers = enumerate(model.bert.layers, 1)
    return {n: layer.memory.values for n, layer in layers if layer.beta}


def optimizer_groups(model, weight_decay):
    """Parameter groups for AdamW: no decay on biases and norms; value tables are not in them."""
    own = {id(table.weight) for table in value_tables(model).values()}
    dense = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    return [{"params": [p for p in dense if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in dense if p.dim() <= 1], "weight_decay": 0.0}]


# Dense bf16/fp16 tensor-core peaks, FLOP/s, of the SXM cards where there are several, from
# NVIDIA's data sheets.
PEAK_FLOPS = {"V100": 125e12, "A100": 312e12, "H100": 989e12, "H200": 989e12, "L4": 121e12,
              "4090": 165e12}


def peak_flops(device):
    """The peak of a CUDA device, or None where it is not known."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    names = re.findall(r"\w+", card)  # whole words: an L40 is no L4
    return next((peak for name, peak in PEAK_FLOPS.items() if name in names), None)


def flops_per_token(model, time):
    """Floating-point operations of a training step per token, forward and backward: 6 for each
    weight that multiplies a token (sub-keys too), 12 * time * d_model a layer for attention, the
    head at the masked positions. Value reads move bytes; their few operations are left out."""
    config = model.bert.config
    weights = sum(p.numel() for name, p in model.bert.layers.named_parameters()
                  if p.dim() > 1 and not name.endswith("values.weight"))
    weights += MASKED * config.d_model * (config.d_model + config.vocab_size)
    return 6 * weights + 12 * config.n_layer * time * config.d_model


def save_checkpoint(run, step, model, optimizer, state, keep=2):
    """Write out/<run>/step_<step>/{model,optimizer,state}.pt, the folder whole or not at all, then
    drop all but the `keep` newest."""
    folder = Path(run) / f"step_{step:06d}"
    moments = {n: table.optimizer_state() for n, table in value_tables(model).items()}
    files = {"model": {"config": asdict(model.bert.config), "weights": model.state_dict()},
             "optimizer": {"dense": optimizer.state_dict(), "values": moments},
             "state": state}
    try:
        with atomic(folder) as temporary:
            temporary.mkdir()
            for name, content in files.items():
                torch.save(content, temporary / f"{name}.pt")
    except RuntimeError as error:  # how torch.save reports a failed write
        reason = str(error).splitlines()[0]
        raise Failure(f"{folder}: not saved, is the disk full? ({reason}); older "
                      "checkpoints are untouched") from None
    for old in checkpoints(run)[:-keep]:
        discard(old)
    return folder


def checkpoints(run):
    """The run's whole checkpoints, oldest first."""
    found = [p for p in Path(run).glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name[5:]))


def find_checkpoint(path):
    """`path` itself if it is a checkpoint, the newest one of it if it is a run, else None."""
    if (Path(path) / "model.pt").is_file():
        return Path(path)
    return next(reversed(checkpoints(path)), None)


def load_file(path, mmap=False):
    """torch.load(weights_only=True): tensors and plain Python, nothing that runs. With mmap the
    tensors stay on disk until they are looked at; writing to them does not change the file."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # noqa: BLE001 - a damaged file can fail in any way
        raise UserError(f"{path}: truncated or damaged ({type(error).__name__}): remove its "
                        "folder to use an older checkpoint") from None


def load_model(checkpoint):
    """The MaskedLM of a checkpoint folder, whose file it maps: never two copies in memory."""
    saved = load_file(Path(checkpoint) / "model.pt", mmap=True)
    model = MaskedLM(BertConfig(**saved["config"]))
    load_weights(model, saved["weights"], checkpoint, assign=True)
    return model


def load_optimizer(checkpoint, model, optimizer):
    """The other half of save_checkpoint: the optimizer's and the value tables' moments, in place.
    Returns the saved state."""
    saved = load_file(Path(checkpoint) / "optimizer.pt")
    state = load_file(Path(checkpoint) / "state.pt")
    optimizer.load_state_dict(saved["dense"])
    for n, table in value_tables(model).items():
        table.load_optimizer_state(saved["values"][n])
    return state


def load_weights(model, weights, source, partial=False, assign=False):
    """Copy a state dict into the model, or with `assign` make it the model's own. Every tensor must
    be there in the model's shape; with `partial` it may lack some, or bring more. Returns the names
    that were copied."""
    own = model.state_dict()
    for name in sorted(own.keys() & weights.keys()):
        if own[name].shape != weights[name].shape:
            raise UserError(f"{source}: {name} has shape {tuple(weights[name].shape)}, this "
                            f"model's is {tuple(own[name].shape)}: take the sizes of its training")
    if not partial and own.keys() != weights.keys():
        name = min(own.keys() ^ weights.keys())
        has = "no" if name in own else "an unknown"
        raise UserError(f"{source}: it has {has} {name}: this is another kind of model")
    model.load_state_dict(weights, strict=False, assign=assign)
    return own.keys() & weights.keys()


def init_from(model, checkpoint, reinit_ffn=False):
    """Start from a trained model (section 4.1): copy everything that fits, and say group by group
    what was loaded, left random or dropped. With reinit_ffn (ResM') the FFN of memory layers stays
    random."""
    weights = load_file(Path(checkpoint) / "model.pt")["weights"]
    random = {("FFN", n) for n in model.bert.config.memory_layers if reinit_ffn}
    loaded = load_weights(model, {name: w for name, w in weights.items()
                                  if _group(name) not in random}, checkpoint, partial=True)
    own, groups = dict(model.named_parameters()), {}
    for name in [*own, *sorted(weights.keys() - model.state_dict().keys())]:
        status = "loaded" if name in loaded else "left random" if name in own else "dropped"
        part, layer = _group(name)
        size = (own if name in own else weights)[name].numel()
        groups.setdefault((status, part), []).append((layer, size))
    print(f"init_from {checkpoint}:")
    for (status, part), members in groups.items():
        layers = sorted({layer for layer, _ in members if layer})
        where = f"  layers {', '.join(map(str, layers))}" if layers else ""
        print(f"  {status:12} {part:16} {sum(n for _, n in members):13,d} parameters{where}")


def _group(name):
    """The part of the model that a parameter belongs to, and its layer, counted from 1."""
    layer = re.match(r"bert\.layers\.(\d+)\.(\w+)", name)
    if not layer:
        return ("pooler" if "pooler" in name else "embeddings" if name.startswith("bert.")
                else "MLM head"), None
    part = {"memory": "memory", "up": "FFN", "down": "FFN"}.get(layer[2], "attention, norms")
    return part, int(layer[1]) + 1


def from_huggingface(weights, config):
    """A BertForMaskedLM state dict under our names; a missing pooler is left out."""
    def pair(ours, theirs):
        return {f"{ours}.{p}": f"{theirs}.{p}" for p in ("weight", "bias")}

    embeddings = "bert.embeddings."
    names = {"bert.words.weight": embeddings + "word_embeddings.weight",
             "bert.positions.weight": embeddings + "position_embeddings.weight",
             "bert.token_types.weight": embeddings + "token_type_embeddings.weight",
             "bias": "cls.predictions.bias",
             **pair("bert.norm", embeddings + "LayerNorm"),
             **pair("bert.pooler", "bert.pooler.dense"),
             **pair("transform", "cls.predictions.transform.dense"),
             **pair("transform_norm", "cls.predictions.transform.LayerNorm")}
    for n in range(config.n_layer):
        ours, theirs = f"bert.layers.{n}.", f"bert.encoder.layer.{n}."
        names |= {**pair(ours + "qkv", theirs + "attention.self.{}"),
                  **pair(ours + "out", theirs + "attention.output.dense"),
                  **pair(ours + "attention_norm", theirs + "attention.output.LayerNorm"),
                  **pair(ours + "up", theirs + "intermediate.dense"),
                  **pair(ours + "down", theirs + "output.dense"),
                  **pair(ours + "norm", theirs + "output.LayerNorm")}
    return {ours: torch.cat([weights[theirs.format(part)] for part in ("query", "key", "value")])
            if "{}" in theirs else weights[theirs]
            for ours, theirs in names.items() if "{}" in theirs or theirs in weights}
