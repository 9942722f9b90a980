"""Steps of a run as scalars for TensorBoard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sherd.errors import ConfigError, Unsupported
from sherd.observe.messages import TextSample
from sherd.observe.rows import StepRow
from sherd.report.columns import columns

NOT_DRAWN = ("step", "time", "samples", "tokens")


class TensorBoardWriter:
    """Writes steps and texts into a directory for `tensorboard --logdir`.

    The newest step is written with the next one, or by `close`, because figures may still be added to it.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._writer = _summary_writer(os.fspath(directory))
        self._held: StepRow | None = None

    def write(self, row: StepRow) -> None:
        """Take the next step."""
        self._write_held()
        self._held = row

    def write_text(self, sample: TextSample) -> None:
        """Take a text that the run produced."""
        # Four spaces: TensorBoard renders Markdown, and generated text is not Markdown.
        text = "\n".join(f"    {line}" for line in sample.text.splitlines())
        self._writer.add_text(sample.title or "sample", text, sample.step, walltime=sample.t)

    def close(self) -> None:
        """Write what is left and close the files."""
        self._write_held()
        self._writer.close()

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_held(self) -> None:
        row, self._held = self._held, None
        if row is None:
            return
        for name, value in columns(row).items():
            if value is not None and name not in NOT_DRAWN:
                # A slash makes a section in TensorBoard: all phases under "seconds", all kinds under "memory".
                self._writer.add_scalar(name.replace(".", "/", 1), value, row.step, walltime=row.t)


def _summary_writer(directory: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise Unsupported("TensorBoard is not installed: pip install 'sherd[tensorboard]'") from None
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        return SummaryWriter(directory)
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}; name a directory you can write") from None
