"""
Memories trained by transformers' Trainer, in one process and in two, and as the guide does.
"""
import copy
import os
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from for_transformers.adapter import find_memories, load_memory, train_memory
from for_transformers.add_memory import add_memory
from for_transformers.tests.small_models import MEMORY, small_model, transformers
from for_transformers.tests.test_adapter import base, lora
from lib.settings import ROOT, UserError
from pkm import LazyAdam
from tests.helpers import assert_near, assert_same
from tests.on_ranks import finish, start

pytest.importorskip("accelerate")

from for_transformers.trainer import StepValues

EPS = 1e-3  # not so small that Adam makes updates of gradients that are rounding


def examples(count=24):
    """Draw padded sentences with labels at their real tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 40, (count, 20), generator=generator)
    real = torch.arange(20) < torch.randint(5, 21, (count, 1), generator=generator)
    rows = {"input_ids": ids * real, "attention_mask": real.long(), "labels": ids.where(real, -100)}
    return [{name: row[n] for name, row in rows.items()} for n in range(count)]


def model_with_memory(seed=1, dropout=0.1, adapter=False):
    """Make a model with two memories. Returns it and the optimizer of their values."""
    model = base(hidden_dropout_prob=dropout)
    torch.manual_seed(seed)
    tables = add_memory(model, (1, 3), **MEMORY)
    if adapter:
        model = lora(model)
        train_memory(model)
    return model, LazyAdam(tables.values(), lr=1e-2, eps=EPS)


def trainer(folder, model, sparse, rows=None, kind=transformers.Trainer, **more):
    arguments = transformers.TrainingArguments(**{
        "output_dir": str(folder), "max_steps": 6, "save_steps": 3, "learning_rate": 1e-3,
        "adam_epsilon": EPS, "per_device_train_batch_size": 4, "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "logging_steps": 100, **more})
    return kind(model, arguments, train_dataset=rows or examples(), eval_dataset=examples(4),
                callbacks=[StepValues(sparse)])


def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    """The guide trains, measures, saves and loads a memory, here of a small model."""
    pytest.importorskip("peft")
    text = "The cat sat on the mat. A memory updates what it has read."
    vocab = {word: n for n, word in enumerate(text.split())}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="A"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="A")
    monkeypatch.chdir(tmp_path)
    tokenizer.save_pretrained("Qwen")
    small_model("Qwen3ForCausalLM", num_hidden_layers=18).save_pretrained("Qwen")
    guide = (ROOT / "for_transformers/README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    code = "".join(block for block in blocks if not re.search("parts=|exported", block))
    Path("guide.py").write_text(code.replace("Qwen/Qwen3-0.6B", "Qwen"))
    names = runpy.run_path("guide.py")
    assert names["reads"][9].counts["top1"].sum() == 4 * 8 * len(vocab)  # heads, texts, words
    assert "The cat sat on the mat. A memory updates\n" in capsys.readouterr().out  # a context
    assert type(names["sparse"]).__name__ == "AcceleratedOptimizer"


@pytest.mark.parametrize("adapter", [False, True])
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path, adapter):
    """Bit for bit, with dropout and accumulation; a checkpoint of PEFT's adapter has the memory."""
    def train(folder, seed=1, resume=None):
        model, sparse = model_with_memory(seed, adapter=adapter)
        work = trainer(folder, model, sparse, gradient_accumulation_steps=2)
        work.train(resume_from_checkpoint=resume)
        return dict(model.state_dict()), sparse.state_dict()["state"]

    weights, moments = train(tmp_path / "a")
    before = model_with_memory(adapter=adapter)[0].state_dict()
    assert all(not torch.equal(weights[n], before[n]) for n in weights if "values.weight" in n)
    shutil.copytree(tmp_path / "a/checkpoint-3", tmp_path / "b/checkpoint-3")
    resumed = train(tmp_path / "b", seed=2, resume=True)
    assert_same(weights, resumed[0])
    assert_same(moments, resumed[1])
    assert moments[0]["step"] == 6


def test_the_best_checkpoint_of_an_adapter_comes_back_with_its_memory(tmp_path):
    model, sparse = model_with_memory(adapter=True)
    work = trainer(tmp_path, model, sparse, eval_strategy="steps", eval_steps=2, save_steps=2,
                   load_best_model_at_end=True, metric_for_best_model="loss",
                   greater_is_better=True)
    work.train()  # the "best" has the highest loss: it is the first
    best = Path(work.state.best_model_checkpoint)
    assert best.name == "checkpoint-2"
    load_memory(again := base(), best)
    assert_same(dict(find_memories(again).state_dict()), dict(find_memories(model).state_dict()))


def test_a_training_without_step_values_says_so(tmp_path):
    model, sparse = model_with_memory()
    model = copy.deepcopy(model)  # without a LazyAdam
    work = trainer(tmp_path, model, sparse, save_strategy="no")
    work.remove_callback(StepValues)
    with pytest.warns(UserWarning, match="values do not learn: make a LazyAdam"):
        work.train()
    assert not any(memory.values.pending for memory in find_memories(model).values())


def test_wrong_tables_and_checkpoints_are_refused(tmp_path):
    model, sparse = model_with_memory()
    with pytest.raises(UserError, match="has other tables"):
        trainer(tmp_path, model, model_with_memory()[1]).train()
    trainer(tmp_path / "a", model, sparse, max_steps=3).train()
    with pytest.raises(FileNotFoundError, match="b/checkpoint-3/lazy_adam.pt"):
        trainer(tmp_path / "b", model, sparse).train(
            resume_from_checkpoint=str(tmp_path / "a/checkpoint-3"))


class Overflows(transformers.Trainer):
    """Make one gradient of the second step infinite, and none of a read."""

    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        if self.state.global_step == 1:
            model.cls.predictions.bias.grad.fill_(float("inf"))
        return loss


def test_a_step_that_the_scaler_skips_moves_no_row(tmp_path):
    """The scale is a power of 2: dividing by it leaves no trace."""
    rows, ends = examples(16), []
    for overflow in (True, False):
        model, sparse = model_with_memory(dropout=0.0)
        kept = rows if overflow else rows[:4] + rows[8:]
        work = trainer(tmp_path, model, sparse, kept,
                       Overflows if overflow else transformers.Trainer, max_steps=len(kept) // 4,
                       train_sampling_strategy="sequential", save_strategy="no",
                       lr_scheduler_type="constant", max_grad_norm=0)
        if overflow:
            work.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        work.train()
        assert sparse.state_dict()["state"][0]["step"] == 3
        ends.append(dict(model.named_parameters()))
    for name, w in ends[1].items():
        assert_near(ends[0][name], w, 1e-5)


def train_on_ranks(folder):
    """Train the same batches of 8 in one process or in two, in float64.

    The batch norms have the statistics of evaluation: those of a batch would be each rank's own.
    """
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0")
    model, _ = model_with_memory(dropout=0.0)
    model = model.double()
    for memory in find_memories(model).values():
        memory.query_norm.train = lambda mode: None
    sparse = LazyAdam([m.values for m in find_memories(model).values()], lr=1e-2, eps=EPS)
    ids = torch.randint(1, 40, (32, 9), generator=torch.Generator().manual_seed(1))
    trainer(folder / "trainer", model, sparse, [{"input_ids": x, "labels": x} for x in ids],
            max_steps=4, per_device_train_batch_size=8 // ranks, save_strategy="no",
            train_sampling_strategy="sequential", lr_scheduler_type="constant",
            average_tokens_across_devices=False).train()  # else the loss is doubled
    torch.save(dict(model.named_parameters()), folder / f"{ranks}_{rank}.pt")


def test_two_ranks_train_the_model_of_one(tmp_path):
    ranks = start(2, train_on_ranks, tmp_path)
    train_on_ranks(tmp_path)
    finish(ranks)
    alone, *others = [torch.load(tmp_path / f"{name}.pt") for name in ("1_0", "2_0", "2_1")]
    before = model_with_memory()[0].state_dict()
    name = "bert.encoder.layer.0.memory.values.weight"
    assert not torch.equal(alone[name], before[name].double())
    for other in others:
        for name, w in alone.items():
            assert_near(other[name], w, 1e-9)
