"""
Time functions in turn, print their times, and name the machine.
"""
import os
import platform
import re
import sys
import time
from pathlib import Path
from statistics import median

import torch

from lib.device import Progress
from lib.figures import markdown


def time_in_turn(what, functions, device, rounds, warmup=2, bases=1):
    """Time {name: function} in turn: a busy moment of the machine slows every function.

    Returns a record for each name. "seconds" has the time of each round. "times_NAME" compares with
    function NAME, for the first `bases` functions: the median of the rounds' ratios. Models compile
    in the rounds of warm-up, which do not count.
    """
    synchronize = getattr(torch, device.type).synchronize
    times = {name: [] for name in functions}
    for _ in Progress(range(warmup + rounds), what):
        for name, function in functions.items():
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            times[name].append(time.perf_counter() - start)
    records = []
    for name, seconds in times.items():
        record = {"what": what, "system": name, "seconds": seconds[warmup:]}
        for base in list(functions)[:bases]:
            ratios = [own / other for own, other in zip(seconds, times[base], strict=True)]
            record[f"times_{base}"] = median(ratios[warmup:])
        records.append(record)
    return records


def print_times(records):
    """Print a table of the records with the same keys. Times are median [lowest, highest]."""
    tables = {}
    for record in records:
        row = []
        for value in record.values():
            if isinstance(value, list):
                low, middle, high = 1e3 * min(value), 1e3 * median(value), 1e3 * max(value)
                value = f"{middle:.4g} [{low:.4g}, {high:.4g}] ms"
            row.append(f"{value:,}" if isinstance(value, int) else value)
        tables.setdefault(tuple(record), []).append(row)
    for keys, rows in tables.items():
        print(markdown(keys, rows))


def machine_facts(device):
    """Return what times depend on: processor, OpenMP's variables, version of torch."""
    names = [platform.machine()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():  # Linux
        names += re.findall("model name.*: (.*)", cpuinfo.read_text())
    if device.type == "cuda":
        names.append(torch.cuda.get_device_name(device))
    openmp = [f"{name}={os.environ[name]}" for name in os.environ if name.startswith("OMP_")]
    return {"machine": f"{names[-1]}, {torch.get_num_threads()} threads",
            "openmp": " ".join(openmp), "torch": torch.__version__}


def peak_bytes(device):
    """Return the highest memory use of this process; on CUDA, since the last call."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    import resource  # Windows lacks it

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
