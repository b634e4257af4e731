"""
Load the paper's numbers from paper.json, and name its systems and columns.

A table is {system: {column: number}}. A memory's number is a list with one number for each layer.
SQuAD and MNLI have two scores. nan stands for a number that is not legible in our copy.
"""
import re
from pathlib import Path

from lib.files import null_to_nan, read_json

PAPER = read_json(Path(__file__).with_suffix(".json"), null_to_nan)
TABLES, TASKS = PAPER["tables"], PAPER["tasks"]
IN_WORDS = PAPER["in_words"]  # not in tables: MU "is almost 100%", 12 layers are "twice faster"
STANDS_FOR = PAPER["stands_for"]  # {a name that may be absent here: ours that claims take then}
AVERAGED = ["MNLI", "QQP", "QNLI", "SST-2", "CoLA"]  # Table 4's average leaves SQuAD out

A, B, C, D, E, F, G, H = (  # of Table 4
    next(name for name in PAPER["systems"] if name.startswith(f"({letter})"))
    for letter in "abcdefgh")
MEMORIES = C, D, E, F
MU, TOP1, KL, IN_USE = "MU (%)", "top-1 MU (%)", "KL_u", "in use at the end (%)"
SYSTEMS = {name: system for system, names in PAPER["systems"].items() for name in names}


def system_of(path):
    """Return the system of a run or a configuration, and the seed of its pretraining: "0"."""
    name, seed = re.fullmatch(rf"(.+?)(?:_s(\d))?(?:_(?:{'|'.join(TASKS)}))?",
                              Path(path).stem).groups()
    return SYSTEMS.get(name, name), seed or "0"  # public weights have their own name
