"""
Train a model with memory by transformers' Trainer.

>>> sparse = LazyAdam(add_memory(model, layers=(4, 8)).values(), lr=1e-3)
>>> trainer = Trainer(model, arguments, callbacks=[StepValues(sparse)])
"""
from pathlib import Path

import torch
from transformers import TrainerCallback

from for_transformers.adapter import find_memories, read_memory, save_memory
from lib.files import atomic
from lib.settings import UserError

STATE = "lazy_adam.pt"  # in a checkpoint


class StepValues(TrainerCallback):
    """Updates a memory's values when Trainer updates the other weights.

    `sparse` is the LazyAdam of the memory's tables. Checkpoints get its state, too, and a training
    that is resumed in the same output_dir continues bit for bit. Trainer's checkpoints of a PEFT
    model have no memory: this adds it. Reads of a step that a GradScaler skips are dropped.
    """

    def __init__(self, sparse):
        self.sparse = sparse
        self.scale = 1.0

    def on_train_begin(self, args, state, control, model, **kwargs):
        if args.n_gpu > 1:
            raise UserError("a memory does not train in DataParallel: start one process for each "
                            "device (torchrun), or use one (CUDA_VISIBLE_DEVICES=0)")
        if not set(self.sparse.tables) <= set(model.modules()):
            raise UserError("StepValues(sparse): the model that Trainer trains has other tables: "
                            "make the LazyAdam of what add_memory returned for this model")
        self.sparse.zero_grad()  # reads of an earlier, interrupted training
        if state.global_step:
            folder = checkpoint(args, state)  # in the output_dir
            self.sparse.load_state_dict(torch.load(folder / STATE, weights_only=True))
            load_beside_adapter(model, folder)

    def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
        self.scale = scale_of(optimizer)

    def on_optimizer_step(self, args, state, control, optimizer, **kwargs):
        if scale_of(optimizer) >= self.scale:  # lower: it overflowed, and the step was skipped
            self.sparse.step(grad_scale=self.scale)
        self.sparse.zero_grad()

    def on_save(self, args, state, control, model, **kwargs):
        if not args.should_save:
            return
        folder = checkpoint(args, state)
        if hasattr(model, "peft_config"):
            save_memory(model, folder)
        with atomic(folder / STATE) as temporary:
            torch.save(self.sparse.state_dict(), temporary)

    def on_train_end(self, args, state, control, model, **kwargs):
        if args.load_best_model_at_end and state.best_model_checkpoint:
            load_beside_adapter(model, state.best_model_checkpoint)


def scale_of(optimizer):
    """Return the scale of the optimizer's GradScaler, which accelerate makes for fp16, or 1."""
    scaler = getattr(optimizer, "scaler", None)
    return scaler.get_scale() if scaler else 1.0


def checkpoint(args, state):
    return Path(args.output_dir, f"checkpoint-{state.global_step}")


def load_beside_adapter(model, folder):
    """Load the memory that a PEFT model's checkpoint has beside the adapter."""
    if hasattr(model, "peft_config"):
        _, tensors = read_memory(folder)
        find_memories(model).load_state_dict(tensors)
