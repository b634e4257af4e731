"""
Tables 4, 5 and 7: the scores of fine-tuned runs, medians over their seeds.

>>> systems = group_seeds(finished_seeds(["out/base_sst2", "out/base_rte"]))
>>> header, rows, records = score_table(systems)
"""
from pathlib import Path

import numpy as np

from lib.common.errors import UserError
from lib.tasks.glue import TASKS, task_name
from lib.weights.run import Run

TABLE_4 = list(TASKS)[:6]  # its columns; its average leaves SQuAD out
# Not part of a recipe: settings that change no score, and the seeds
NO_RECIPE = {"out", "log_interval", "checkpoint_interval", "device", "compile", "tensorboard",
             "rank_timeout", "seed", "seeds"}


def finished_seeds(paths):
    """List the finished seeds of fine-tuned runs, each a Run. Print which runs have none; UserError
    if no run has one."""
    finished = []
    for path in paths:
        if not Path(path).is_dir():
            raise UserError(f"{path}: no such run")
        seeds = [seed for seed in Run(path).seeds() if seed.results()]
        if not seeds:
            print(f"{path} is left out: not fine-tuned, or not done")
        finished += seeds
    if not finished:
        raise UserError(f"{', '.join(paths)}: no fine-tuned run that is done")
    return finished


def group_seeds(finished):
    """Group finished seeds: {(initial model, update_memory, recipe): {task: {seed: scores}}}. The
    recipe is usually ''. Where runs of one initial model on one task differ in more than the seed,
    it names these settings: 'lr=2e-05'. UserError if two folders hold the same seed."""
    settings_of, systems, run_of = {}, {}, {}
    for run in {run.folder.resolve(): run for run in finished}.values():
        settings = run.settings()
        key = settings["init_from"], settings["update_memory"], task_name(settings["task"])
        settings_of.setdefault(key, {})[run] = settings
    for (initial, updated, task), runs in settings_of.items():
        varied = varied_settings(runs.values())
        for run, settings in runs.items():
            recipe = ", ".join(f"{name}={settings.get(name)}" for name in varied)
            system, seed = (initial, updated, recipe), settings["seed"]
            other = run_of.setdefault((system, task, seed), run)
            if other is not run:
                raise UserError(f"{other.folder} and {run.folder} have the same settings and the "
                                "same seed: leave one out")
            systems.setdefault(system, {}).setdefault(task, {})[seed] = run.results()
    return systems


def varied_settings(runs):
    """List the settings of a recipe that differ between runs; an old run may lack some."""
    values = {}
    for settings in runs:
        for name in settings.keys() - NO_RECIPE:
            values.setdefault(name, set()).add(str(settings[name]))
    return sorted(name for name, different in values.items() if len(different) > 1)


def score_table(systems):
    """Make the table of what group_seeds returns: (header, rows, records for JSON)."""
    scored = {task for scores in systems.values() for task in scores}
    more = [task for task in [*TASKS, *sorted(scored - TASKS.keys())]
            if task in scored and task not in TABLE_4]
    columns = [*TABLE_4, "Avg", *more]
    rows, records = [], []
    for (initial, updated, recipe), scores in systems.items():
        medians = {task: median_scores(task, seeds) for task, seeds in scores.items()}
        averaged = [value for task in TABLE_4[1:] for value in medians.get(task, [])]
        average = float(np.mean(averaged)) if len(averaged) == 6 else None  # MNLI has two
        records.append({"init_from": initial, "update_memory": updated, "recipe": recipe,
                        "median": medians, "average": average, "seeds": scores})
        counts = [len(seeds) for seeds in scores.values()]
        fewest, most = min(counts), max(counts)
        cells = medians | ({} if average is None else {"Avg": [average]})
        rows.append([f"{initial} {recipe}".strip(), "Y" if updated else "N",
                     f"{fewest}-{most}" if fewest < most else most,
                     *("/".join(f"{value:.1f}" for value in cells.get(column, [])) or "-"
                       for column in columns)])
    titles = [TASKS[task].table_title if task in TASKS else task for task in columns]
    return ["initial model", "memory update", "seeds", *titles], rows, records


def median_scores(task, seeds):
    """Return the median of each of a task's metrics over {seed: scores}, in percent."""
    metrics, scale = ["accuracy", "pearson"], 100  # a task of your own has one of them
    if task in TASKS:
        metrics, scale = TASKS[task].table_metrics, TASKS[task].scale
    values = [[scores.get(f"eval_{metric}") for scores in seeds.values()] for metric in metrics]
    return [scale * float(np.median(of_metric)) for of_metric in values if None not in of_metric]
