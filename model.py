"""
BERT (Devlin et al., 2018), with a product-key memory in some of its layers.

x' = LN(x + alpha * FFN(x) + beta * PKM(x))      Kim & Jung (2020), section 4.2

(alpha, beta) = (1, 0) is the FFN layer, (0, 1) the PKM layer, and (1, 1) the residual memory
(ResM). With causal = True the same network predicts the next token, as Lample et al.'s
(2019) does: its logits depend on earlier tokens only. Caveat: in training the batch norm of a
memory's queries sees the whole batch, as in XLM.

>>> model = LanguageModel(BertConfig(**SIZES["base"], memory_layers=(4, 8)))  # 515M parameters
>>> logits = model(ids)                             # (batch, time) -> (batch, time, vocab_size)
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from pkm import PKM

SIZES = {
    "base": {"n_layer": 12, "n_head": 12, "d_model": 768, "d_ff": 3072},
    "large": {"n_layer": 24, "n_head": 16, "d_model": 1024, "d_ff": 4096},
    "distil": {"n_layer": 6, "n_head": 12, "d_model": 768, "d_ff": 3072, "type_vocab": 0},
    # init_std goes with 1 / sqrt(width); with 0.02 a demo of 4,000 steps ended at 69.6, not 36.1
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
    type_vocab: int = 2  # token types: first and second sentence; 0: none (DistilBERT)
    dropout: float = 0.1
    init_std: float = 0.02  # standard deviation of new weights, except in memories
    causal: bool = False  # a token sees only itself and earlier tokens
    memory_layers: tuple = ()  # counted from 1; section 5.1: 4 and 8 of 12, 2 and 4 of 6
    alpha: float = 1.0  # weight of the FFN in memory layers; 0: they have no FFN
    beta: float = 1.0  # weight of the memory; 0: they have no memory
    n_keys: int = 512  # n_keys^2 slots
    memory_heads: int = 4
    topk: int = 32
    key_dim: int = 256

    def __post_init__(self):
        self.memory_layers = tuple(self.memory_layers)
        layers = set(range(1, self.n_layer + 1)) & set(self.memory_layers)
        if self.d_model % self.n_head:
            raise ValueError(f"n_head = {self.n_head}: expected a divisor of the width "
                             f"{self.d_model}")
        if len(layers) < len(self.memory_layers):
            raise ValueError(f"memory_layers = {self.memory_layers}: expected different ones of 1 "
                             f"to {self.n_layer}")
        if self.alpha == self.beta == 0:
            raise ValueError("alpha = beta = 0: a layer needs an FFN or a memory")


class Layer(nn.Module):
    """One encoder layer: self-attention, then FFN, memory or both, with post-LN."""

    def __init__(self, config, alpha, beta):
        super().__init__()
        d = config.d_model
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.causal = config.causal
        self.alpha = alpha
        self.beta = beta
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.attention_norm = nn.LayerNorm(d, eps=1e-12)
        if alpha:
            self.up = nn.Linear(d, config.d_ff)
            self.down = nn.Linear(config.d_ff, d)
        self.norm = nn.LayerNorm(d, eps=1e-12)
        self.memory = None  # Bert builds the memories last

    def forward(self, x, mask=None):
        """x: (batch, time, d_model). mask: (batch, time) bool, or None. Returns x's shape."""
        batch, time, d = x.shape
        shape = batch, time, 3, self.n_head, d // self.n_head
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        visible = None if mask is None else mask[:, None, None, :]
        if self.causal and mask is not None:  # attention takes is_causal or a mask, not both
            visible = visible & mask.new_ones(time, time).tril()
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=self.causal and mask is None,
            dropout_p=self.dropout if self.training else 0.0)  # (batch, n_head, time, d_head)
        attended = self.out(attended.transpose(1, 2).reshape(batch, time, d))
        x = self.attention_norm(x + F.dropout(attended, self.dropout, self.training))
        y = x
        if self.alpha:
            ffn = self.down(F.gelu(self.up(x)))
            y = torch.add(y, F.dropout(ffn, self.dropout, self.training), alpha=self.alpha)
        if self.memory is not None:  # no dropout, as in XLM (our reading: the paper is silent)
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
        # Memories draw from a copy of the generator. All other weights, and those of a head that is
        # made after this, begin as they would without memories.
        with torch.random.fork_rng([]):
            for layer in self.layers:
                if layer.beta:
                    layer.memory = PKM(d, config.n_keys, config.memory_heads, config.topk,
                                       config.key_dim)

    def init_weights(self, module):
        """Draw weights from a normal distribution (Devlin et al.'s is truncated); biases are 0."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.init_std)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, ids, mask=None, token_types=None):
        """Encode token ids (batch, time) to hidden states (batch, time, d_model).

        mask: (batch, time), nonzero at real tokens, or None without padding. token_types: (batch,
        time), 0 by default; a model without token types ignores them.
        """
        assert ids.shape[1] <= self.config.max_len, \
            f"{ids.shape[1]} tokens: the model has {self.config.max_len} positions (max_len)"
        x = self.words(ids) + self.positions.weight[:ids.shape[1]]
        if self.config.type_vocab:
            x = x + (self.token_types.weight[0] if token_types is None else
                     self.token_types(token_types))
        x = F.dropout(self.norm(x), self.config.dropout, self.training)
        mask = None if mask is None else mask.bool()
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def pool(self, hidden):
        """Project [CLS]: (batch, time, d_model) to (batch, d_model)."""
        return self.pooler(hidden[:, 0]).tanh()


class LanguageModel(nn.Module):
    """BERT that predicts masked tokens, or the next token if config.causal."""

    def __init__(self, config):
        super().__init__()
        self.bert = Bert(config)
        self.transform = nn.Linear(config.d_model, config.d_model)
        self.transform_norm = nn.LayerNorm(config.d_model, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.bert.init_weights(self.transform)

    def forward(self, ids, mask=None, token_types=None, positions=None, labels=None):
        """Predict words: logits (batch, time, vocab_size), or the loss with `labels`.

        positions (batch, masked): predict only there, which saves most of the head's work. labels:
        one for each position, -100 does not count. The loss is the mean cross-entropy in nats.
        """
        x = self.bert(ids, mask, token_types)
        if positions is not None:
            x = x.gather(1, positions[..., None].expand(-1, -1, x.shape[2]))  # (batch, masked, d)
        x = self.transform_norm(F.gelu(self.transform(x)))
        logits = F.linear(x, self.bert.words.weight, self.bias)  # tied to the embeddings
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Classifier(nn.Module):
    """BERT that maps texts to a class, or to a number if n_classes is 1 (GLUE)."""

    def __init__(self, config, n_classes):
        super().__init__()
        self.bert = Bert(config)
        self.head = nn.Linear(config.d_model, n_classes)
        self.bert.init_weights(self.head)

    def forward(self, ids, mask=None, token_types=None, labels=None):
        """Classify ids (batch, time): logits (batch, n_classes), or the mean loss of labels."""
        pooled = self.bert.pool(self.bert(ids, mask, token_types))
        logits = self.head(F.dropout(pooled, self.bert.config.dropout, self.training))
        if labels is None:
            return logits
        if labels.is_floating_point():
            return F.mse_loss(logits[:, 0].float(), labels)
        return F.cross_entropy(logits.float(), labels)


class SpanReader(nn.Module):
    """BERT that finds an answer in a text (SQuAD)."""

    def __init__(self, config):
        super().__init__()
        self.bert = Bert(config)
        self.head = nn.Linear(config.d_model, 2)
        self.bert.init_weights(self.head)

    def forward(self, ids, mask=None, token_types=None, labels=None):
        """Score tokens as start and end: (batch, time, 2), or the loss of labels (batch, 2)."""
        logits = self.head(self.bert(ids, mask, token_types))
        if labels is None:
            return logits
        if mask is not None:
            logits = logits.masked_fill(~mask.bool()[..., None], -torch.inf)
        return F.cross_entropy(logits.float(), labels)


HEADS = {None: LanguageModel, "classifier": Classifier, "span": SpanReader}  # in checkpoints


def build_model(config, head=None, labels=()):
    """Build a model with a head of HEADS. labels: a classifier's classes, () for a regression."""
    if head == "classifier":
        return Classifier(config, max(1, len(labels)))
    return HEADS[head](config)


def value_tables(model):
    """Collect the memories' values, {layer counted from 1: ValueTable}, for LazyAdam."""
    layers = enumerate(model.bert.layers, 1)
    return {n: layer.memory.values for n, layer in layers if layer.memory is not None}
