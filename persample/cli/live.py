"""The terminal display of a training: a progress bar above a table of the last updates."""

from __future__ import annotations

import sys

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from persample.rl.training import Trainer
from persample.rl.training.trainer import Row

ROWS = 8


class Display:
    """The live display on stderr, a context manager; ``refresh`` redraws it after an update.

    Args:
        trainer: the trainer to show.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self.bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn())
        self.task = self.bar.add_task("steps", total=trainer.config.steps, completed=trainer.steps)
        # Wide enough for the table where there is no terminal to ask.
        console = Console(stderr=True, width=None if sys.stderr.isatty() else 110)
        # No thread: the display is redrawn after each update.
        self.live = Live(self._group(), console=console, auto_refresh=False)

    def __enter__(self) -> Display:
        self.live.start(refresh=True)
        return self

    def __exit__(self, *_error: object) -> None:
        self.live.stop()
        if not self.live.console.is_terminal:  # rich leaves the last line open there
            self.live.console.line()

    def refresh(self) -> None:
        """Show the last update."""
        self.bar.update(self.task, completed=min(self.trainer.steps, self.trainer.config.steps))
        self.live.update(self._group(), refresh=True)

    def _group(self) -> Group:
        return Group(self.bar, table(self.trainer.history[-ROWS:]))


def table(rows: list[Row]) -> Table:
    """Return a table of updates.

    Args:
        rows: the metrics of each update, all with the same names.

    Returns:
        A table with one line per update.
    """
    result = Table()
    for name in rows[0] if rows else ():
        result.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        result.add_row(*(f"{value:,}" if isinstance(value, int) else f"{value:.4g}" for value in row.values()))
    return result
