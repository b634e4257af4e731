"""
Show progress and durations, and print tables.
"""
import sys
from datetime import timedelta

from tqdm import tqdm

from lib.common.torchrun import first_rank


class Progress(tqdm):
    """A tqdm bar on a terminal; elsewhere a line every 10 seconds."""

    def __init__(self, *args, **settings):
        if not sys.stderr.isatty():
            settings |= {"mininterval": 10, "delay": 10, "leave": False, "ascii": True,
                         "ncols": 100}
        super().__init__(*args, disable=not first_rank(), **settings)

    @staticmethod
    def status_printer(file):
        if file.isatty():
            return tqdm.status_printer(file)
        return lambda text: text and print(text, file=file, flush=True)


def duration(seconds):
    """Format seconds as days, hours, minutes and seconds, up to a billion days."""
    return str(timedelta(seconds=round(min(seconds, 8e13))))


def markdown(header, rows, align=str.ljust):
    """Format a Markdown table with aligned columns. A float gets two decimals, None is empty."""
    def text(cell):
        cell = "" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell)
        return cell.replace("|", "\\|")

    rows = [[text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(map(align, row, widths))} |\n" for row in rows)
