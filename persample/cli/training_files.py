"""The files of a training: metrics, a figure, a checkpoint."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from persample.cli.curve import save_curve
from persample.cli.report import writable
from persample.errors import ArgumentError
from persample.rl.training import Trainer, load_checkpoint, save_checkpoint

CHECKPOINT, METRICS, CURVE = "checkpoint.pt", "metrics.csv", "learning_curve.png"


class TrainingFiles:
    """The files of one training, which are consistent after ``save``.

    Args:
        trainer: a new trainer, or one with a checkpoint's settings.
        directory: the directory of the files.
        resume: whether to resume from the checkpoint in ``directory``.

    Raises:
        ArgumentError: if the directory cannot be written to, an existing checkpoint would be overwritten, or the
            checkpoint to resume is missing.
    """

    def __init__(self, trainer: Trainer, directory: Path, *, resume: bool) -> None:
        self.trainer, self.directory = trainer, directory
        if not resume or os.path.lexists(directory):
            writable(directory, CHECKPOINT, f"{CHECKPOINT}.partial", METRICS, CURVE)
        if resume:
            load_checkpoint(trainer, directory / CHECKPOINT)
        elif (directory / CHECKPOINT).exists():
            fix = "Go on with it by --resume, or choose another directory."
            expected, received = "a directory without a checkpoint", repr(str(directory))
            raise ArgumentError.about("--output", expected=expected, received=received, fix=fix)
        # Drop rows that an interrupted training wrote after its last checkpoint.
        (directory / METRICS).write_text("", encoding="utf-8")
        self._append(trainer.history)

    def append(self) -> None:
        """Append the last update to the metrics."""
        self._append(self.trainer.history[-1:])

    def _append(self, rows: list[dict[str, float]]) -> None:
        with (self.directory / METRICS).open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0] if rows else ())
            if rows and not file.tell():
                writer.writeheader()
            writer.writerows(rows)

    def save(self) -> None:
        """Save the checkpoint and draw the learning curve."""
        save_checkpoint(self.trainer, self.directory / CHECKPOINT)
        if self.trainer.history:
            save_curve(self.trainer, self.directory / CURVE)
