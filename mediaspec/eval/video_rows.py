"""One row per measured video in JSON lines files that survive a killed process and may be written by several workers.

    rows = VideoRows(folder, {"steps": 16})        # refuses a folder that was begun with other settings
    if rows.find("freenoise/0000-0") is None: rows.add({"id": "freenoise/0000-0", ...})

A folder holds run.json (settings), rows.jsonl or rows.i-of-n.jsonl (rows, the last one of an id counts), videos/ and
features/. A row is appended after its video is on the disk; a line cut off by a crash is left out when reading.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["VideoRows", "read_rows", "read_run"]

RUN = "run.json"


def read_run(folder: str | Path) -> dict[str, Any] | None:
    """The settings of a folder that an earlier run made; None where there are none.

    Raises:
        ValueError: the file is damaged.
    """
    path = Path(folder) / RUN
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and run the same command again") from error
    return found


def read_rows(folder: str | Path) -> list[dict[str, Any]]:
    """All rows of a folder, of all workers, the last one of every id, sorted by id."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(Path(folder).glob("rows*.jsonl")):
        for line in path.read_bytes().split(b"\n"):
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the end of a line that a crash cut off; its video is measured again
            if isinstance(row, dict) and isinstance(row.get("id"), str):
                found[row["id"]] = row
    return [found[key] for key in sorted(found)]


class VideoRows:
    """The rows of one run, and the file that this worker appends to.

    Args:
        folder: made where missing.
        settings: what the videos depend on; the first run of a folder writes them, later ones must agree.
        shard: (i, n) of this worker.

    Raises:
        ValueError: the folder was begun with other settings; the first difference is named.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any], shard: tuple[int, int] = (0, 1)) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check(json.loads(json.dumps(settings)))
        name = "rows.jsonl" if shard[1] == 1 else f"rows.{shard[0]}-of-{shard[1]}.jsonl"
        self.path = self.folder / name
        self._rows = {row["id"]: row for row in read_rows(self.folder)}

    def _check(self, settings: dict[str, Any]) -> None:
        before = read_run(self.folder)
        if before is None:
            part = self.folder / f".{RUN}.{os.getpid()}.part"
            part.write_text(json.dumps(settings, indent=1, sort_keys=True), encoding="utf-8")
            os.replace(part, self.folder / RUN)
            return
        for key in sorted({*before, *settings}):
            if before.get(key) != settings.get(key):
                raise ValueError(
                    f"{self.folder} was begun with {key}={before.get(key)!r}, now it is {settings.get(key)!r}; run "
                    "with the same settings, or give another folder with --out"
                )

    def find(self, id: str) -> dict[str, Any] | None:
        """The row of a video, None where it was not measured yet."""
        return self._rows.get(id)

    def add(self, row: Mapping[str, Any]) -> None:
        """Appends a row; it is on the disk when this returns.

        Raises:
            OSError: the disk is full; earlier rows stay whole.
        """
        data = json.dumps(row, allow_nan=False).encode() + b"\n"
        with open(self.path, "ab+") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    data = b"\n" + data  # a crash cut the last line; do not join this one to it
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._rows[str(row["id"])] = dict(row)
