"""The manifest keeps what is finished: through kills, torn lines, changed files, other settings and full disks."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mediaspec.eval.manifest import FinishedImage, Item, Manifest, ManifestError, make_items, read_manifest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"rule": "cool_sd", "rule_settings": {"delta": 1.1}}


def picture(item: Item, size: int = 2000) -> bytes:
    return hashlib.sha256(f"{item.prompt}{item.seed}".encode()).digest() * (size // 32)


def fill(folder: Path, items: list[Item], batch: int = 2, settings: dict = SETTINGS, **keywords) -> int:
    made = 0
    with Manifest(folder, settings, **keywords) as manifest:
        todo = manifest.pending(items)
        for start in range(0, len(todo), batch):
            part = todo[start : start + batch]
            manifest.finish([FinishedImage(item, picture(item), {"tokens": 4}) for item in part])
            made += len(part)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_items_number_prompts_and_seeds() -> None:
    items = make_items(["a cat", {"prompt": "a dog", "seed": 50, "id": "dog"}], seed=7, num_images=2)
    assert [(i.index, i.id, i.prompt, i.seed) for i in items] == [
        (0, "000000", "a cat", 7), (1, "000001", "a cat", 8), (2, "dog-0", "a dog", 50), (3, "dog-1", "a dog", 51),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([{"promt": "a cat"}], "promt"),
        ([{"prompt": 3}], "prompt"),
        (["a", " "], "prompt 1 is empty"),
        ([{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}], "used by pictures 0 and 1"),
        ([{"prompt": "a", "id": "../x"}], "cannot name a file"),
        ([{"prompt": "a", "seed": "x"}], "seed 'x'; write a whole number"),
        ([{"prompt": "a", "seed": 1.5}], "seed 1.5; write a whole number"),
        ([{"prompt": "a", "seed": 2**63}], "no int64"),
        ([{"prompt": "a", "negative_prompt": 5}], "negative_prompt 5; write text"),
    ],
)
def test_bad_prompt_rows_are_refused(prompts: list, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        make_items(prompts, seed=0)


def test_a_second_run_has_nothing_to_do(tmp_path: Path) -> None:
    items = make_items(["a", "b", "c"], seed=0)
    assert fill(tmp_path, items) == 3
    before = contents(tmp_path)
    times = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.png")}
    assert fill(tmp_path, items) == 0
    assert contents(tmp_path) == before and {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.png")} == times
    assert set(before) == {"000000.png", "000001.png", "000002.png", "manifest.jsonl", "settings.json"}
    rows = read_manifest(tmp_path)
    assert [row["id"] for row in rows] == ["000000", "000001", "000002"] and rows[1]["seed"] == 1


KILLED = textwrap.dedent("""
    import sys, time
    sys.path.insert(0, {root!r})
    from tests.eval.test_manifest import fill, picture, SETTINGS
    from mediaspec.eval.manifest import Manifest, make_items, FinishedImage
    print("go", flush=True)
    fill({folder!r}, make_items([f"p{{i}}" for i in range(40)], seed=3), batch=3)
""")


def test_sigkill_at_random_moments_ends_in_the_undisturbed_folder(tmp_path: Path) -> None:
    items = make_items([f"p{i}" for i in range(40)], seed=3)
    undisturbed = tmp_path / "undisturbed"
    fill(undisturbed, items, batch=3)
    draw = random.Random(0)
    folder = tmp_path / "killed"
    kills = 0
    for _ in range(60):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED.format(root=str(ROOT), folder=str(folder))], stdout=subprocess.PIPE, cwd=ROOT
        )
        assert process.stdout is not None and process.stdout.readline() == b"go\n"
        path = folder / "manifest.jsonl"
        done = path.read_bytes().count(b"\n") if path.exists() else 0
        wanted = done + draw.randint(1, 8)
        deadline = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < deadline:
            if path.exists() and path.read_bytes().count(b"\n") >= wanted:
                break
            time.sleep(0.0005)
        time.sleep(draw.random() * 0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        kills += process.returncode == -signal.SIGKILL
        if process.returncode == 0:
            break
    assert kills >= 3
    fill(folder, items, batch=3)
    assert contents(folder) == contents(undisturbed)


def test_a_torn_last_line_is_repaired_and_only_its_picture_redone(tmp_path: Path) -> None:
    items = make_items(["a", "b", "c"], seed=0)
    fill(tmp_path, items, batch=1)
    whole = contents(tmp_path)
    path = tmp_path / "manifest.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    (tmp_path / ".000002.png.manifest.tmp").write_bytes(b"half")
    with pytest.warns(UserWarning, match="unreadable"):
        assert fill(tmp_path, items) == 1
    assert contents(tmp_path) == whole


def test_rubbish_in_the_middle_and_double_lines_are_dropped(tmp_path: Path) -> None:
    items = make_items(["a", "b", "c"], seed=0)
    fill(tmp_path, items)
    whole = contents(tmp_path)
    path = tmp_path / "manifest.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\x00\x00garbage\n" + lines[0] + lines[2])
    with pytest.warns(UserWarning, match="repaired"):
        assert fill(tmp_path, items) == 1
    assert contents(tmp_path) == whole


@pytest.mark.parametrize("damage", ["change", "remove"])
def test_a_changed_or_missing_picture_is_redone(tmp_path: Path, damage: str) -> None:
    items = make_items(["a", "b", "c"], seed=0)
    fill(tmp_path, items)
    whole = contents(tmp_path)
    victim = tmp_path / "000001.png"
    if damage == "change":
        victim.write_bytes(b"other")
    else:
        victim.unlink()
    with pytest.raises(ManifestError, match="000001.png"):
        read_manifest(tmp_path)
    with pytest.warns(UserWarning, match="missing or changed"):
        assert fill(tmp_path, items) == 1
    assert contents(tmp_path) == whole


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    items = make_items(["a"], seed=0)
    fill(tmp_path, items)
    before = contents(tmp_path)
    with pytest.raises(ManifestError, match="1.1.* there, .*2.0.* now"):
        fill(tmp_path, items, settings={"rule": "cool_sd", "rule_settings": {"delta": 2.0}})
    assert contents(tmp_path) == before


def test_settings_of_a_run_that_finished_nothing_are_replaced(tmp_path: Path) -> None:
    with Manifest(tmp_path, {"rule": "typo"}):
        pass
    assert fill(tmp_path, make_items(["a"], seed=0)) == 1


def test_other_settings_are_refused_even_without_the_settings_file(tmp_path: Path) -> None:
    items = make_items(["a"], seed=0)
    fill(tmp_path, items)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ManifestError, match="settings hash"):
        fill(tmp_path, items, settings={"rule": "exact"})


def test_a_damaged_settings_file_does_not_lock_the_folder_to_other_settings(tmp_path: Path) -> None:
    items = make_items(["a"], seed=0)
    fill(tmp_path, items)
    whole = contents(tmp_path)
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ManifestError, match="settings hash"):
        fill(tmp_path, items, settings={"rule": "exact"})
    assert fill(tmp_path, items) == 0 and contents(tmp_path) == whole


@pytest.mark.parametrize("edit", [{"index": "x"}, {"id": ["x"]}, {"stats": 3}, {"extra": ["x"]}, {"file": None}])
def test_an_edited_line_of_the_wrong_kind_is_redone(tmp_path: Path, edit: dict) -> None:
    items = make_items(["a", "b"], seed=0)
    fill(tmp_path, items)
    whole = contents(tmp_path)
    lines = (tmp_path / "manifest.jsonl").read_text().splitlines()
    lines[0] = json.dumps({**json.loads(lines[0]), **edit})
    (tmp_path / "manifest.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.warns(UserWarning, match="unreadable line"):
        assert fill(tmp_path, items) == 1
    assert contents(tmp_path) == whole


def test_another_prompt_or_seed_under_a_finished_id_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, make_items(["a", "b"], seed=0))
    with pytest.raises(ManifestError, match="prompt 'b', now it is 'z'"):
        fill(tmp_path, make_items(["a", "z"], seed=0))
    with pytest.raises(ManifestError, match="seed 0, now it is 5"):
        fill(tmp_path, make_items(["a", "b"], seed=5))
    assert fill(tmp_path, make_items(["a", "b", "c"], seed=0)) == 1


def test_shards_together_make_the_whole(tmp_path: Path) -> None:
    items = make_items([f"p{i}" for i in range(7)], seed=1)
    fill(tmp_path / "one", items)
    for rank in range(3):
        fill(tmp_path / "many", items, shard=(rank, 3))
    assert (tmp_path / "many/manifest-2-of-3.jsonl").exists()
    one, many = read_manifest(tmp_path / "one"), read_manifest(tmp_path / "many")
    assert one == many
    assert fill(tmp_path / "many", items) == 0


def test_two_writers_at_once_are_refused(tmp_path: Path) -> None:
    with Manifest(tmp_path, SETTINGS), pytest.raises(ManifestError, match="another process"):
        Manifest(tmp_path, SETTINGS)
    with Manifest(tmp_path, SETTINGS) as manifest:
        assert manifest.rows == {}


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ManifestError, match="cannot write to .*file.*--out"):
        Manifest(tmp_path / "file" / "below", SETTINGS)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ManifestError, match="cannot write"):
            Manifest(tmp_path, SETTINGS)
    finally:
        tmp_path.chmod(0o700)


FULL = textwrap.dedent("""
    import resource, signal, sys
    sys.path.insert(0, {root!r})
    from tests.eval.test_manifest import picture, SETTINGS
    from mediaspec.eval.manifest import FinishedImage, Manifest, ManifestError, make_items
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing beyond the limit then fails as on a full disk
    items = make_items(["a", "b"], seed=0)
    with Manifest({folder!r}, SETTINGS) as manifest:
        manifest.finish([FinishedImage(items[0], picture(items[0]), {{"tokens": 4}})])
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        try:
            manifest.finish([FinishedImage(items[1], picture(items[1], 64000), {{"tokens": 4}})])
        except ManifestError as error:
            print(error)
""")


def test_a_failing_write_keeps_what_was_finished_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code = FULL.format(root=str(ROOT), folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "1 finished pictures are kept" in done.stdout, done.stderr
    assert [row["id"] for row in read_manifest(folder)] == ["000000"]
    assert not list(folder.glob(".*.tmp"))
    assert fill(folder, make_items(["a", "b"], seed=0)) == 1


def test_pictures_without_a_line_are_an_error_for_readers(tmp_path: Path) -> None:
    fill(tmp_path, make_items(["a"], seed=0))
    (tmp_path / "grid.png").write_bytes(b"contact sheet")
    with pytest.raises(ManifestError, match="grid.png"):
        read_manifest(tmp_path)
    assert len(read_manifest(tmp_path, check=False)) == 1


def test_extra_files_count_as_part_of_a_picture(tmp_path: Path) -> None:
    items = make_items(["a", "b"], seed=0)
    fill(tmp_path, items)
    with Manifest(tmp_path, SETTINGS) as manifest:
        todo = manifest.pending(items, "trace/{id}.png")
        assert [item.id for item in todo] == ["000000", "000001"]
        for item in todo:
            manifest.finish([FinishedImage(item, picture(item), {"tokens": 4}, {f"trace/{item.id}.png": b"sheet"})])
    with Manifest(tmp_path, SETTINGS) as manifest:
        assert manifest.pending(items, "trace/{id}.png") == []
    assert [row["id"] for row in read_manifest(tmp_path)] == ["000000", "000001"]
    (tmp_path / "trace/000001.png").unlink()
    with pytest.warns(UserWarning), Manifest(tmp_path, SETTINGS) as manifest:
        assert [item.id for item in manifest.pending(items, "trace/{id}.png")] == ["000001"]


def test_library_versions_are_stored_and_a_change_is_announced(tmp_path: Path) -> None:
    items = make_items(["a", "b"], seed=0)
    fill(tmp_path, items[:1], versions={"torch": "2.9"})
    with pytest.warns(UserWarning, match="other library versions"):
        fill(tmp_path, items, versions={"torch": "2.10"})
    assert [row["versions"]["torch"] for row in read_manifest(tmp_path)] == ["2.9", "2.10"]


def test_lines_hold_no_times(tmp_path: Path) -> None:
    fill(tmp_path, make_items(["a"], seed=0))
    row = json.loads((tmp_path / "manifest.jsonl").read_text())
    assert set(row) == {"id", "index", "prompt", "seed", "file", "sha256", "settings_hash", "versions", "stats"}
