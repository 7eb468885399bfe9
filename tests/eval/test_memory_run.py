"""Evaluation of memories: rows, going on after a stop, missing weights, plots, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mediaspec.cli.eval import app
from mediaspec.eval.memory_plots import memory_table, pareto_front
from mediaspec.eval.memory_rollout import flow_levels, roll_out
from mediaspec.eval.memory_run import (
    MemoryRows,
    evaluate_memories,
    find_trained,
    parse_memories,
    rank_agreement,
    summarise,
)
from mediaspec.eval.worlds import TEST_SEED, WORLDS, make_episode
from mediaspec.models.frame_dit import FrameDiT, FrameDiTConfig
from mediaspec.models.patch_codec import fit_codec


def save_tiny(root: Path, world: str, memory: str, folder: str | None = None, seed: int = 0) -> None:
    torch.manual_seed(seed)
    episode = make_episode(world, next(iter(WORLDS[world].protocols)), 3)
    codec = fit_codec(torch.from_numpy(episode.frames), components=6)
    config = FrameDiTConfig(
        hidden_size=16, memory_size=16, num_hidden_layers=1, num_attention_heads=2, channels=6, memory=memory,
        position=WORLDS[world].position,
    )  # fmt: skip
    model = FrameDiT(config)
    for weight in (model.out.weight, model.blocks[0].mix.weight):  # zero at first, where the past changes nothing
        torch.nn.init.normal_(weight, std=0.1)
    target = root / world / (folder or memory)
    model.save_pretrained(target)
    codec.save(target / "codec.safetensors")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    for memory in ("window", "pack_k2"):
        save_tiny(root, "panoroom", memory)
    save_tiny(root, "panoroom", "window", "window-1", seed=1)
    save_tiny(root, "raymaze", "prepend")
    return root


def test_rows_and_going_on(weights: Path, tmp_path: Path) -> None:
    walk = {"hold": 2, "turn": 10, "dwell": 2, "tail": 1}
    settings = {"steps": 2, "root": weights, "out": tmp_path, "settings": walk}
    measured: list[dict] = []
    first = evaluate_memories("panoroom", "needle", ["window", "pack_k2"], rooms=1, on_row=measured.append, **settings)
    assert len(measured) == 3, "two trainings of window and one of pack_k2"
    rows = {row["memory"]: row for row in first}
    assert rows["window"]["trainings"] == 2 and rows["window"]["memory_tokens"] == 64
    assert (
        rows["pack_k2"]["memory_tokens"] > 64 and rows["pack_k2"]["kv_bytes"] == rows["pack_k2"]["memory_tokens"] * 128
    )
    assert min(row["loss_gap_nats"] for row in first) == 0
    assert all(np.isfinite(row[m]) for row in first for m in ("recall_psnr", "recall_ssim", "drift_db"))
    assert rank_agreement(first) in (-1.0, 1.0)
    # a line cut short by a kill is measured again, all others are kept
    path = tmp_path / "rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:20])
    measured.clear()
    again = evaluate_memories("panoroom", "needle", ["window", "pack_k2"], rooms=1, on_row=measured.append, **settings)
    assert len(measured) == 1
    for a, b in zip(first, again):
        assert a["recall_psnr"] == b["recall_psnr"] and a["denoising_nats"] == b["denoising_nats"]
    with pytest.raises(ValueError, match="was begun with"):
        evaluate_memories("panoroom", "needle", ["window"], rooms=1, steps=3, root=weights, out=tmp_path)
    # rows of other weights under the same name are not taken for these
    one = find_trained("panoroom", "pack_k2", weights)[0]
    store = MemoryRows(path, json.loads(lines[0])["settings"])
    assert store.find(one, TEST_SEED) is not None and store.find(replace(one, digest="other"), TEST_SEED) is None
    path.write_text('{"settings": {"wor')  # killed while the first line was written
    assert MemoryRows(path, {"world": "a"}).rows == [] and MemoryRows(path, {"world": "a"}).rows == []


def test_own_and_real_history_agree_on_the_first_chunk(weights: Path) -> None:
    one = find_trained("panoroom", "window", weights)[0]
    episode = make_episode("panoroom", "needle", TEST_SEED, tail=2)
    made = roll_out(one.model, one.codec, episode, steps=2)
    c = episode.context
    assert (made.own[:c] == episode.frames[:c]).all()
    assert (made.own[c : c + 4] == made.real[c : c + 4]).all()
    assert not (made.own[c + 4 :] == made.real[c + 4 :]).all()
    assert len(made.own) == len(episode), "also where the last chunk is short"
    with pytest.raises(ValueError, match="ask for at least one"):
        roll_out(one.model, one.codec, replace(episode, context=len(episode)))


def test_missing_weights_and_names() -> None:
    with pytest.raises(ValueError, match="train_frame_dit.py --world raymaze --memory cross"):
        find_trained("raymaze", "cross", Path("nowhere"))
    with pytest.raises(ValueError, match="write 'pack_k2'"):
        parse_memories("window,pak_k2")
    with pytest.raises(ValueError, match="different names"):
        parse_memories("full,prepend")
    with pytest.raises(ValueError, match="at least 1 step"):
        flow_levels(0)


def test_command(weights: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runner = CliRunner()
    words = ["memory", "--world", "raymaze", "--protocol", "loop", "--memories", "full", "--rooms", "1", "--steps",
             "2", "--weights", str(weights), "--out", str(tmp_path), "--json"]  # fmt: skip
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout.splitlines()[-1])[0]
    named = ["memory", "recall_psnr", "recall_ssim", "needle_accuracy", "drift_db", "loss_gap_nats", "memory_tokens",
             "kv_bytes", "seconds_per_frame"]  # fmt: skip
    assert list(row)[: len(named)] == named and row["memory"] == "full" and row["wall_accuracy"] is not None
    folder = tmp_path / "raymaze" / "loop"
    assert all((folder / name).read_bytes()[:4] == b"\x89PNG" for name in ("pareto.png", "by_step.png"))
    for bad, told in ((["--memories", "cross"], "train it with"), (["--protocol", "needle"], "no protocol"),
                      (["--world", "maze"], "raymaze")):  # fmt: skip
        failed = runner.invoke(app, [*words[:-1], *bad])
        assert failed.exit_code == 2 and told in failed.output


def test_frontier_and_table() -> None:
    def row(memory: str, psnr: float, drift: float, seconds: float) -> dict:
        return {"memory": memory, "recall_psnr": psnr, "drift_db": drift, "seconds_per_frame": seconds,
                "memory_tokens": 1, "kv_bytes": 1024}  # fmt: skip

    rows = [row("a", 20, 1, 1), row("b", 25, 1, 1), row("c", 24, 0.5, 1), row("d", 19, 1, 0.5)]
    assert pareto_front(rows) == ["b", "c", "d"]
    assert "`b` *" in memory_table(rows) and "`a` |" in memory_table(rows)


def test_summary_of_rooms_without_recall() -> None:
    row = {"memory": "window", "training": 0, "room": 1, "memory_tokens": 1, "kv_bytes": 1, "kept_bytes": 1,
           "seconds_per_frame": 1.0, "drift_db": 0.0, "own_by_step": [1.0], "real_by_step": [1.0]}  # fmt: skip
    line = summarise([row])[0]
    assert line["recall_psnr"] is None and line["loss_gap_nats"] is None and line["drift_db"] == 0.0
