"""
Write the HTML page of measure.py browse, which shows what a slot knows.

page_data() gathers the data. page_html() puts them into browse.html as JSON. Two layers of
64 x 64 slots read by 32,768 tokens make 1.1 MB. Larger ones want fewer --contexts.
"""
import json
from collections import Counter
from pathlib import Path

import numpy as np

from lib.tokenizer import special_ids
from lib.usage import WIDTH, last_used, times_read

SLOTS = 8  # shown for a word


def page_data(corpus, snapshots, contexts):
    """Gather what the page shows, as plain Python. corpus: a CorpusReads. snapshots: those of Run,
    or {}. contexts: at most this number for a slot."""
    ids, layers = corpus.ids, []
    used, text = np.unique(ids.ravel(), return_inverse=True)
    pieces = token_texts(corpus.tokenizer, used.tolist())
    words, counts, word = find_words([pieces[i] for i in text], ids.shape[1])
    around = np.pad(ids, ((0, 0), (WIDTH, WIDTH)), constant_values=-1)
    around = np.lib.stride_tricks.sliding_window_view(around, 2 * WIDTH + 1, axis=1)
    _, new = np.unique(around.reshape(ids.size, -1), axis=0, return_index=True)
    for layer, (slots, weights) in corpus.layers.items():
        size, (tokens, heads, _) = corpus.n_slots[layer], slots.shape
        read, top1 = times_read(slots, size)
        slots, weights = slots.reshape(tokens, -1), weights.reshape(tokens, -1)
        share = weights / (heads * counts[word])[:, None]  # of all that a word reads
        layers.append({
            "layer": layer, "n_keys": corpus.n_keys,
            "read": read.tolist(), "top1": top1.tolist(),
            "last": last_used(snapshots, layer).tolist() if snapshots else [],
            "contexts": strongest(slots[new], new[:, None], weights[new], size, contexts),
            "words": strongest(word[:, None], slots, share, len(words), SLOTS)})
    return {"seq_len": ids.shape[1], "text": text.tolist(), "pieces": pieces, "words": words,
            "counts": counts.tolist(), "steps": list(snapshots), "layers": layers}


def token_texts(tokenizer, ids):
    """Spell each token, with the space before it."""
    mask = special_ids(tokenizer).mask  # in front, as a decoder drops the first token's space
    first, *both = tokenizer.decode_batch([[mask], *([mask, i] for i in ids)],
                                          skip_special_tokens=False)
    return [text.removeprefix(first) for text in both]


def find_words(texts, seq_len):
    """Join the tokens of sequences to words: (words, most frequent first; their counts; the number
    of each token's word). A word goes on where letters or digits follow without a space."""
    spelled, number = [""], []
    for n, text in enumerate(texts):
        if n % seq_len == 0 or not (spelled[-1][-1:].isalnum() and text[:1].isalnum()):
            spelled.append("")
        spelled[-1] += text
        number.append(len(spelled) - 1)
    spelled = [word.strip() for word in spelled]
    words, counts = zip(*Counter(spelled[1:]).most_common(), strict=True)
    index = {word: n for n, word in enumerate(words)}
    return words, np.array(counts), np.array([index[spelled[n]] for n in number])


def strongest(groups, items, weights, n_groups, most):
    """Find the items with the highest sums of weights in each group: at most `most`. groups, items
    and weights broadcast to one entry a read. Returns [item, weight in percent, item, ...] lists.
    """
    n_items = int(items.max()) + 1
    pairs, pair = np.unique(groups.astype(np.int64) * n_items + items, return_inverse=True)
    sums = np.bincount(pair.ravel(), weights.ravel())
    group, item = np.divmod(pairs, n_items)
    order = np.lexsort((-sums, group))
    group, item, sums = group[order], item[order], sums[order]
    kept = np.arange(len(group)) - np.searchsorted(group, group) < most  # by the place in its group
    both = np.column_stack([item, np.rint(100 * sums)]).astype(int)[kept]
    ends = np.searchsorted(group[kept], np.arange(1, n_groups))
    return [pairs.ravel().tolist() for pairs in np.split(both, ends)]


def page_html(data):
    """Make the page from its data. No text of a corpus can end the element that holds them: `<` is
    escaped, and the page sets text only, never HTML."""
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return template.replace("DATA", text.replace("<", "\\u003c"), 1)
