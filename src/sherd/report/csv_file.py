"""Steps of a run as a CSV file, written as they become complete or all at once."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import IO

from sherd.errors import ConfigError
from sherd.observe.rows import StepRow
from sherd.observe.runs import RunRecord
from sherd.report.columns import columns


class CsvWriter:
    """One line per step. A column that appears later, such as a figure logged once per epoch, is empty before.

    The newest step is written with the next one, or by `close`, because figures may still be added to it.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self.path = Path(file)
        self._names: list[str] = []
        self._held: StepRow | None = None
        self._file = self._open()

    def write(self, row: StepRow) -> None:
        """Take the next step."""
        self._write_held()
        self._held = row

    def close(self) -> None:
        """Write what is left and close the file."""
        self._write_held()
        self._file.close()

    def __enter__(self) -> CsvWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> IO[str]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return self.path.open("w", newline="", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}; name a file you can write") from None

    def _write_held(self) -> None:
        if self._held is None:
            return
        values = columns(self._held)
        self._held = None
        if missing := [name for name in values if name not in self._names]:
            self._add_columns(missing)
        csv.writer(self._file).writerow([_cell(values.get(name)) for name in self._names])
        self._file.flush()  # for programs that follow the file

    def _add_columns(self, names: list[str]) -> None:
        self._file.close()
        with self.path.open(newline="", encoding="utf-8") as file:
            before = list(csv.reader(file))[1:]
        self._names += names
        self._file = self._open()
        writer = csv.writer(self._file)
        writer.writerow(self._names)
        writer.writerows([*line, *[""] * (len(self._names) - len(line))] for line in before)


def write_csv(record: RunRecord, file: str | os.PathLike[str]) -> None:
    """All complete steps of a run."""
    with CsvWriter(file) as writer:
        for row in record.steps:
            writer.write(row)


def _cell(value: float | None) -> str:
    return "" if value is None else repr(value)
