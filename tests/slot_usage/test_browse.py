"""
The page to look into a memory: its data, and the page itself in a browser.
"""
import collections
import json
import re
import shutil
import types

import numpy as np
import pytest
import tokenizers

import measure
from lib.browse import find_words, page_data, page_html
from lib.run import Run
from lib.tokenizer import SPECIALS, wordpiece_tokenizer
from lib.usage import last_used
from tests.helpers import train

BREAKOUT = '</script><img/src=x/onerror="window.broken=1">'


@pytest.fixture(scope="module")
def browser():
    """A function that opens a page; it fails if the page has an error or asks for anything."""
    api = pytest.importorskip("playwright.sync_api", reason="no playwright")
    if not (chromium := shutil.which("chromium") or shutil.which("chromium-browser")):
        pytest.skip("no chromium")
    with api.sync_playwright() as playwright:
        program = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        wrong = []

        def show(path, width=1400, scheme="light"):
            page = program.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.on("pageerror", lambda error: wrong.append(error))  # no builtin method
            page.on("request", lambda request: request.url.startswith("file:")
                    or wrong.append(request.url))
            page.goto(path.resolve().as_uri())
            return page
        yield show
        program.close()
        assert not wrong


def tokenizer_of(words):
    """One token a word, whatever is in it."""
    ids = {word: n for n, word in enumerate([*SPECIALS, *words])}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[UNK]"))


def draw_reads(rng, tokens, n_slots):
    """A layer's reads at random: 2 heads, the best 3 slots."""
    slots = np.array([[rng.permutation(n_slots)[:3] for _ in "ab"] for _ in range(tokens)])
    weights = np.sort(rng.dirichlet(np.ones(3), (tokens, 2)))[..., ::-1].astype(np.float32)
    return slots, weights


def corpus_reads(ids, tokenizer, reads, n_slots):
    """Stand in for a CorpusReads, with `n_slots` slots in all layers."""
    return types.SimpleNamespace(ids=ids, tokenizer=tokenizer, layers=reads,
                                 n_keys=round(n_slots**0.5), n_slots=dict.fromkeys(reads, n_slots))


def test_the_data_are_those_of_a_count_one_by_one():
    rng, words = np.random.default_rng(0), list("abcdefgh")
    ids = rng.integers(5, 5 + len(words), (6, 20))
    reads = {2: draw_reads(rng, ids.size, 16), 4: draw_reads(rng, ids.size, 16)}
    snapshots = {step: {f"layer{n}_top1": rng.integers(0, 2, 16) for n in reads}
                 for step in (5, 10)}
    found = page_data(corpus_reads(ids, tokenizer_of(words), reads, 16), snapshots, 3)
    assert "".join(found["pieces"][n] for n in found["text"][:20]) == "".join(
        f" {words[i - 5]}" for i in ids[0])
    assert sorted(found["counts"], reverse=True) == list(found["counts"])
    for layer, (number, (slots, weights)) in zip(found["layers"], reads.items(), strict=True):
        contexts, shares = [{} for _ in range(16)], collections.defaultdict(float)
        read, top1 = [0] * 16, [0] * 16
        for token in range(ids.size):
            for head in range(2):
                top1[slots[token, head, 0]] += 1
                for slot, weight in zip(slots[token, head], weights[token, head], strict=True):
                    read[slot] += 1
                    contexts[slot][token] = contexts[slot].get(token, 0) + weight
                    shares[words[ids.flat[token] - 5], slot] += weight
        assert (layer["layer"], layer["n_keys"]) == (number, 4)
        assert (layer["read"], layer["top1"]) == (read, top1)
        for slot in range(16):
            best = sorted(contexts[slot].items(), key=lambda item: -item[1])[:3]
            assert layer["contexts"][slot][::2] == [token for token, _ in best]
            assert layer["contexts"][slot][1::2] == [round(100 * w.item()) for _, w in best]
            uses = [n for n, step in enumerate(snapshots, 1)
                    if snapshots[step][f"layer{number}_top1"][slot]]
            assert layer["last"][slot] == max(uses, default=0)
        for word, count, pairs in zip(found["words"], found["counts"], layer["words"], strict=True):
            assert count == (ids == 5 + words.index(word)).sum()
            best = sorted((-shares[word, slot], slot) for slot in range(16))[:8]
            assert pairs[::2] == [slot for _, slot in best]
            assert pairs[1::2] == [round(-100 * share.item() / (2 * count)) for share, _ in best]


def test_words_of_pieces_and_contexts_that_stand_twice():
    vocab = [*SPECIALS, "value", "##error", "raises", ":", "none"]
    tokenizer = wordpiece_tokenizer(vocab)
    ids = np.array([[2, *tokenizer.encode("raises valueerror : value : none").ids, 3]] * 2)
    reads = {1: draw_reads(np.random.default_rng(0), 18, 4)}
    found = page_data(corpus_reads(ids, tokenizer, reads, 4), {}, 99)
    assert dict(zip(found["words"], found["counts"], strict=True)) == {
        ":": 4, "[CLS]": 2, "raises": 2, "valueerror": 2, "value": 2, "none": 2, "[SEP]": 2}
    assert {token for pairs in found["layers"][0]["contexts"] for token in pairs[::2]} == set(
        range(9))
    assert found["layers"][0]["last"] == []
    _, counts, word = find_words(["value", "error", "value", "error"], 2)
    assert word.tolist() == [0] * 4 and counts.tolist() == [2]  # no word over a sequence's end


def test_clicks_keys_and_search(place, browser, capsys):
    assert train("--max_steps=4", "--usage_interval=2") == 0
    measure.main(["browse", "out/tiny", "--out", "memory.html", "--device", "cpu"])
    assert "wrote memory.html, 0.0 MB" in capsys.readouterr().out
    measure.main(["slots", "out/tiny", "--layer", "3", "--most", "64", "--contexts", "8",
                  "--device", "cpu", "--out", "slots"])
    slots = {slot["slot"]: slot for slot in json.loads((place / "slots.json").read_text())}
    page = browser(place / "memory.html")
    page.get_by_role("button", name="layer 3").click()

    def facts():
        return page.inner_text("#facts")

    def press(*keys):
        for key in keys:
            page.keyboard.press(key)

    box = page.locator("#grid").bounding_box()
    for slot in (0, 29, 63):  # a click on the middle of its cell
        page.mouse.click(box["x"] + box["width"] * (slot % 8 + 0.5) / 8,
                         box["y"] + box["height"] * (slot // 8 + 0.5) / 8)
        assert f"Slot {slot} of layer 3" in facts() and f"#3/{slot}" in page.url
        times = [f"{n:,} times" if n > 1 else ("never", "once")[n]
                 for n in (slots[slot]["reads"], slots[slot]["top1"])]
        assert f"Read {times[0]}, {times[1]} as top-1, in this text." in facts() or (
            "Never read, in this text." in facts() and slots[slot]["reads"] == 0)
        rows = [re.match(r"([\d.]+)", row)[1] for row in
                page.locator("#contexts li").all_inner_texts() if "none" not in row]
        expected = sorted((weight for weight, _ in slots[slot]["contexts"]), reverse=True)
        assert [float(row) for row in rows] == pytest.approx(expected, abs=0.011)
    press("ArrowUp", "ArrowLeft")
    assert "Slot 54" in facts()
    press("Shift+ArrowLeft", "Shift+ArrowUp", "ArrowLeft")
    assert "Slot 0 " in facts()

    press("/")
    page.keyboard.type("dog")
    layer = json.loads(page.inner_text("#data"))["layers"][1]
    word = json.loads(page.inner_text("#data"))["words"].index("dog")
    found = page.locator("#hits button").all_inner_texts()
    assert [int(text.split()[0]) for text in found] == layer["words"][word][::2]
    press("Enter")
    assert f"Slot {found[0].split()[0]} of layer 3" in facts()
    press("Enter", "Enter")  # to the contexts, and from a context's word to its slots
    assert page.input_value("#search") == page.locator("#contexts button").first.inner_text()
    page.fill("#search", "no such word")
    assert "not in the text" in page.inner_text("#answer") and not page.locator("#hits li").count()

    last = last_used(Run("out/tiny").usage_snapshots(), 3)
    page.select_option("#view", "last use")
    chips = page.locator("#legend button").all_inner_texts()
    assert [int(chip.split(": ")[1]) for chip in chips] == [int((last == n).sum())
                                                            for n in range(3)]
    used = {0: "was top-1 in none of 2 snapshots.", 1: "was last top-1 in the snapshot of step 2.",
            2: "was last top-1 in the snapshot of step 4."}
    for n in range(3):  # the next slot of this kind
        if (last == n).any():
            page.locator("#legend button").nth(n).click()
            assert last[int(re.search(r"Slot (\d+)", facts())[1])] == n
            assert f"In training, on the validation text, it {used[n]}" in facts()
    page.select_option("#view", "reads")
    assert f"never: {sum(slot['reads'] == 0 for slot in slots.values())}" in page.inner_text(
        "#legend")


def test_light_and_dark_and_a_phone(place, browser):
    assert train("--max_steps=2", "--usage_interval=0") == 0
    measure.main(["browse", "out/tiny", "--out", "memory", "--device", "cpu"])

    def brightness(page):
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    for width in (400, 1400):
        for scheme, is_dark in (("light", False), ("dark", True)):
            page = browser(place / "memory.html", width, scheme)
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert (brightness(page) < 200) == is_dark
            page.click("#theme")
            assert (brightness(page) > 600) == is_dark
    assert page.locator("#view option").all_inner_texts() == ["reads", "top-1 reads"]
    assert "In training" not in page.inner_text("#facts")  # it has no snapshots


def test_a_phone_shows_one_column(place, browser):
    assert train("--max_steps=2", "--usage_interval=0") == 0
    measure.main(["browse", "out/tiny", "--out", "memory", "--device", "cpu"])

    def box(page, name):
        return page.locator(name).first.bounding_box()

    phone, desk = (browser(place / "memory.html", width) for width in (400, 1200))
    for name in ("#facts", "#contexts", "#around", "#grid"):
        assert box(phone, name)["width"] == pytest.approx(400 - 2 * 16, abs=2)
    facts, contexts, around = (box(phone, name) for name in ("#facts", "#contexts", "#around"))
    assert facts["y"] + facts["height"] <= contexts["y"]
    assert contexts["y"] + contexts["height"] <= around["y"]
    assert box(desk, "#facts")["y"] == box(desk, "#around")["y"]
    assert box(desk, "#facts")["x"] < box(desk, "#around")["x"]
    widest = phone.evaluate("""Math.max(...[...document.querySelectorAll("#contexts li *")].map(
        part => part.getBoundingClientRect().right))""")  # a phone cuts no context
    assert widest <= 400 - 16 + 1


def test_no_text_breaks_out_of_the_page(tmp_path, browser):
    words = [BREAKOUT, "<!--<script>", "&lt;b&gt;", "\u2028", "DATA"]
    reads = {1: draw_reads(np.random.default_rng(0), 30, 4)}
    ids = np.random.default_rng(0).integers(5, 5 + len(words), (3, 10))
    found = page_data(corpus_reads(ids, tokenizer_of(words), reads, 4), {}, 8)
    text = page_html({"title": BREAKOUT, "note": BREAKOUT, **found})
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    shown = browser(tmp_path / "page.html")
    shown.fill("#search", "script")
    assert shown.inner_text("#title") == BREAKOUT == shown.title()
    assert BREAKOUT in shown.inner_text("#contexts") and BREAKOUT in shown.inner_text("#matches")
    assert not shown.locator("img").count() and shown.evaluate("window.broken") is None
