"""
Train a model with memory by transformers' Trainer.

>>> values = LazyAdam(add_memory(model, layers=(4, 8)).values(), lr=1e-3)
>>> trainer = Trainer(model, arguments, callbacks=[StepValues(values)])
"""
import uuid
import warnings
from pathlib import Path

import torch
from transformers import TrainerCallback

from for_transformers.adapter import (
    find_memories,
    read_memory,
    save_memory,
    save_with_adapter,
)
from lib.errors import UserError
from lib.files import atomic, load_file

NAME = "values.pt"  # in a checkpoint's folder


class StepValues(TrainerCallback):
    """Updates a memory's values when Trainer updates the other weights.

    values: the LazyAdam of the memory's tables. A checkpoint also gets its state, and a resumed
    training continues bit for bit. With a PEFT model, whose checkpoints have adapters only, the
    checkpoint gets the memory too (see save_memory). Reads of a step that Trainer's GradScaler
    skips are dropped. folder: the checkpoint to resume from, where it is not in the output_dir.
    """

    def __init__(self, values, folder=None):
        self.values, self.folder = values, folder
        self.run = uuid.uuid4().hex  # tells whether a checkpoint's files belong together
        self.scale = 1.0

    def on_train_begin(self, args, state, control, model, **kwargs):
        weights = [w for group in self.values.param_groups for w in group["params"]]
        trained = {id(w) for w in model.parameters()}
        if not all(id(w) in trained for w in weights):
            raise UserError("StepValues(values): the model that Trainer trains has other tables: "
                            "make the LazyAdam of the tables that add_memory returned for it "
                            "(model_init and FSDP make new ones)")
        if not all(w.requires_grad for w in weights):
            warnings.warn("the memory's values are frozen, as PEFT freezes all weights, and will "
                          "not be trained: call train_memory(model) of for_transformers."
                          "adapter before Trainer, or leave StepValues out")
        find_memories(model)  # refuses what PEFT wraps
        save_with_adapter(model)
        self.values.zero_grad()  # reads of an earlier, interrupted training
        if args.save_total_limit == 1:
            warnings.warn("save_total_limit=1: Trainer removes the older checkpoint before the "
                          "values' state is saved, and a kill between loses both: use 2")
        if state.global_step:
            self.resume(args, state, model)
        state.stateful_callbacks["values"] = self.run  # Trainer saves it in trainer_state.json

    def resume(self, args, state, model):
        """Load what on_save wrote. UserError if it is not there, or of another training."""
        folder = self.folder or args.resume_from_checkpoint
        if not isinstance(folder, str | Path) or not Path(folder).is_dir():
            folder = checkpoint(args, state)
        file = Path(folder, NAME)
        advice = "StepValues(values, folder=...) takes the checkpoint to resume from"
        if not file.is_file():
            raise UserError(f"{file} is missing, which has the moments of the values: {advice}")
        saved = load_file(file, hint="resume from another checkpoint")
        if saved["run"] != state.stateful_callbacks.get("values"):
            raise UserError(f"{file} is not of the checkpoint that Trainer resumes from: {advice}")
        self.values.load_state_dict(saved["values"])
        load_beside_adapter(model, folder)

    def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
        self.scale = scale(optimizer)

    def on_optimizer_step(self, args, state, control, optimizer, **kwargs):
        # After an overflow the scale is lower. step_was_skipped is False where a fused Adam skips.
        if scale(optimizer) >= self.scale:
            self.values.step(grad_scale=self.scale)
        self.values.zero_grad()

    def on_save(self, args, state, control, model, **kwargs):
        folder = checkpoint(args, state)
        if args.should_save and hasattr(model, "peft_config"):
            save_memory(model, folder)
        if args.should_save and not args.save_only_model:
            with atomic(folder / NAME) as temporary:
                torch.save({"run": self.run, "values": self.values.state_dict()}, temporary)

    def on_train_end(self, args, state, control, model, **kwargs):
        if args.load_best_model_at_end and state.best_model_checkpoint:
            load_beside_adapter(model, state.best_model_checkpoint)


def scale(optimizer):
    """Return the scale of the optimizer's GradScaler, which accelerate makes for fp16, or 1."""
    scaler = getattr(optimizer, "scaler", None)
    return scaler.get_scale() if scaler else 1.0


def checkpoint(args, state):
    return Path(args.output_dir, f"checkpoint-{state.global_step}")


def load_beside_adapter(model, folder):
    """Load the memory that a PEFT model's checkpoint has beside the adapter."""
    if hasattr(model, "peft_config"):
        _, tensors = read_memory(model, folder)
        for n, memory in find_memories(model).items():
            memory.load_state_dict(tensors[n])
