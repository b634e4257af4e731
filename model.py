"""
BERT, by hand (Devlin et al., 2018), with a product-key memory in some of its layers.

x' = LN(x + alpha * FFN(x) + beta * PKM(x))      Kim & Jung (2020), section 4.2
(alpha, beta) = (1, 0) is the FFN layer, (0, 1) the PKM layer, (1, 1) the residual memory (ResM).

>>> model = MaskedLM(BertConfig(**SIZES["base"], memory_layers=(4, 8)))  # 515M parameters
>>> logits = model(ids)                             # (batch, time) -> (batch, time, vocab_size)

$ python model.py export out/RUN DIR                # to Hugging Face's layout
"""
import json
import math
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import processors
from torch import nn

from configs import Failure, Parser, UserError, atomic, discard, need, run
from pkm import PKM
from prepare_data import WEIGHTS, build_tokenizer, read_vocab, special_tokens, unknown_weights

SIZES = {
    "base": {"n_layer": 12, "n_head": 12, "d_model": 768, "d_ff": 3072},
    "large": {"n_layer": 24, "n_head": 16, "d_model": 1024, "d_ff": 4096},
    "distil": {"n_layer": 6, "n_head": 12, "d_model": 768, "d_ff": 3072, "type_vocab": 0},
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
    type_vocab: int = 2  # token types: first and second sentence; 0: none, as DistilBERT
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
            y = torch.add(y, F.dropout(ffn, self.dropout, self.training), alpha=self.alpha)
        if self.beta:  # without dropout, as in XLM's memory layers: our reading
            y = torch.add(y, self.memory(x, mask), alpha=self.beta)
        return self.norm(y)


class Bert(nn.Module):
    """The encoder: token ids to hidden states, and a pooler over [CLS] for classification."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        d = config.d_model
        self.words = nn.Embedding(config.vocab_size, d)
        self.positions = nn.Embedding(config.max_len, d)
        if config.type_vocab:
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
        without padding; token_types: (batch, time), default 0, ignored by a model that has none.
        Returns (batch, time, d_model)."""
        if ids.shape[1] > self.config.max_len:
            raise UserError(f"sequence of {ids.shape[1]} tokens: the model has "
                            f"{self.config.max_len} positions (max_len)")
        x = self.words(ids) + self.positions.weight[:ids.shape[1]]
        if self.config.type_vocab:
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


HEADS = {None: MaskedLM, "classifier": Classifier, "span": SpanReader}  # as checkpoints name them


def build_model(config, head=None, labels=()):
    """A model of a BertConfig. head: a key of HEADS; labels: a classifier's, none of a regression's."""
    return Classifier(config, max(1, len(labels))) if head == "classifier" else HEADS[head](config)


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


def compiled(model, choice, device):
    """torch.compile(model), or the model itself, as `choice` ('on', 'off', 'auto') says."""
    on = {"on": True, "off": False, "auto": device.type == "cuda"}.get(choice)
    if on is None:
        raise UserError(f"compile = {choice!r}: expected auto, on or off")
    return torch.compile(model) if on else model


def learning_rate(step, config):
    """Linear warm-up over warmup_steps, then linear decay to 0 at max_steps; step counts from 0."""
    decay = (config.max_steps - step) / max(1, config.max_steps - config.warmup_steps)
    return config.lr * min((step + 1) / max(1, config.warmup_steps), decay, 1.0)


def adamw(model, config, device):
    """AdamW of everything but the value tables; config: has lr and weight_decay."""
    return torch.optim.AdamW(optimizer_groups(model, config.weight_decay), lr=config.lr,
                             betas=(0.9, 0.999), eps=1e-6, fused=device.type in ("cpu", "cuda"))


def update(optimizer, scaler, tables, config, lr):
    """One step with the gradients of scaled losses: of the dense parameters at `lr`, clipped to
    config.grad_clip, and of the value tables at config.value_lr; none where the GradScaler found
    an inf. Returns the gradient norm of the dense part, a tensor on the device."""
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
    for group in optimizer.param_groups:
        group["lr"] = lr
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    skipped = scaler.get_scale() < scale  # it found an inf
    optimizer.zero_grad(set_to_none=True)  # frees what the tables' step can use
    for table in tables:  # the scaler knows nothing of their gradient
        if skipped:
            table.reads.clear()
        else:
            table.step(config.value_lr, grad_scale=scale)
    return norm


def check_finite(step, losses, config, dtype):
    """Stop at the first step whose loss is no number, or whose gradient is none (in float16 the
    scaler skips such a step). losses: (loss, gradient norm) of the steps up to `step`."""
    before = "none"
    for n, (loss, norm) in enumerate(losses, step - len(losses) + 1):
        if not (math.isfinite(loss) and (math.isfinite(norm) or dtype == torch.float16)):
            cause = "float16 overflowed, or " if dtype == torch.float16 else ""
            raise Failure(
                f"step {n}: the loss is {loss}, the gradient norm {norm}, before that {before}. "
                f"Likely cause: {cause}lr {learning_rate(n - 1, config):.1e} or value_lr "
                f"{config.value_lr:.1e} is too high, or the warm-up too short. Checkpoints are as "
                "they were: --init_from=RUN --out=out/NAME starts from the last one")
        before = f"{norm:.1e}"


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


def model_file(model, labels=()):
    """What a model.pt holds: sizes and weights; of another model than MaskedLM also its `head`, of a
    Classifier the `labels` of its classes (none for a regression)."""
    saved = {"config": asdict(model.bert.config), "weights": model.state_dict()}
    if head := next(head for head, kind in HEADS.items() if type(model) is kind):
        saved |= {"head": head} | ({"labels": list(labels)} if head == "classifier" else {})
    return saved


def save_checkpoint(run, step, model, optimizer, state, keep=2, labels=()):
    """Write out/<run>/step_<step>/{model,optimizer,state}.pt, the folder whole or not at all, then
    drop all but the `keep` newest. labels: see model_file."""
    folder = Path(run) / f"step_{step:06d}"
    moments = {n: table.optimizer_state() for n, table in value_tables(model).items()}
    files = {"model": model_file(model, labels),
             "optimizer": {"dense": optimizer.state_dict(), "values": moments},
             "state": state}
    save_files(folder, files)
    for old in checkpoints(run)[:-keep]:
        discard(old)
    return folder


def save_files(folder, files):
    """Write {name: content} as <folder>/<name>.pt, the folder whole or not at all."""
    try:
        with atomic(folder) as temporary:
            temporary.mkdir()
            for name, content in files.items():
                torch.save(content, temporary / f"{name}.pt")
    except RuntimeError as error:  # how torch.save reports a failed write
        reason = str(error).splitlines()[0]
        raise Failure(f"{folder}: not saved, is the disk full? ({reason}); older "
                      "checkpoints are untouched") from None


def checkpoints(run):
    """The run's whole checkpoints, oldest first."""
    found = [p for p in Path(run).glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name[5:]))


def find_checkpoint(path):
    """`path` itself if it is a checkpoint, the newest one of it if it is a run, else None."""
    if (Path(path) / "model.pt").is_file():
        return Path(path)
    return next(reversed(checkpoints(path)), None)


def open_log(out, last_step):
    """<out>/log.jsonl, one JSON object a line, without what came after the checkpoint, and the half
    line that a killed process may have left."""
    path, kept = Path(out) / "log.jsonl", ""
    if path.exists() and last_step:
        for number, line in enumerate(path.read_text().split("\n")[:-1], 1):
            try:
                kept += f"{line}\n" if json.loads(line)["step"] <= last_step else ""
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{path}:{number}: not a record: remove the line") from None
    with atomic(path) as temporary:
        temporary.write_text(kept)
    return path.open("a", buffering=1)


def find_weights(path):
    """Where the weights of `path` are: a run (its newest checkpoint), a checkpoint, a folder in
    Hugging Face layout, or the name of one in data/weights/. Returns (checkpoint or folder, its
    vocab.txt); UserError where there is nothing."""
    if checkpoint := find_checkpoint(path):
        return checkpoint, checkpoint.parent / "vocab.txt"
    for folder in (Path(path), Path("data/weights", path)):
        if (folder / "config.json").is_file() and any((folder / name).is_file() for name in FILES):
            return folder, folder / "vocab.txt"
    if str(path) in WEIGHTS:
        raise UserError(f"{path}: not there yet: python prepare_data.py weights {path}")
    raise unknown_weights(str(path))


def read_weights(path):
    """What find_weights finds: a dict of config (BertConfig's settings), weights (under our names,
    of Hugging Face's what there is), and maybe head and labels, as save_checkpoint writes it."""
    place, vocab = find_weights(path)
    if (place / "model.pt").is_file():
        return load_file(place / "model.pt", mmap=True)
    return _read_huggingface(place, vocab)


def load_model(path):
    """The MaskedLM, Classifier or SpanReader of `path` (see find_weights). It maps a checkpoint's
    file, and has no second copy in memory; writing to the model does not change the file."""
    saved = read_weights(path)
    model = build_model(BertConfig(**saved["config"]), saved.get("head"), saved.get("labels", ()))
    # Hugging Face leaves the pooler out where the head has no use for it
    spare = {} if isinstance(model, Classifier) else {
        name: w for name, w in model.state_dict().items() if name.startswith("bert.pooler.")}
    load_weights(model, spare | saved["weights"], path, assign=find_checkpoint(path) is not None)
    return model


def load_file(path, hint="remove its folder to use an older checkpoint", mmap=False):
    """torch.load(weights_only=True): tensors and plain Python, nothing that runs. With mmap, a
    tensor is read from disk when it is first used."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # noqa: BLE001 - a damaged file can fail in any way
        raise UserError(f"{path}: truncated, damaged or no file of tensors ({type(error).__name__}; "
                        f"nothing in it was run): {hint}") from None


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
    """Copy a state dict into the model, or with `assign` let the model have its tensors. Each must
    be there in the model's shape; with `partial` it may lack some, or bring more. Returns the
    names that were copied."""
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


def init_from(model, path, reinit_ffn=False):
    """Start from a trained model (section 4.1), of a `path` as for find_weights: copy everything
    that fits, and say group by group what was loaded, left random or dropped. With reinit_ffn
    (ResM') the FFN of memory layers stays random, another task's head always."""
    weights = read_weights(path)["weights"]
    random = {("FFN", n) for n in model.bert.config.memory_layers if reinit_ffn}
    random.add(("task head", None))
    loaded = load_weights(model, {name: w for name, w in weights.items()
                                  if _group(name) not in random}, path, partial=True)
    own, groups = dict(model.named_parameters()), {}
    for name in [*own, *sorted(weights.keys() - model.state_dict().keys())]:
        status = "loaded" if name in loaded else "left random" if name in own else "dropped"
        part, layer = _group(name)
        size = (own if name in own else weights)[name].numel()
        groups.setdefault((status, part), []).append((layer, size))
    print(f"init_from {find_weights(path)[0]}:")
    for (status, part), members in groups.items():
        layers = sorted({layer for layer, _ in members if layer})
        where = f"  layers {', '.join(map(str, layers))}" if layers else ""
        print(f"  {status:12} {part:16} {sum(n for _, n in members):13,d} parameters{where}")


def _group(name):
    """The part of the model that a parameter belongs to, and its layer, counted from 1."""
    layer = re.match(r"bert\.layers\.(\d+)\.(\w+)", name)
    if not layer:
        return ("pooler" if "pooler" in name else "embeddings" if name.startswith("bert.")
                else "task head" if name.startswith("head.") else "MLM head"), None
    part = {"memory": "memory", "up": "FFN", "down": "FFN"}.get(layer[2], "attention, norms")
    return part, int(layer[1]) + 1


# Hugging Face's names for our modules, of BERT and of DistilBERT; {} stands for query, key, value.
FILES = ("model.safetensors", "pytorch_model.bin")
NAMES = {
    "bert": {
        "words": "embeddings.word_embeddings", "positions": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings", "norm": "embeddings.LayerNorm",
        "layers": "encoder.layer", "qkv": "attention.self.{}", "out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm", "up": "intermediate.dense",
        "down": "output.dense", "layer norm": "output.LayerNorm", "pooler": "pooler.dense",
        "transform": "cls.predictions.transform.dense", "bias": "cls.predictions.bias",
        "transform_norm": "cls.predictions.transform.LayerNorm", "parts": ("query", "key", "value")},
    "distilbert": {
        "words": "embeddings.word_embeddings", "positions": "embeddings.position_embeddings",
        "norm": "embeddings.LayerNorm", "layers": "transformer.layer",
        "qkv": "attention.{}_lin", "out": "attention.out_lin", "attention_norm": "sa_layer_norm",
        "up": "ffn.lin1", "down": "ffn.lin2", "layer norm": "output_layer_norm",
        "transform": "vocab_transform", "bias": "vocab_projector.bias",
        "transform_norm": "vocab_layer_norm", "parts": ("q", "k", "v")}}
SETTINGS = {  # BertConfig's in config.json
    "bert": {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
             "d_model": "hidden_size", "d_ff": "intermediate_size", "vocab_size": "vocab_size",
             "max_len": "max_position_embeddings", "type_vocab": "type_vocab_size",
             "dropout": "hidden_dropout_prob", "init_std": "initializer_range"},
    "distilbert": {"n_layer": "n_layers", "n_head": "n_heads", "d_model": "dim",
                   "d_ff": "hidden_dim", "vocab_size": "vocab_size", "dropout": "dropout",
                   "max_len": "max_position_embeddings", "init_std": "initializer_range"}}
SETTINGS["pkm-bert"] = {**SETTINGS["bert"], **{name: name for name in (
    "memory_layers", "alpha", "beta", "n_keys", "memory_heads", "topk", "key_dim")}}
HEAD_NAMES = {"classifier": "classifier", "span": "qa_outputs"}
ARCHITECTURES = {None: "BertForMaskedLM", "classifier": "BertForSequenceClassification",
                 "span": "BertForQuestionAnswering"}


def _their_names(name, head=None, kind="bert"):
    """Hugging Face's names, without prefix, for a tensor of ours: one, or three for qkv."""
    names = NAMES[kind]
    if layer := re.fullmatch(r"bert\.layers\.(\d+)\.(\w+)\.(.+)", name):
        part = names.get("layer norm" if layer[2] == "norm" else layer[2], layer[2])  # or memory
        theirs = f"{names['layers']}.{layer[1]}.{part}.{layer[3]}"
        return [theirs.format(p) for p in names["parts"]] if "{}" in theirs else [theirs]
    module, _, rest = name.removeprefix("bert.").partition(".")
    if module == "head":
        return [f"{HEAD_NAMES[head]}.{rest}"]
    return [f"{names.get(module, module)}.{rest}" if rest else names[module]]


def from_huggingface(weights, config, head=None):
    """A state dict of Hugging Face's BERT or DistilBERT under our names, with or without its
    prefix. What it lacks of ours, say a pooler, is left out, so is what it has besides: the tied
    decoder, BERT's next-sentence head."""
    found = {re.sub(r"^(distil)?bert\.", "", name): w for name, w in weights.items()}
    for old, new in (("gamma", "weight"), ("beta", "bias")):  # of TensorFlow's LayerNorm
        found = {re.sub(rf"LayerNorm\.{old}$", f"LayerNorm.{new}", n): w for n, w in found.items()}
    kind = "distilbert" if "transformer.layer.0.ffn.lin1.weight" in found else "bert"
    with torch.device("meta"):  # for its names
        own = build_model(config, head).state_dict()
    theirs = {name: _their_names(name, head, kind) for name in own}
    return {name: torch.cat([found[n] for n in names]) if len(names) > 1 else found[names[0]]
            for name, names in theirs.items() if all(n in found for n in names)}


def _read_huggingface(folder, vocab):
    """read_weights of a folder in Hugging Face layout, or as export() writes it."""
    file = folder / "config.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        kind = settings.get("model_type")
        if "roberta" in str(kind):
            raise unknown_weights(f"{folder}: {kind}")
        if kind not in SETTINGS:
            raise UserError(f"{file}: model_type = {kind!r}: expected bert or distilbert")
        known = {ours: settings[theirs] for ours, theirs in SETTINGS[kind].items()}
        config = BertConfig(**{"type_vocab": 0, **known})
    except UserError:
        raise
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise UserError(f"{file}: damaged ({type(error).__name__}: {error})") from None
    for key, ours in (("hidden_act", "gelu"), ("activation", "gelu"), ("layer_norm_eps", 1e-12),
                      ("position_embedding_type", "absolute"), ("tie_word_embeddings", True)):
        if settings.get(key, ours) != ours:
            raise UserError(f"{file}: {key} = {settings[key]!r}: this BERT has {ours!r}")
    path = next(folder / name for name in FILES if (folder / name).is_file())
    if path.suffix == ".safetensors":
        load = need("safetensors.torch", f"{path}").load_file
        try:
            weights = load(path)
        except Exception as error:  # noqa: BLE001 - a damaged file can fail in any way
            raise UserError(f"{path}: truncated or damaged ({error})") from None
    else:
        weights = load_file(path, "fetch it again")
    if not (isinstance(weights, dict) and all(map(torch.is_tensor, weights.values()))):
        raise UserError(f"{path}: no state dict: expected names and tensors")
    head = next((head for head, name in HEAD_NAMES.items() if f"{name}.weight" in weights), None)
    if head == "classifier" and kind == "distilbert":
        raise UserError(f"{folder}: DistilBERT's classification head is another one than BERT's")
    tokens = read_vocab(vocab) if vocab.is_file() else range(config.vocab_size)
    if len(tokens) != config.vocab_size:
        raise UserError(f"{vocab}: {len(tokens):,} tokens do not fit weights for "
                        f"{config.vocab_size:,}")
    if "The" in tokens and "[MASK]" in tokens:
        raise UserError(f"{vocab}: a cased vocabulary: this tokenizer is the uncased BERT's")
    saved = {"config": asdict(config), "weights": from_huggingface(weights, config, head)}
    if head == "classifier":
        n_classes, names = len(weights["classifier.weight"]), settings.get("id2label") or {}
        names = [names.get(str(n), f"LABEL_{n}") for n in range(n_classes)]
        saved["labels"] = names if n_classes > 1 else []
    return saved | ({"head": head} if head else {})


def export(path, folder):
    """Write `path` (see find_weights) as a folder that transformers' from_pretrained loads:
    config.json, model.safetensors, vocab.txt, tokenizer.json. transformers has no memory: a model
    with one gets the same layout and a model_type of its own, which load_model reads."""
    saved, vocab = read_weights(path), read_vocab(find_weights(path)[1])
    config, head, labels = BertConfig(**saved["config"]), saved.get("head"), saved.get("labels")
    plain = not config.memory_layers or (config.alpha, config.beta) == (1, 0)
    if plain and not config.type_vocab:  # as good as none
        config.type_vocab = 2
        saved["weights"]["bert.token_types.weight"] = torch.zeros(2, config.d_model)
    weights = {}
    for name, w in saved["weights"].items():
        theirs = _their_names(name, head)
        prefix = "bert." if name.startswith("bert.") else ""
        parts = [w] if len(theirs) == 1 else [part.clone() for part in w.chunk(len(theirs))]
        weights |= {prefix + n: part for n, part in zip(theirs, parts, strict=True)}
    pad, unk, cls, sep, mask = special_tokens(vocab)
    kind = "bert" if plain else "pkm-bert"
    settings = {theirs: getattr(config, ours) for ours, theirs in SETTINGS[kind].items()}
    settings |= {"model_type": kind, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
                 "attention_probs_dropout_prob": config.dropout, "dtype": "float32",
                 "architectures": [ARCHITECTURES[head]], "pad_token_id": vocab.index(pad)}
    if not plain:
        settings["architectures"] = [f"PKM{ARCHITECTURES[head]}"]
    if head == "classifier":
        names = labels or ["LABEL_0"]
        settings |= {"id2label": dict(enumerate(names)),
                     "label2id": {name: n for n, name in enumerate(names)}}
    tokenizer = build_tokenizer(vocab)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, vocab.index(cls)), (sep, vocab.index(sep))])
    about = {"tokenizer_class": "BertTokenizer" if cls == "[CLS]" else "PreTrainedTokenizerFast",
             "do_lower_case": cls == "[CLS]", "model_max_length": config.max_len, "pad_token": pad,
             "unk_token": unk, "cls_token": cls, "sep_token": sep, "mask_token": mask}
    save_file = need("safetensors.torch", "export").save_file
    if Path(folder).exists():
        raise UserError(f"{folder} exists already")
    with atomic(folder) as temporary:
        temporary.mkdir()
        save_file(weights, temporary / "model.safetensors", {"format": "pt"})
        shutil.copyfile(find_weights(path)[1], temporary / "vocab.txt")
        tokenizer.save(str(temporary / "tokenizer.json"))
        for name, content in (("config", settings), ("tokenizer_config", about)):
            (temporary / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        if not plain:
            (temporary / "README.md").write_text(MEMORY_README.format(**asdict(config)))
    print(f"{folder}: {'' if plain else 'PKM'}{ARCHITECTURES[head]}, {len(weights)} tensors")


MEMORY_README = """# BERT with product-key memory

Layers {memory_layers}, counted from 1, have a memory of {n_keys} x {n_keys} slots: alpha {alpha}, beta {beta}.
`transformers` does not know such layers. pkm-bert reads this folder:

```python
import model
bert = model.load_model("THIS_FOLDER").eval()
```

or `--init_from=THIS_FOLDER`. The tensors are named as Hugging Face's BERT names them; those of the
memory of layer 4 are under `bert.encoder.layer.3.memory.`
"""


def main(argv=None):
    parser = Parser(description=__doc__.splitlines()[1])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("export", help=export.__doc__.split(":")[0])
    command.add_argument("path", help="out/<run>, or one of its checkpoints")
    command.add_argument("folder", help="the new folder")
    args = parser.parse_args(argv)
    export(args.path, args.folder)


if __name__ == "__main__":
    run(main)
