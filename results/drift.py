"""
pretrain.py with a part of the memory changed that is no setting: what makes slots fall out of use?
For results/study.md.

$ PYTHONPATH=. python results/drift.py keys_lr=0.1 configs/study_resm_init.py --out=out/drift_keys_lr
$ PYTHONPATH=. python results/drift.py query_norm=off configs/study_resm_init.py --out=out/drift_norm
"""
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import lib.training.trainer as training
import pkm
import pretrain
from lib.common.errors import UserError, run_main


def scale_keys_lr(factor):
    """The sub-keys learn at `factor` times the learning rate."""
    groups = training.optimizer_groups

    def with_keys(model, weight_decay):
        decayed, others = groups(model, weight_decay)  # the sub-keys are among the others
        keys = [p for name, p in model.named_parameters() if name.endswith(".memory.keys")]
        chosen = {id(p) for p in keys}
        others["params"] = [p for p in others["params"] if id(p) not in chosen]
        return [decayed, others, {**others, "params": keys, "scale": factor}]

    def rescale(optimizer, args, kwargs):  # the Trainer sets lr anew before every step
        for group in optimizer.param_groups:
            group["lr"] *= group.get("scale", 1.0)

    training.optimizer_groups = with_keys
    register_optimizer_step_pre_hook(rescale)


def drop_query_norm():
    """Queries are looked up as they are, without batch norm."""
    init = pkm.PKM.__init__

    def without(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.query_norm = torch.nn.Identity()

    pkm.PKM.__init__ = without


def main(change="", *argv):
    wrong = UserError(f"{change!r}: expected keys_lr=FACTOR or query_norm=off")
    if change.startswith("keys_lr="):
        try:
            scale_keys_lr(float(change.removeprefix("keys_lr=")))
        except ValueError:
            raise wrong from None
    elif change == "query_norm=off":
        drop_query_norm()
    else:
        raise wrong
    return pretrain.main(list(argv))


if __name__ == "__main__":
    run_main(lambda: main(*sys.argv[1:]))
