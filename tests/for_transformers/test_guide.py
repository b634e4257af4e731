"""
Run the Python blocks of the guides for users of transformers, and check what they claim.
"""
import re
from pathlib import Path

import pytest
import torch

from lib.for_transformers import teach
from lib.for_transformers.export import main
from tests.for_transformers import small_lessons
from tests.helpers import ROOT, assert_same, train

transformers = pytest.importorskip("transformers")
for package in ("accelerate", "peft", "safetensors"):
    pytest.importorskip(package)

GUIDE, TEACH = ((ROOT / f"docs/{name}.md").read_text() for name in ("transformers", "teach"))
SIZES = {"vocab_size": 26, "hidden_size": 16, "num_hidden_layers": 18, "intermediate_size": 16,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


@pytest.fixture
def stand_ins(place, monkeypatch):
    """Make folders named as what the guide takes from the hub and from this project's demo."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert train("--out=out/demo_resm_init", "--max_steps=1", "--eval_interval=100") == 0
    main(["out/demo_resm_init", "exported"])
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported", trust_remote_code=True)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained("Qwen/Qwen3-0.6B")
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        **SIZES, eos_token_id=3, pad_token_id=0)).save_pretrained("Qwen/Qwen3-0.6B")


def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_its_blocks_run_and_do_what_they_claim(stand_ins, capsys):
    names, after = {}, {}
    blocks = python_blocks(GUIDE)
    for number, block in enumerate(blocks):
        exec(block, names)  # noqa: S102
        after[number] = {name: w.clone() for name, w in names["model"].state_dict().items()}
    trained, loaded, whole = after[1], after[2], after[3]
    moved = {name for name, w in trained.items() if not torch.equal(w, after[0][name])}
    assert moved and all(".memory." in name for name in moved)
    assert_same(trained, loaded)
    assert_same(trained, whole)
    assert re.search(r"layer 9: top-1 usage 0\.[0-9]%", capsys.readouterr().out)
    assert Path("both/adapter_model.safetensors").exists() and Path("both/memory.json").exists()
    assert names["slots"].keys() == {2, 3} and len(blocks) == 9


def test_they_are_short():
    assert len(GUIDE.split()) <= 900 and len(TEACH.split()) <= 500


def test_the_guide_to_teaching_runs(place):
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    small_lessons.save_base(name, "decoder", num_hidden_layers=10)
    small_lessons.write_texts(".")
    teach.main([name, "facts.txt", "--ordinary", "ordinary.txt", "--out", "my_facts", "--steps",
                "2", "--device", "cpu"])
    asking, by_hand = python_blocks(TEACH)
    names, plain = {}, small_lessons.base("decoder", num_hidden_layers=10)
    exec(asking.partition("unload_memory(model")[0], names)  # noqa: S102
    ids = torch.arange(6)[None]
    assert not torch.equal(names["model"](ids).logits, plain(ids).logits)
    names["unload_memory"](names["model"], "my_facts")
    assert torch.equal(names["model"](ids).logits, plain(ids).logits)
    exec(by_hand, names)  # noqa: S102
    for n, table in names["tables"].items():
        changed = table.weight.any(1).nonzero().flatten().tolist()
        assert changed and set(changed) <= set(names["rows"][n].tolist())
