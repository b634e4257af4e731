"""
Test StepValues in Trainer: resumed, scaled, distributed, compiled, frozen, with PEFT.
"""
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

from for_transformers.adapter import find_memories, load_memory, save_memory, train_memory
from for_transformers.add_memory import add_memory
from lib.errors import UserError
from tests.for_transformers.small_models import MEMORY
from tests.for_transformers.test_adapter import base
from tests.helpers import ROOT, assert_near, assert_same
from values import LazyAdam

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("safetensors")

from for_transformers.trainer import StepValues


def examples(count=24):
    """Draw padded sentences with labels at some of their tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        length = int(torch.randint(5, 21, (), generator=generator))
        ids = torch.randint(1, 40, (20,), generator=generator)
        mask = (torch.arange(20) < length).long()
        rows.append({"input_ids": ids * mask, "attention_mask": mask,
                     "labels": torch.where(mask.bool(), ids, -100)})
    return rows


def model_with_memory(seed=1, **more):
    """Make a model with two memories. Returns it and the optimizer of their values."""
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = base(**{**dropout, **more})
    torch.manual_seed(seed)
    return model, LazyAdam(add_memory(model, (1, 3), **MEMORY).values(), lr=1e-2)


def trainer(folder, model, callback, rows=None, eval_dataset=None, **more):
    arguments = transformers.TrainingArguments(**{
        "output_dir": str(folder), "max_steps": 6, "save_steps": 3, "learning_rate": 1e-3,
        "per_device_train_batch_size": 4, "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, "logging_steps": 100, **more})
    return transformers.Trainer(model, arguments, train_dataset=rows or examples(),
                                eval_dataset=eval_dataset, callbacks=[callback])


def trained(folder, seed=1, resume=None, moved=None, **more):
    """Train, and return the model's tensors and the state of the values' optimizer."""
    model, values = model_with_memory(seed)
    trainer(folder, model, StepValues(values, moved), **more).train(resume_from_checkpoint=resume)
    return dict(model.state_dict()), values.state_dict()["state"]


def test_a_resumed_training_is_the_uninterrupted_one(tmp_path):
    """Bit for bit, with dropout, accumulation, a rotation of checkpoints, wherever they lie."""
    more = {"gradient_accumulation_steps": 2, "save_total_limit": 1}
    weights, moments = trained(tmp_path / "a", save_steps=2, **more)
    assert [p.name for p in (tmp_path / "a").glob("*/values.pt")] == ["values.pt"]
    assert not torch.equal(weights["bert.encoder.layer.0.memory.values.weight"],
                           model_with_memory()[1].param_groups[0]["params"][0])
    trained(tmp_path / "b", save_steps=4, gradient_accumulation_steps=2)
    (tmp_path / "b/checkpoint-4").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "b")
    shutil.copytree(tmp_path / "moved", tmp_path / "b/checkpoint-4")  # interrupted in step 5
    for folder, checkpoint in (("b", None), ("c", tmp_path / "moved")):
        resumed = trained(tmp_path / folder, seed=2, resume=checkpoint or True,
                          moved=checkpoint, save_steps=100, **more)
        assert_same(weights, resumed[0])
        assert_same(moments, resumed[1])
    assert moments[0]["step"] == 6


def test_moments_of_another_run_are_refused(tmp_path):
    for folder in ("a", "b"):
        trained(tmp_path / folder, max_steps=3)
    with pytest.raises(UserError, match=r"a/checkpoint-3/values.pt is not of the checkpoint"):
        trained(tmp_path / "a", resume=str(tmp_path / "b/checkpoint-3"))
    (tmp_path / "a/checkpoint-3/values.pt").unlink()
    with pytest.raises(UserError, match=r"values.pt is missing.*StepValues\(values, folder"):
        trained(tmp_path / "a", resume=True)


def test_tables_of_another_model_are_refused(tmp_path):
    model, _ = model_with_memory()
    with pytest.raises(UserError, match="has other tables"):
        trainer(tmp_path, model, StepValues(model_with_memory()[1])).train()


class Overflows(transformers.Trainer):
    """Its second batch has an infinite loss, and a GradScaler scales the losses."""

    def compute_loss(self, model, inputs, **kwargs):
        loss = super().compute_loss(model, inputs, **kwargs)
        return loss * float("inf") if self.state.global_step == 1 and self.overflow else loss


def test_a_step_that_the_scaler_skips_moves_no_row(tmp_path):
    """The scale is a power of 2: dividing by it leaves no trace."""
    rows, ends = examples(16), []
    for overflow in (True, False):
        model, values = model_with_memory(hidden_dropout_prob=0.0,
                                          attention_probs_dropout_prob=0.0)
        kept = rows if overflow else rows[:4] + rows[8:]
        run = trainer(tmp_path, model, StepValues(values), kept, max_steps=len(kept) // 4,
                      train_sampling_strategy="sequential", save_strategy="no",
                      lr_scheduler_type="constant", max_grad_norm=0)
        run.__class__, run.overflow = Overflows, overflow
        if overflow:
            run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        run.train()
        assert values.state_dict()["state"][0]["step"] == 3
        ends.append({name: w for name, w in model.state_dict().items() if "norm.r" not in name
                     and "batches" not in name})  # the batch norm saw the batch that is skipped
    assert run.accelerator.scaler is None
    for name, w in ends[1].items():
        assert_near(ends[0][name], w, 1e-6)


def test_frozen_tables_are_named_once(tmp_path):
    model, values = model_with_memory()
    model.requires_grad_(False)
    model.cls.requires_grad_(True)
    before = model.state_dict()["bert.encoder.layer.0.memory.values.weight"].clone()
    with pytest.warns(UserWarning, match=r"frozen.*train_memory\(model\)") as said:
        trainer(tmp_path, model, StepValues(values), save_strategy="no").train()
    assert len([w for w in said if "train_memory" in str(w.message)]) == 1
    assert torch.equal(before, model.state_dict()["bert.encoder.layer.0.memory.values.weight"])


def test_a_memory_alone_trains_in_a_frozen_model(tmp_path):
    model, values = model_with_memory()
    model.requires_grad_(False)
    train_memory(model)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="'pin_memory'")
        trainer(tmp_path, model, StepValues(values), save_strategy="no").train()
        save_memory(model, tmp_path / "memory")
    after = model.state_dict()
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name in after if ".memory." in name}
    again = base()
    load_memory(again, tmp_path / "memory")
    assert_same(dict(after), dict(again.state_dict()))


def test_reads_from_before_training_move_no_row(tmp_path):
    """As after Ctrl-C between backward and step, in a notebook."""
    def moments(before):
        model, values = model_with_memory(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        if before:
            (1000 * model(examples(1)[0]["input_ids"][None])[0]).sum().backward()
            model.zero_grad()
        trainer(tmp_path, model.eval(), StepValues(values), max_steps=1, save_strategy="no").train()
        return dict(model.state_dict())

    ours, expected = moments(before=True), moments(before=False)
    for name in ours:
        if name.endswith("values.weight"):
            assert torch.equal(ours[name].ne(0), expected[name].ne(0))
            assert_near(ours[name], expected[name], 1e-6)


def test_one_checkpoint_alone_is_warned_of(tmp_path):
    model, values = model_with_memory()
    with pytest.warns(UserWarning, match="save_total_limit=1.*use 2"):
        trainer(tmp_path, model, StepValues(values), max_steps=1, save_total_limit=1).train()


def test_the_best_checkpoint_comes_back_with_its_tables(tmp_path):
    model, values = model_with_memory()
    run = trainer(tmp_path, model, StepValues(values), eval_dataset=examples(4),
                  eval_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True,
                  metric_for_best_model="loss", greater_is_better=True)
    run.train()  # the "best" has the highest loss: it is the first
    best = run.state.best_model_checkpoint
    assert best.endswith("checkpoint-2")
    again = transformers.AutoModelForMaskedLM.from_pretrained(best, trust_remote_code=True)
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


def test_a_compiled_model_trains_its_memory(tmp_path):
    ends = []
    for compiled in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        torch._dynamo.reset()
        model, values = model_with_memory(hidden_dropout_prob=0.0,
                                          attention_probs_dropout_prob=0.0)
        trainer(tmp_path, model, StepValues(values), save_strategy="no", max_steps=3,
                **compiled).train()
        ends.append(find_memories(model)[3].values.weight)
    assert not torch.equal(ends[0], find_memories(model_with_memory()[0])[3].values.weight)
    assert_near(*ends, 1e-4)


# PEFT

def lora(model, **more):
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(**{
        "r": 2, "lora_dropout": 0.0, "target_modules": ["query", "value"],
        "exclude_modules": ["memory.query"], **more}))


@pytest.mark.parametrize("first", ["memory", "adapter"])
def test_an_adapter_and_a_memory_are_trained_saved_and_loaded(tmp_path, first):
    peft = pytest.importorskip("peft")
    if first == "memory":
        model, values = model_with_memory()
        model = lora(model)
        train_memory(model)
    else:
        model = lora(base())
        tables = add_memory(model.get_base_model(), (1, 3), **MEMORY)
        values = LazyAdam(tables.values(), lr=1e-2)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    trainer(tmp_path, model, StepValues(values), save_strategy="no").train()
    moved = {name for name, w in model.state_dict().items() if not torch.equal(w, before[name])}
    assert {name for name in before if ".memory." in name or "lora_B" in name} <= moved
    assert all(".memory." in name or "lora_" in name for name in moved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path / "both")  # the memory too
    for adapter_first in (False, True):
        again = base()
        if adapter_first:
            again = peft.PeftModel.from_pretrained(again, tmp_path / "both")
            load_memory(again.get_base_model(), tmp_path / "both")
        else:
            load_memory(again, tmp_path / "both")
            again = peft.PeftModel.from_pretrained(again, tmp_path / "both")
        assert_same(dict(model.state_dict()), dict(again.state_dict()))
        ids = examples(1)[0]["input_ids"][None]
        with torch.no_grad():
            assert torch.equal(model.eval()(ids)[0], again.eval()(ids)[0])


def test_a_deleted_adapter_leaves_a_model_that_is_saved_with_its_memory(tmp_path):
    peft = pytest.importorskip("peft")
    model, _ = model_with_memory()
    model.add_adapter(peft.LoraConfig(target_modules=["value"], exclude_modules=["memory.query"]))
    train_memory(model)
    model.delete_adapter("default")
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert_same(find_memories(again)[1].state_dict(), find_memories(model)[1].state_dict())


@pytest.mark.parametrize("config, tensor", [
    ({"exclude_modules": None}, "query.base_layer"),
    ({"target_modules": "all-linear", "exclude_modules": None}, "query.base_layer"),
    ({"modules_to_save": ["memory"]}, "original_module.keys")])
def test_an_adapter_in_the_memory_is_refused(tmp_path, config, tensor):
    model, values = model_with_memory()
    model = lora(model, **config)
    for work in (lambda: train_memory(model), lambda: save_memory(model, tmp_path),
                 trainer(tmp_path, model, StepValues(values)).train):
        with pytest.raises(UserError, match=rf"memory has a tensor {tensor}.*exclude_modules"):
            work()


def test_an_adapters_checkpoints_have_the_memory(tmp_path):
    """Resumed bit for bit, and the best one comes back as a whole."""
    def run(folder, resume=None, seed=1, **more):
        model, values = model_with_memory(seed)
        model = lora(model)
        train_memory(model)
        work = trainer(folder, model, StepValues(values), eval_dataset=examples(4), **more)
        work.train(resume_from_checkpoint=resume)
        return dict(model.state_dict()), work.state.best_model_checkpoint

    weights, _ = run(tmp_path / "a")
    shutil.rmtree(tmp_path / "a/checkpoint-6")
    assert_same(weights, run(tmp_path / "a", True, seed=3)[0])
    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True,
            "metric_for_best_model": "loss", "greater_is_better": True}
    at_best, folder = run(tmp_path / "b", **best)  # the worst, which is the first
    assert folder.endswith("checkpoint-3")
    again = base()
    load_memory(again, folder)
    name = "bert.encoder.layer.0.memory.values.weight"
    assert torch.equal(again.state_dict()[name], at_best[f"base_model.model.{name}"])
    assert not torch.equal(again.state_dict()[name], weights[f"base_model.model.{name}"])


def test_two_ranks_train_the_model_of_one(tmp_path):
    """By Trainer and by accelerate, in float64."""
    two_ranks = pytest.importorskip("tests.for_transformers.two_ranks")
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         "-m", two_ranks.__name__, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    two_ranks.main(tmp_path)
    for recipe in ("by_trainer", "by_accelerate"):
        first, second, alone = (torch.load(tmp_path / f"{recipe}_{name}.pt")
                                for name in ("2_0", "2_1", "1_0"))
        assert_same(dict(first), dict(second))
        for name, w in alone.items():
            assert_near(first[name], w, 1e-9)
    values = torch.load(tmp_path / "trainer/checkpoint-4/values.pt")["values"]["state"]
    assert [table["step"] for table in values.values()] == [4, 4]
