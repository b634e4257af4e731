"""
Product-key memory (Lample et al., 2019), as Kim & Jung (2020) put it into BERT.

A memory has n_keys^2 slots, each with a value vector. A token's query is cut into two halves; each
half is compared with n_keys sub-keys. The best sums of two scores are the best of all n_keys^2
slots. The softmax of these scores weighs the slots' values.

In a model of your own (this file needs nothing but torch):

>>> class Block(nn.Module):
...     def __init__(self, d):
...         super().__init__()
...         self.ffn, self.memory = nn.Linear(d, d), PKM(d, n_keys=64)   # 64 x 64 slots
...     def forward(self, x):
...         return x + self.ffn(x) + self.memory(x)
>>> model = Block(32)
>>> dense = torch.optim.AdamW(model.parameters())     # skips the values: they have no .grad
>>> values = LazyAdam([model.memory.values], lr=1e-3)  # updates the rows that were read
>>> model(torch.randn(4, 16, 32)).square().mean().backward()
>>> for optimizer in (dense, values):
...     optimizer.step()
...     optimizer.zero_grad()
"""
import copy
import itertools
import math
import re
import warnings
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adam import adam

NAME = re.sub(r"\W", "_", __name__)  # of the custom ops below: a copy of this file has its own
WARN_AT = 256  # backward passes without an update
CHUNK = 2**18  # table elements processed at a time: 1 MB in float32, which fits a core's cache
TABLES, NUMBERS = weakref.WeakValueDictionary(), itertools.count()  # how an op finds its table


class PKM(nn.Module):
    """Product-key memory with n_keys^2 slots (section 2.1; sizes of section 5.1 by default).

    Each of `heads` heads reads its topk best slots of one shared value table; the heads' reads
    are summed. Scores and softmax are computed in float32 at least, also under autocast. table:
    the class of the values, if not ValueTable.
    """

    def __init__(self, d_model, n_keys=512, heads=4, topk=32, key_dim=256, table=None,
                 query_norm=True):
        super().__init__()
        if not 1 <= topk <= n_keys:
            raise ValueError(f"topk = {topk}: expected 1 to n_keys = {n_keys}, the sub-keys that "
                             "a head can choose from")
        if key_dim < 2 or key_dim % 2:
            raise ValueError(f"key_dim = {key_dim}: expected an even number, for two halves")
        self.n_keys, self.heads, self.topk = n_keys, heads, topk
        self.query = nn.Linear(d_model, heads * key_dim)
        nn.init.xavier_uniform_(self.query.weight)
        self.query_norm = nn.BatchNorm1d(heads * key_dim) if query_norm else nn.Identity()
        half = key_dim // 2
        self.keys = nn.Parameter(torch.empty(heads, 2, n_keys, half))
        nn.init.uniform_(self.keys, -half**-0.5, half**-0.5)
        self.values = (table or ValueTable)(n_keys**2, d_model)

    def forward(self, x, mask=None):
        """x: (..., d_model); mask: (...), true or not 0 at real tokens, or None. Returns x's
        shape, in autocast's dtype where that is on. Padded tokens are not looked up and do not
        enter the batch norm's statistics; their output is 0. With a mask, a compiled model has a
        graph break here."""
        if mask is not None:
            return self._unpadded(x, mask.bool())
        query = self.query(x.flatten(0, -2))  # (tokens, heads * key_dim)
        dtype = query.dtype  # autocast's: the output has it, as an FFN's would
        with torch.autocast(x.device.type, enabled=False):
            slots, weights = self.search(self.query_norm(query.to(self.keys.dtype)))
            return self.values(slots, weights, dtype).view_as(x)

    @torch.compiler.disable  # every batch has another number of real tokens
    def _unpadded(self, x, mask):
        y = self(x[mask])
        return y.new_zeros(x.shape).index_put((mask,), y)

    def search(self, query):
        """The topk best slots of each head, exactly, and the softmax of their scores.

        query: (tokens, heads * key_dim). Returns slots (int32) and weights, both
        (tokens, heads, topk), best first. Slot = n_keys * (first sub-key) + (second sub-key).
        """
        heads, _, n_keys, half = self.keys.shape
        # not bfloat16, whose 8-bit significand would create ties
        keys = self.keys.to(torch.promote_types(self.keys.dtype, torch.float32))
        query = query.to(keys.dtype).view(-1, heads, 2, half).permute(1, 2, 0, 3)
        tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()
        by_hand = torch.is_grad_enabled() and not tracing  # see Scores
        with torch.set_grad_enabled(torch.is_grad_enabled() and tracing):
            scores = query @ keys.mT  # (heads, 2, tokens, n_keys)
        with torch.no_grad():  # choosing has no gradient
            best, index = scores.topk(self.topk)  # (heads, 2, tokens, topk)
            pairs = candidates(self.topk, query.device)
            sums = best[:, 0][..., pairs[0]] + best[:, 1][..., pairs[1]]
            chosen = pairs[:, sums.topk(self.topk).indices]  # (2, heads, tokens, topk)
            index = index.gather(3, chosen.transpose(0, 1))  # (heads, 2, tokens, topk)
            slots = (n_keys * index[:, 0] + index[:, 1]).int()
        score = scores.gather(3, index).sum(1)  # (heads, tokens, topk)
        if by_hand:
            score = Scores.apply(query, keys, index, score)
        return slots.transpose(0, 1), score.softmax(2).transpose(0, 1)


def candidates(topk, device):
    """The pairs (i, j) of ranks, (2, pairs), whose sums can be in the top k. With both halves'
    scores sorted, the pair (i, j), counted from 0, has (i+1)(j+1) - 1 pairs that are at least as
    good: 119 of 1,024 are left for k = 32. Made anew each time, as a module made on the meta device
    would lose a buffer of them."""
    count = sum(topk // (i + 1) for i in range(topk))
    rank = torch.arange(topk, device=device)
    per_rank = topk // (rank + 1)
    i = rank.repeat_interleave(per_rank, output_size=count)
    j = torch.arange(count, device=device) - (per_rank.cumsum(0) - per_rank)[i]
    return torch.stack([i, j])


class Scores(torch.autograd.Function):
    """Makes the search's top-k scores differentiable. Autograd would keep all scores until
    backward; this keeps none, and works on 256 tokens at a time on a CPU, in cache: a training step
    of the layer took up to 1.1 times as long without it (512 tokens, two cores of Zen 4 EPYC)."""

    @staticmethod
    def forward(ctx, query, keys, index, score):
        """query: (heads, 2, tokens, half); keys: (heads, 2, n_keys, half); index: (heads, 2,
        tokens, topk); score: (heads, tokens, topk), which is returned."""
        ctx.save_for_backward(query, keys, index)
        return score.clone()

    @staticmethod
    def backward(ctx, grad):
        query, keys, index = ctx.saved_tensors
        grad_query, grad_keys = torch.empty_like(query), torch.zeros_like(keys)
        chunk = 256 if grad.is_cpu else max(1, grad.shape[1])
        for at in range(0, grad.shape[1], chunk):
            at = slice(at, at + chunk)
            of_scores = grad.new_zeros(*index[:, :, at].shape[:3], keys.shape[2])
            of_scores.scatter_add_(3, index[:, :, at], grad[:, None, at].expand_as(index[:, :, at]))
            grad_query[:, :, at] = of_scores @ keys
            grad_keys += of_scores.mT @ query[:, :, at]
        return grad_query, grad_keys, None, None


class ValueTable(nn.Module):
    """The values of a memory: (n_slots, dim) rows, read as weighted sums.

    Autograd never makes the table's gradient, which would be as large as the table. For row r it
    is the sum, over the reads of r, of weight * grad_out[token]. So backward only stores (slots,
    weights, grad_out) in `reads`, and LazyAdam computes from them the rows that it updates.
    torch.nn.utils.clip_grad_norm_ and GradScaler do not see this gradient; with a GradScaler, call
    LazyAdam.step(grad_scale=its scale) where it found no inf. weight.requires_grad_(False) freezes
    the table.
    """

    def __init__(self, n_slots, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_slots, dim))
        self.reset_parameters()
        self.reads = []  # of the backward passes since the last update
        self._register()

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=self.weight.shape[1]**-0.5)

    def _register(self):
        number = next(NUMBERS)
        TABLES[number] = self
        self.number = torch.tensor(number, device="cpu")  # an int would be compiled in

    def __setstate__(self, state):  # of a deep copy, or an unpickled table
        super().__setstate__(state)
        self._register()

    def forward(self, slots, weights, dtype=None):
        """Weighted sum of rows: slots (int) and weights, both (tokens, heads, topk), to
        (tokens, dim) in `dtype` (default: the table's). A forward hook sees every read."""
        tracing = torch.jit.is_tracing() or torch.compiler.is_exporting()
        lookup = read if torch.is_grad_enabled() and not tracing else weighted_sum
        return lookup(self.weight, slots.flatten(1), weights.flatten(1), self.number,
                      dtype or self.weight.dtype)


def weighted_sum(table: Tensor, slots: Tensor, weights: Tensor, number: Tensor,
                 dtype: torch.dtype) -> Tensor:
    weights = weights.to(table.dtype)
    return F.embedding_bag(slots, table, per_sample_weights=weights, mode="sum").to(dtype)


# In training, the lookup and its backward are custom ops: torch.compile makes one graph of a model.
read = torch.library.custom_op(f"{NAME}::read", weighted_sum, mutates_args=())


@torch.library.custom_op(f"{NAME}::read_backward", mutates_args=(),
                         tags=[torch.Tag.cudagraph_unsafe])  # a replay would store nothing
def read_backward(grad_out: Tensor, rows: Tensor, slots: Tensor, weights: Tensor, number: Tensor,
                  store: bool, clone: bool) -> Tensor:
    """The gradient of the weights: the products of the rows at `slots` (tokens, reads) and grad_out
    (tokens, dim). With `store` the table keeps the read for the optimizer, with `clone` as a copy:
    compiled code uses its buffers again."""
    values, parts = TABLES[int(number)], (slots, weights.detach(), grad_out)
    if store and rows.data_ptr() == values.weight.data_ptr():  # not so in functional_call
        values.reads.append([part.clone() for part in parts] if clone else parts)
        if len(values.reads) == WARN_AT:
            warnings.warn(f"{WARN_AT} backward passes without an update: a ValueTable keeps what "
                          "each of them read until a LazyAdam of it calls step() or zero_grad(); "
                          "if you accumulate as many, ignore this", stacklevel=2)

    grad_out = grad_out.to(rows.dtype)
    by_bag = getattr(torch.ops.aten, "_embedding_bag_per_sample_weights_backward", None)
    if not (by_bag and rows.is_cpu and len(slots)):
        parts = zip(slots.split(256), grad_out.split(256), strict=True)
        products = [(rows[slot] * grad[:, None]).sum(2) for slot, grad in parts]
        return torch.cat(products).to(weights.dtype)
    # A private operation, here with a row as a bag of tokens: every row leaves memory once. 4 times
    # faster than the public lines above (2,048 tokens, two cores of a Zen 4 EPYC).
    order, chunks = by_row(rows, slots)
    token = order // slots.shape[1]
    products = [by_bag(rows.index_select(0, chunk), grad_out, token[reads], starts, token[:0], 0)
                for reads, chunk, starts in chunks]
    return torch.empty_like(weights).put_(order, torch.cat(products).to(weights.dtype))


def backward(ctx, grad_out):
    """Stores the read only when this backward pass would accumulate into weight.grad: in
    loss.backward(), not in torch.autograd.grad(loss, x). Asks autograd's engine for that, as
    torch.utils.checkpoint does; a compiled graph cannot ask, and stores always."""
    compiling, (table, slots, weights, number) = torch.compiler.is_compiling(), ctx.saved_tensors
    store = ctx.needs_input_grad[0]
    if store and not compiling and hasattr(torch._C, "_will_engine_execute_node"):
        with torch.enable_grad():
            node = torch.autograd.graph.get_gradient_edge(table).node
        try:
            store = torch._C._will_engine_execute_node(node)
        except RuntimeError:  # torch.autograd.grad with the table among its inputs
            store = False
    grad = read_backward(grad_out, table, slots, weights, number, store, clone=compiling)
    return None, None, grad, None, None


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])


read.register_autograd(backward, setup_context=setup_context)
read.register_fake(lambda table, slots, weights, number, dtype: table.new_empty(
    slots.shape[0], table.shape[1], dtype=dtype))
read_backward.register_fake(lambda grad_out, rows, slots, weights, *_: torch.empty_like(weights))
torch.fx.node.has_side_effect(getattr(torch.ops, NAME).read_backward.default)  # never drop it


def by_row(table, slots):
    """Group reads by table row, a chunk of rows at a time.

    Returns the order that sorts the reads by row, and for each chunk: a slice of that order, the
    rows (rows,), and where the reads of each row start in the slice (rows,).
    """
    chunk = max(1, CHUNK // table.shape[1]) if table.is_cpu else 2**16
    slots, order = slots.flatten().sort(stable=True)
    rows, counts = slots.unique_consecutive(return_counts=True)
    starts = counts.cumsum(0) - counts
    bounds = [*starts[::chunk].tolist(), len(slots)]  # waits for the device, once
    return order, [(slice(first, last), row, start - first) for (first, last), row, start in
                   zip(itertools.pairwise(bounds), rows.long().split(chunk), starts.split(chunk),
                       strict=True)]


def tables_of(weight):
    """The ValueTables that have this tensor: one, or all that share it."""
    return [table for table in TABLES.values() if table.weight is weight]


class LazyAdam(torch.optim.Optimizer):
    """Adam for ValueTables that updates only the rows read since the last step, and their moments
    (torch.optim.SparseAdam's formula); no weight decay.

    tables: an iterable of ValueTables, or of parameter groups whose "params" are ValueTables.
    zero_grad() drops the reads that wait for a step; step() uses them up. state_dict() and
    load_state_dict() copy the moments.
    """

    def __init__(self, tables, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        groups = list(tables) or [{"params": []}]  # torch refuses an empty list
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    def add_param_group(self, param_group):
        for table in (tables := list(param_group["params"])):
            if not isinstance(table, ValueTable):
                raise TypeError(f"LazyAdam takes ValueTables, found {type(table).__name__}")
        super().add_param_group({**param_group, "params": [table.weight for table in tables]})

    @torch.no_grad()
    def step(self, closure=None, grad_scale=1.0):
        """One update. grad_scale: the factor by which a GradScaler multiplied the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                tables = tables_of(weight)
                if not tables:
                    raise RuntimeError("a ValueTable got another weight tensor after this LazyAdam "
                                       "was made (load_state_dict with assign=True?): make it anew")
                reads = [read for table in tables for read in table.reads]
                for table in tables:
                    table.reads.clear()
                if reads:
                    slots, weights, grad_out = map(torch.cat, zip(*reads, strict=True))
                    self._update(weight, group, slots, weights / grad_scale, grad_out)
        return loss

    def _update(self, table, group, slots, weights, grad_out):
        """Adam on the rows at `slots` (tokens, reads), a chunk at a time while it is in cache."""
        seen = grad_out.any(1)  # tokens that the loss does not see move no row
        if not seen.all():
            slots, weights, grad_out = slots[seen], weights[seen], grad_out[seen]
        if not len(slots):
            return
        state, (beta1, beta2) = self.state[table], group["betas"]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(table),
                      "exp_avg_sq": torch.zeros_like(table)}
        state["step"] += 1
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(table)  # the table's dtype and device may have changed
        whole = table, state["exp_avg"], state["exp_avg_sq"]
        eps = group["eps"] / math.sqrt(1 - beta2**state["step"])  # before the bias correction

        order, chunks = by_row(table, slots)
        tokens, grad_out = order // slots.shape[1], grad_out.to(table.dtype)
        weights = weights.to(table.dtype).flatten()[order]
        # rows are written back 16 bytes at a time: 1.14 times faster than 4, measured likewise
        aligned = table.is_contiguous() and not table.storage_offset() and (
            table.is_cpu and table[0].nbytes % 16 == 0)
        wide = torch.complex128 if aligned else table.dtype
        for reads, rows, starts in chunks:
            grad = F.embedding_bag(tokens[reads], grad_out, starts, mode="sum",
                                   per_sample_weights=weights[reads])  # (rows, dim)
            parts = [tensor.index_select(0, rows) for tensor in whole]
            before = torch.full((), state["step"] - 1.0, device=table.device)
            adam(parts[:1], [grad], parts[1:2], parts[2:], [], [before], fused=True,
                 amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=0.0,
                 eps=eps, maximize=False)
            for tensor, part in zip(whole, parts, strict=True):
                tensor.view(wide).index_copy_(0, rows, part.view(wide))

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for table in itertools.chain.from_iterable(map(tables_of, group["params"])):
                table.reads.clear()

    def state_dict(self):
        return copy.deepcopy(super().state_dict())

    def load_state_dict(self, state_dict):
        super().load_state_dict(copy.deepcopy(state_dict))
