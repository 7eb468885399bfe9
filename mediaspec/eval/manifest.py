"""A folder of generated pictures with one manifest line per finished picture, safe against SIGKILL at any moment.

Order of writes, per batch: every PNG goes to a temporary file, is synced and renamed; then the batch's manifest lines
are appended in one write and synced. So a line in the manifest means a complete picture on disk. Opening a folder
again drops a torn last line, drops lines whose picture is missing or has another sha256, and reports the rest as done.
Nothing that differs between two runs of the same work (times, hosts, process ids) is stored, so a resumed folder
equals an undisturbed one byte for byte.

    OUT/settings.json           the settings all pictures share, and their hash
    OUT/manifest.jsonl          {"id", "index", "prompt", "seed", "file", "sha256", "settings_hash", "versions",
                                "stats"} per line
    OUT/manifest-1-of-4.jsonl   the same for worker 1 of 4, so that workers never write one file
    OUT/000000.png ...
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

__all__ = ["FinishedImage", "Item", "Manifest", "ManifestError", "make_items", "read_manifest", "settings_hash"]

SETTINGS_FILE = "settings.json"
ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
ROW_KEYS = {
    **dict.fromkeys(("id", "prompt", "file", "sha256", "settings_hash"), str),
    **dict.fromkeys(("index", "seed"), int),
    "stats": dict,
}


class ManifestError(ValueError):
    """A folder that cannot be used as asked, or that could not be written."""


@dataclass(frozen=True)
class Item:
    """One picture to make.

    Args:
        index: position in the whole list; shards and file names follow it.
        id: name of the picture, `[A-Za-z0-9._-]+`, unique within the folder.
        prompt: caption, or the class number as text.
        seed: int64 row seed. It belongs to the index, never to a rank, a batch or the time.
        negative_prompt: text for the unconditional branch, None for the model's own.
    """

    index: int
    id: str
    prompt: str
    seed: int
    negative_prompt: str | None = None

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**63:
            raise ManifestError(f"seed {self.seed} of picture {self.index} is no int64; write a smaller --seed")
        if not ID_PATTERN.fullmatch(self.id):
            raise ManifestError(
                f"id {self.id!r} cannot name a file; use letters, digits, '.', '_' and '-', beginning with a letter "
                "or digit"
            )

    @property
    def file(self) -> str:
        """Name of the picture's file."""
        return f"{self.id}.png"


@dataclass(frozen=True)
class FinishedImage:
    """What a pipeline made of one item.

    Args:
        item: the request.
        png: the encoded picture.
        stats: JSON-ready numbers that do not differ between two runs (no times).
        extra: further files by path relative to the folder, for instance {"trace/000000.png": bytes}.
    """

    item: Item
    png: bytes
    stats: Mapping[str, Any]
    extra: Mapping[str, bytes] | None = None


def make_items(
    prompts: Sequence[str | Mapping[str, Any]], *, seed: int, num_images: int = 1, negative_prompt: str | None = None
) -> list[Item]:
    """Numbers the pictures of a list of prompts: picture j of prompt i has index i * num_images + j.

    Args:
        prompts: captions, or mappings with "prompt" and optionally "id", "seed" and "negative_prompt".
        seed: seed of index 0; index k gets seed + k unless its mapping names one (picture j then gets that seed + j).
        num_images: pictures per prompt.
        negative_prompt: used where a mapping names none.

    Raises:
        ManifestError: for an unknown key, a missing prompt or an id used twice.
    """
    items: list[Item] = []
    for i, entry in enumerate(prompts):
        row = {"prompt": entry} if isinstance(entry, str) else dict(entry)
        unknown = sorted(set(row) - {"prompt", "id", "seed", "negative_prompt"})
        if unknown or not isinstance(row.get("prompt"), str):
            raise ManifestError(
                f"prompt {i} is {row}: allowed keys are prompt (a string, required), id, seed and negative_prompt"
                + (f", not {unknown}" if unknown else "")
            )
        first: Any = row.get("seed", seed + i * num_images)
        if not isinstance(first, int) or isinstance(first, bool):
            raise ManifestError(f"prompt {i} has seed {first!r}; write a whole number, or leave it out")
        if not isinstance(row.get("negative_prompt", ""), (str, type(None))):
            raise ManifestError(f"prompt {i} has negative_prompt {row['negative_prompt']!r}; write text or null")
        if not row["prompt"].strip():
            raise ManifestError(f"prompt {i} is empty; write a caption, for instance 'a red apple'")
        for j in range(num_images):
            index = i * num_images + j
            name = f"{index:06d}" if "id" not in row else str(row["id"]) + (f"-{j}" if num_images > 1 else "")
            items.append(Item(index, name, row["prompt"], first + j, row.get("negative_prompt", negative_prompt)))
    seen: dict[str, int] = {}
    for item in items:
        if item.id in seen:
            raise ManifestError(
                f"id {item.id!r} is used by pictures {seen[item.id]} and {item.index}; make the ids differ"
            )
        seen[item.id] = item.index
    return items


def settings_hash(settings: Mapping[str, Any]) -> str:
    """First 16 hex digits of the sha256 of the settings as sorted JSON."""
    return hashlib.sha256(_json(settings, sort=True).encode()).hexdigest()[:16]


def read_manifest(folder: str | os.PathLike[str], *, check: bool = True) -> list[dict[str, Any]]:
    """All finished pictures of a folder, over all its shards, in index order.

    Args:
        folder: what `Manifest` wrote.
        check: compare every picture with its sha256 and refuse pictures that no line names.

    Raises:
        ManifestError: without a manifest; with `check` also for missing, changed or extra pictures.
    """
    root = Path(folder)
    files = _manifest_files(root)
    if not files:
        raise ManifestError(f"{root} holds no manifest; write one with `mediaspec generate image ... --out {root}`")
    rows: dict[str, dict[str, Any]] = {}
    for file in files:
        for row in _parse(file.read_bytes())[0]:
            rows.setdefault(row["id"], row)
    if check:
        bad = [row["file"] for row in rows.values() if not _intact(root, row)]
        if bad:
            raise ManifestError(
                f"{len(bad)} pictures in {root} are missing or changed since they were made ({', '.join(bad[:5])}); "
                "run the same `mediaspec generate` command again to restore them"
            )
        named = {name for row in rows.values() for name in (row["file"], *row.get("extra", {}))}
        extra = sorted({p.name for p in root.glob("*.png")} - named)
        if extra:
            raise ManifestError(
                f"{len(extra)} pictures in {root} are in no manifest ({', '.join(extra[:5])}); move them elsewhere"
            )
    return sorted(rows.values(), key=lambda row: (row["index"], row["id"]))


class Manifest:
    """The open folder: knows what is done, and finishes pictures so that a kill loses only those under way.

    Args:
        folder: created where missing.
        settings: everything that decides the pictures and is the same for all of them; JSON-ready.
        versions: library versions, stored with every line; they do not enter the hash.
        shard: (i, n): this process is worker i of n.

    Raises:
        ManifestError: the folder cannot be written, was made with other settings, or is in use by another process.

    Example:
        >>> with Manifest("out", {"rule": "exact"}) as manifest:  # doctest: +SKIP
        ...     for item in manifest.pending(items):
        ...         manifest.finish([FinishedImage(item, png, {"tokens": 256})])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        settings: Mapping[str, Any],
        versions: Mapping[str, str] | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        rank, world = shard
        if not 0 <= rank < world:
            raise ManifestError(f"there is no shard {rank}/{world}; write i/n with 0 <= i < n, for instance 0/{world}")
        self.root = Path(folder)
        self.shard = shard
        self.tag = "manifest" if world == 1 else f"manifest-{rank}-of-{world}"
        self.path = self.root / f"{self.tag}.jsonl"
        self.hash = settings_hash(settings)
        self.versions = dict(versions or {})
        self.rows: dict[str, dict[str, Any]] = {}
        self._own: dict[str, dict[str, Any]] = {}
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.root / f".{self.tag}.lock")
        except OSError as error:
            raise ManifestError(
                f"cannot write to {self.root}: {error.strerror or error}; choose another folder with --out"
            ) from error
        try:
            with _explain(self):
                for left_over in self.root.rglob(f".*.{self.tag}.tmp"):
                    left_over.unlink()
                known = self._check_settings(settings)
                self._load()
                if not known:
                    text = _json({"settings_hash": self.hash, "settings": settings}, indent=1)
                    self._replace(self.root / SETTINGS_FILE, text.encode() + b"\n")
        except BaseException:
            self._unlock()
            raise

    def _check_settings(self, settings: Mapping[str, Any]) -> bool:
        """Whether the folder states these very settings already; refuses a folder made with others."""
        path = self.root / SETTINGS_FILE
        if path.exists():
            try:
                old = json.loads(path.read_text(encoding="utf-8"))["settings"]
            except (ValueError, KeyError, TypeError):
                old = None
            if isinstance(old, dict) and settings_hash(old) == self.hash:
                return True
            # where nothing was finished with the other settings, nothing can be mixed up
            if isinstance(old, dict) and any(file.stat().st_size for file in _manifest_files(self.root)):
                new = json.loads(_json(settings))
                differing = [
                    f"{key}: {_short(old.get(key))} there, {_short(new.get(key))} now"
                    for key in sorted(set(old) | set(new))
                    if old.get(key) != new.get(key)
                ]
                raise ManifestError(
                    f"{self.root} was made with other settings ({'; '.join(differing)}); use the same settings to go "
                    "on with it, or another folder with --out"
                )
        return False

    def _load(self) -> None:
        dropped: list[str] = []
        foreign: set[str] = set()
        for file in _manifest_files(self.root):
            own = file == self.path
            rows, rest = _parse(file.read_bytes())
            if own and rest:
                dropped.append(f"{rest} unreadable line(s)")
            for row in rows:
                if row["settings_hash"] != self.hash:
                    foreign.add(row["settings_hash"])
                elif row["id"] in self.rows:
                    if own:
                        dropped.append(f"a second line for {row['id']}")
                elif _intact(self.root, row):
                    self.rows[row["id"]] = row
                    if own:
                        self._own[row["id"]] = row
                elif own:
                    dropped.append(f"{row['file']} (missing or changed)")
        if foreign:
            raise ManifestError(
                f"{self.root} holds pictures with settings hash {', '.join(sorted(foreign))}, now it is {self.hash}; "
                "choose another folder with --out"
            )
        if dropped:
            warnings.warn(f"{self.path}: repaired; redoing {', '.join(dropped[:5])}", stacklevel=4)
            self._rewrite()
        versions = {_json(row.get("versions", {}), sort=True) for row in self.rows.values()}
        if versions - {_json(self.versions, sort=True)}:
            warnings.warn(
                f"{self.root} was begun with other library versions ({'; '.join(sorted(versions))}); the rest is made "
                f"with {self.versions}",
                stacklevel=4,
            )

    def pending(self, items: Iterable[Item], extra: str | None = None) -> list[Item]:
        """This worker's items that are not finished, in order.

        Args:
            items: all pictures wanted, of all workers.
            extra: pattern of a further file every picture must have, for instance "trace/{id}.png".

        Raises:
            ManifestError: an id stands in the folder with another prompt or seed.
        """
        rank, world = self.shard
        todo = []
        for item in items:
            row = self.rows.get(item.id)
            whole = row is not None and (extra is None or extra.format(id=item.id) in row.get("extra", {}))
            if not whole and item.index % world == rank:
                todo.append(item)
            if row is None:
                continue
            for key in ("index", "prompt", "seed", "negative_prompt"):
                given = getattr(item, key)
                if row.get(key) != given:
                    raise ManifestError(
                        f"{self.root} already holds {item.id} with {key} {row.get(key)!r}, now it is {given!r}; keep "
                        "the prompts, --seed and --num-images to go on with this folder, or choose another with --out"
                    )
        return todo

    def finish(self, images: Sequence[FinishedImage]) -> list[dict[str, Any]]:
        """Stores finished pictures, then their lines; returns the rows.

        Raises:
            ManifestError: the disk is full or the folder went away; what was finished before is kept.
        """
        rows = []
        with _explain(self):
            for image in images:
                for name, data in (image.extra or {}).items():
                    (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                    self._replace(self.root / name, data)
                self._replace(self.root / image.item.file, image.png)
                rows.append(self._row(image))
            again = any(row["id"] in self._own for row in rows)
            if not again:
                _append(self.path, b"".join(_json(row).encode() + b"\n" for row in rows))
            for row in rows:
                self.rows[row["id"]] = self._own[row["id"]] = row
            if again:
                self._rewrite()
        return rows

    def _row(self, image: FinishedImage) -> dict[str, Any]:
        item = image.item
        row: dict[str, Any] = {"id": item.id, "index": item.index, "prompt": item.prompt, "seed": item.seed}
        if item.negative_prompt is not None:
            row["negative_prompt"] = item.negative_prompt
        row |= {"file": item.file, "sha256": hashlib.sha256(image.png).hexdigest(), "settings_hash": self.hash}
        if image.extra:
            row["extra"] = {name: hashlib.sha256(data).hexdigest() for name, data in image.extra.items()}
        return row | {"versions": self.versions, "stats": dict(image.stats)}

    def close(self) -> None:
        """Puts the lines in index order (only a repaired folder has them otherwise) and releases the folder."""
        try:
            order = [(row["index"], row["id"]) for row in self._own.values()]
            if order != sorted(order):
                with _explain(self):
                    self._rewrite()
        finally:
            self._unlock()

    def __enter__(self) -> Manifest:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._unlock()

    def _rewrite(self) -> None:
        self._own = dict(sorted(self._own.items(), key=lambda pair: (pair[1]["index"], pair[0])))
        self._replace(self.path, b"".join(_json(row).encode() + b"\n" for row in self._own.values()))

    def _replace(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f".{path.name}.{self.tag}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    def _unlock(self) -> None:
        if self._lock is not None:
            (self.root / f".{self.tag}.lock").unlink(missing_ok=True)
            self._lock.close()
            self._lock = None


class _explain:
    """Turns an OSError while writing into a ManifestError that says what is safe and what to do."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(value, OSError):
            raise ManifestError(
                f"cannot write to {self.manifest.root}: {value.strerror or value}; {len(self.manifest.rows)} finished "
                "pictures are kept; make room or permissions, then run the same command again"
            ) from value


def _json(value: Any, *, sort: bool = False, indent: int | None = None) -> str:
    separators = (",", ":") if indent is None else None
    return json.dumps(value, sort_keys=sort, ensure_ascii=False, separators=separators, indent=indent, allow_nan=False)


def _short(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _manifest_files(root: Path) -> list[Path]:
    return sorted(p for p in root.glob("manifest*.jsonl") if re.fullmatch(r"manifest(-\d+-of-\d+)?\.jsonl", p.name))


def _parse(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The readable rows, and how many lines (a torn last one included) are not."""
    rows, bad = [], 0
    lines = data.split(b"\n")
    for line in lines[:-1]:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        kinds = {**ROW_KEYS, "extra": dict}
        if isinstance(row, dict) and all(isinstance({"extra": {}, **row}.get(k), kind) for k, kind in kinds.items()):
            rows.append(row)
        else:
            bad += 1
    return rows, bad + bool(lines[-1])


def _intact(root: Path, row: Mapping[str, Any]) -> bool:
    for name, digest in {row["file"]: row["sha256"], **row.get("extra", {})}.items():
        try:
            if hashlib.sha256((root / name).read_bytes()).hexdigest() != digest:
                return False
        except OSError:
            return False
    return True


def _append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        start = os.fstat(descriptor).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(descriptor, data[written:])
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, start)
            raise
    finally:
        os.close(descriptor)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _lock(path: Path) -> IO[bytes] | None:
    """An exclusive lock that the kernel releases when the process dies; None where the platform has no flock."""
    if sys.platform == "win32":
        return None
    import fcntl

    file = open(path, "wb")  # noqa: SIM115 - held as long as the manifest is open
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # a process that just finished may have removed the name between our open and our lock
        if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    file.close()
    raise ManifestError(
        f"another process is writing to {path.parent}; wait for it, or split the work with --shard i/n"
    )
