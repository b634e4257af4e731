"""
Tables 4, 5 and 7: the scores of fine-tuned runs, medians over their seeds.

>>> header, rows, records = score_table(["out/base_sst2", "out/base_rte"])
"""
import numpy as np

from lib.common.errors import UserError
from lib.tasks.glue import TASKS, task_name
from lib.weights.run import Run, recipe_differences

TABLE_4 = list(TASKS)[:6]  # its columns; its average leaves SQuAD out


def group_seeds(paths):
    """Group finished seeds: {(initial model, update_memory, recipe): {task: {seed: Run}}}. The
    recipe is usually ''. Where runs of one initial model on one task differ in more than the seed,
    it names these settings: 'lr=2e-05'. UserError if no run is done or a seed is there twice."""
    by_task, systems = {}, {}
    for path in paths:
        finished = [seed for seed in Run(path).seeds() if seed.results()]
        if not finished:
            print(f"{path} is left out: not fine-tuned, or not done")
        for run in finished:
            settings = run.settings(["init_from", "update_memory", "task", "seed"])
            key = settings["init_from"], settings["update_memory"], task_name(settings["task"])
            by_task.setdefault(key, {})[run.folder.resolve()] = run, settings
    if not by_task:
        raise UserError(f"{', '.join(paths)}: no fine-tuned run that is done")
    for (initial, updated, task), runs in by_task.items():
        _, first = next(iter(runs.values()))
        varied = recipe_differences(first, [settings for _, settings in runs.values()])
        for run, settings in runs.values():
            recipe = ", ".join(f"{name}={settings.get(name)}" for name in varied)
            seeds = systems.setdefault((initial, updated, recipe), {}).setdefault(task, {})
            other = seeds.setdefault(settings["seed"], run)
            if other is not run:
                raise UserError(f"{other.folder} and {run.folder} have the same settings and the "
                                "same seed: leave one out")
    return systems


def score_table(paths):
    """Make the table of fine-tuned runs: (header, rows, records for JSON)."""
    systems, rows, records = group_seeds(paths), [], []
    scored = {task for tasks in systems.values() for task in tasks}
    columns = [*TABLE_4, "Avg", *(task for task in [*TASKS, *sorted(scored - TASKS.keys())]
                                  if task in scored and task not in TABLE_4)]
    for (initial, updated, recipe), tasks in systems.items():
        scores = {task: {seed: run.results() for seed, run in runs.items()}
                  for task, runs in tasks.items()}
        medians = {task: median_scores(task, seeds.values()) for task, seeds in scores.items()}
        averaged = [value for task in TABLE_4[1:] for value in medians.get(task, [])]
        if len(averaged) == 6:  # MNLI has two
            medians["Avg"] = [float(np.mean(averaged))]
        records.append({"init_from": initial, "update_memory": updated, "recipe": recipe,
                        "median": medians, "seeds": scores})
        counts = [len(seeds) for seeds in scores.values()]
        rows.append([f"{initial} {recipe}".strip(), "Y" if updated else "N",
                     f"{min(counts)}-{max(counts)}" if len({*counts}) > 1 else counts[0],
                     *("/".join(f"{value:.1f}" for value in medians.get(column, [])) or "-"
                       for column in columns)])
    titles = [TASKS[task].table_title if task in TASKS else task for task in columns]
    return ["initial model", "memory update", "seeds", *titles], rows, records


def median_scores(task, seeds):
    """Return the median of each of a task's metrics over its seeds, in percent."""
    metrics, scale = ["accuracy", "pearson"], 100  # a task of your own has one of the two
    if task in TASKS:
        metrics, scale = TASKS[task].table_metrics, TASKS[task].scale
    values = [[scores.get(f"eval_{metric}") for scores in seeds] for metric in metrics]
    if wrong := [x for of_metric in values for x in of_metric if not isinstance(x, float | None)]:
        raise UserError(f"eval_results.json of {task}: a score is {wrong[0]!r}")
    return [scale * float(np.median(of_metric)) for of_metric in values if None not in of_metric]
