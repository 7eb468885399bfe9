"""Evaluation of memories: rows, going on after a stop, missing weights, plots, the command."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from mediaspec.cli.eval import app
from mediaspec.eval.memory_plots import memory_table, pareto_front
from mediaspec.eval.memory_rollout import (
    batch_history,
    chunk_nats,
    denoising_nats,
    denoising_nats_batch,
    episode_history,
    flow_levels,
    group_rooms,
    part,
    roll_out,
    roll_out_batch,
    room_noise,
    time_frames,
)
from mediaspec.eval.memory_run import (
    MemoryRows,
    evaluate_memories,
    evaluate_rooms,
    find_trained,
    parse_memories,
    rank_agreement,
    summarise,
)
from mediaspec.eval.memory_sheet import revisit_frame
from mediaspec.eval.rollout_noise import normal_rows
from mediaspec.eval.shown_history import ShownHistory
from mediaspec.eval.worlds import TEST_SEED, make_episode, recall_frames
from mediaspec.models.frame_cache import FrameCache
from mediaspec.models.frame_dit import FrameDiT, FrameDiTConfig, History
from mediaspec.models.patch_codec import PatchCodec

from .tiny_worlds import save_tiny


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    for memory in ("window", "pack_k2", "retrieve"):
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
    assert {row["rank_agreement"] for row in first} == {rank_agreement(first)}
    assert all(row["ceiling_psnr"] > row["real_recall_psnr"] for row in first)
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
    assert MemoryRows(path, {"world": "b"}).rows == [], "nothing was measured with the other settings"
    assert json.loads(path.read_text().splitlines()[0])["settings"] == {"world": "b"}


WALK = {"hold": 2, "turn": 10, "dwell": 2, "tail": 1}


def test_rooms_of_a_batch_come_out_as_alone(weights: Path) -> None:
    rooms = [make_episode("panoroom", "needle", TEST_SEED + i, **WALK) for i in range(3)]
    assert {tuple(room.actions) for room in rooms} > {tuple(rooms[0].actions)}, "rooms turn to both sides"
    asked = [recall_frames(room, 8) for room in rooms]
    asked[1] = asked[1] & (np.arange(len(rooms[1])) < len(rooms[1]) - 2)  # rooms may ask for different frames
    calls: list[int] = []
    for memory, knobs in (("window", {}), ("retrieve", {"history_noise": 0.1}), ("pack_k2", {"keep": 6})):
        one = find_trained("panoroom", memory, weights)[0]
        calls.clear()
        handle = one.model.register_forward_hook(lambda model, given, made: calls.append(len(made)))
        together = roll_out_batch(one.model, one.codec, rooms, steps=2, **knobs)
        assert calls == [3] * len(calls), "every call serves all rooms"
        count = len(calls)
        for room, made in zip(rooms, together):
            calls.clear()
            alone = roll_out(one.model, one.codec, room, steps=2, **knobs)
            assert len(calls) == count
            np.testing.assert_allclose(made.own, alone.own, atol=1e-4, rtol=0)
            np.testing.assert_allclose(made.real, alone.real, atol=1e-4, rtol=0)
            costs = ("memory_tokens", "attended_tokens", "read_bytes", "kept_bytes")
            assert [getattr(made, c) for c in costs] == [getattr(alone, c) for c in costs], "costs are of one room"
            assert made.seconds_per_frame is None and alone.seconds_per_frame > 0
        handle.remove()
        assert not np.allclose(together[0].own, together[2].own, atol=1e-2)
        nats = denoising_nats_batch(one.model, one.codec, rooms, asked, points=3, **knobs)
        for room, which, found in zip(rooms, asked, nats):
            alone = denoising_nats(one.model, one.codec, room, which, points=3, **knobs)
            assert found == pytest.approx(alone, rel=1e-3)
        assert len(set(nats)) == 3
    calls.clear()
    handle = one.model.register_forward_hook(lambda model, given, made: calls.append(len(made)))
    rows = evaluate_rooms(one, rooms, steps=2, nats=False, seconds_per_frame=0.25)
    assert set(calls) == {3} and [row["seconds_per_frame"] for row in rows] == [0.25] * 3
    calls.clear()
    assert time_frames(one.model, one.codec, rooms[0], steps=2, chunks=2) > 0 and calls == [1] * 4
    timed = evaluate_rooms(one, rooms, steps=2, nats=False)
    assert calls.count(1) > 4 and timed[0]["seconds_per_frame"] == timed[2]["seconds_per_frame"] > 0
    assert [row["room"] for row in timed] == [room.seed for room in rooms]
    handle.remove()


def test_nats_of_a_chunk_by_row(weights: Path) -> None:
    one = find_trained("panoroom", "window", weights)[0]
    rooms = [make_episode("panoroom", "needle", TEST_SEED + i, **WALK) for i in range(2)]
    truth = part(batch_history(one.codec, rooms), 20, 24)

    def nats(rows: slice) -> np.ndarray:
        cache = FrameCache(one.model)
        cache.write(part(History(*(v[rows] for v in vars(batch_history(one.codec, rooms)).values())), 0, 20))
        noise = [room_noise(0, room, 20) for room in rooms[rows]]
        poses = truth.poses[rows]
        return chunk_nats(one.model, cache.read(poses), truth.latents[rows], poses, truth.actions[rows], noise, 3)

    both = nats(slice(0, 2))
    assert both.shape == (2, 4)
    np.testing.assert_allclose(both, np.concatenate([nats(slice(0, 1)), nats(slice(1, 2))]), rtol=1e-3)
    with pytest.raises(ValueError, match="2 generators for 3 rows"):
        normal_rows((3, 4), [torch.Generator(), torch.Generator()])


def test_groups_of_rooms() -> None:
    short, long = ([make_episode("panoroom", "palindrome", TEST_SEED + i, frames=n) for i in range(3)] for n in (4, 5))
    mixed = [short[0], long[0], short[1], long[1], short[2], long[2]]
    place = {id(one): number for number, one in enumerate(mixed)}
    groups = [[place[id(one)] for one in group] for group in group_rooms(mixed, 2)]
    assert groups == [[0, 2], [1, 3], [4], [5]], "full groups at once, the rest at the end"
    seen: list[int] = []
    first = next(group_rooms((seen.append(one.seed) or one for one in short), 2))
    assert first == short[:2] and len(seen) == 2, "no room is made before it is needed"
    for bad in ([short[0], long[0]], [short[0], replace(short[1], context=3)], []):
        with pytest.raises(ValueError, match="one length and context"):
            batch_history(PatchCodec(components=6), bad)
    with pytest.raises(ValueError, match="batch=0"):
        next(group_rooms(short, 0))


def test_a_batch_fills_up_what_is_missing(weights: Path, tmp_path: Path) -> None:
    settings = {"steps": 1, "root": weights, "settings": WALK, "nats": False}
    evaluate_memories("panoroom", "needle", ["pack_k2"], rooms=1, out=tmp_path / "a", **settings)
    measured: list[dict] = []
    got = evaluate_memories(
        "panoroom", "needle", ["pack_k2", "window"], rooms=3, out=tmp_path / "a", batch=2, on_row=measured.append,
        **settings,
    )  # fmt: skip
    places = [(row["memory"], row["training"], row["room"] - TEST_SEED) for row in measured]
    assert places == [("pack_k2", 0, 1), ("window", 0, 0), ("window", 0, 1), ("window", 1, 0), ("window", 1, 1),
                      ("pack_k2", 0, 2), ("window", 0, 2), ("window", 1, 2)]  # fmt: skip
    of_window = {row["seconds_per_frame"] for row in measured if row["memory"] == "window" and not row["training"]}
    assert len(of_window) == 1, "measured once"
    a, b = got[0], evaluate_memories("panoroom", "needle", ["pack_k2"], rooms=3, batch=1, **settings)[0]
    assert a["memory"] == b["memory"] and a["rooms"] == b["rooms"] == 3
    for metric in ("recall_psnr", "recall_ssim", "drift_db", "own_psnr", "real_recall_psnr", "ceiling_psnr"):
        assert a[metric] == pytest.approx(b[metric], abs=1e-3)
    for metric in ("memory_tokens", "attended_tokens", "kv_bytes", "kept_bytes"):
        assert a[metric] == b[metric]
    with pytest.raises(ValueError, match="batch=0"):
        evaluate_memories("panoroom", "needle", ["window"], rooms=1, batch=0, **settings)


def test_unpacked_tokens_are_attended_to() -> None:
    model = FrameDiT(
        FrameDiTConfig(hidden_size=16, memory_size=16, num_hidden_layers=1, num_attention_heads=2, channels=6,
                       memory="pack_k2", packed_size=24)
    ).eval()  # fmt: skip
    episode = make_episode("panoroom", "needle", TEST_SEED, **WALK)
    made = roll_out(model, PatchCodec(components=6), episode, steps=1, real=False)
    # the last step follows 23 frames: 5 recent ones of 16 tokens, and 9 pairs of 4 tokens, unpacked to 32
    assert made.memory_tokens == 5 * 16 + 9 * 4 and made.attended_tokens == 5 * 16 + 9 * 32
    assert made.read_bytes == made.attended_tokens * 128


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


def test_knobs_of_the_history(weights: Path) -> None:
    one = find_trained("raymaze", "prepend", weights)[0]
    episode = make_episode("raymaze", "loop", TEST_SEED)
    truth, start = episode_history(one.codec, episode), episode.context
    poses, draw = truth.poses[:, start : start + 4], lambda first: room_noise(3, episode, -1 - first)

    def shown(noise: float = 0.0, keep: int | None = None) -> ShownHistory:
        history = ShownHistory(one.model, noise=noise, keep=keep, draw=draw)
        for first, stop in ((0, start - 3), (start - 3, start)):
            history.write(part(truth, first, stop))
        return history

    def keys(memory: object) -> torch.Tensor:
        return memory.recent.keys  # type: ignore[attr-defined]

    plain = FrameCache(one.model)
    plain.write(part(truth, 0, start))
    assert torch.equal(keys(shown().read(poses)), keys(plain.read(poses))), "no knob: the cache itself"
    torch.testing.assert_close(keys(shown(keep=1000).read(poses)), keys(plain.read(poses)))
    newest = FrameCache(one.model)
    newest.write(part(truth, start - 7, start))
    torch.testing.assert_close(keys(shown(keep=7).read(poses)), keys(newest.read(poses)))
    # noise is put on once, told, and the same whenever the room is walked again
    noisy = part(truth, 0, start).latents.clone()
    for first, stop in ((0, start - 3), (start - 3, start)):
        normal = torch.randn(noisy[:, first:stop].shape, generator=draw(first))
        noisy[:, first:stop] = 0.9 * noisy[:, first:stop] + 0.1 * normal
    told = FrameCache(one.model)
    told.write(History(noisy, truth.poses[:, :start], truth.actions[:, :start], torch.full((1, start), 0.1)))
    torch.testing.assert_close(keys(shown(noise=0.1).read(poses)), keys(told.read(poses)))
    own = [roll_out(one.model, one.codec, episode, steps=2, real=False, **knob).own for knob in
           ({}, {"history_noise": 0.0, "keep": None}, {"history_noise": 0.1}, {"keep": 4})]  # fmt: skip
    assert (own[0] == own[1]).all() and not (own[0] == own[2]).all() and not (own[0] == own[3]).all()
    asked = recall_frames(episode, 8)
    nats = [denoising_nats(one.model, one.codec, episode, asked, points=3, keep=keep) for keep in (None, 1000, 4)]
    assert nats[0] == pytest.approx(nats[1], rel=1e-5) and nats[0] != pytest.approx(nats[2], rel=1e-5)
    for bad, said in (({"noise": 1.0}, "below 1"), ({"keep": 0}, "1 frame or more"), ({"noise": 0.1}, "draw=")):
        with pytest.raises(ValueError, match=said):
            ShownHistory(one.model, **bad)


def test_the_revisit_that_is_shown_has_the_needle() -> None:
    episode = make_episode("panoroom", "needle", TEST_SEED)
    at = revisit_frame(episode, 8)
    assert at in episode.needles and recall_frames(episode, 8)[at]
    assert revisit_frame(episode, len(episode)) is None


def test_missing_weights_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="train_frame_dit.py --world raymaze --memory cross"):
        find_trained("raymaze", "cross", Path("nowhere"))
    monkeypatch.setitem(sys.modules, "vizdoom", None)
    with pytest.raises(ValueError, match=r"pip install 'mediaspec\[worlds\]'.*no trained model"):
        find_trained("vizdoom", "window", Path("nowhere"))
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
    assert Image.open(folder / "sheet.png").width > 2 * 128, "the truth and one memory"
    assert json.loads((folder / "result.json").read_text())[0]["rank_agreement"] is None, "one memory has no rank"
    turned = runner.invoke(app, [*words, "--no-plots", "--keep", "8", "--history-noise", "0.1"])
    assert turned.exit_code == 2 and "was begun with" in turned.output, "rows of other knobs are not mixed"
    for bad, told in ((["--memories", "cross"], "train it with"), (["--protocol", "needle"], "no protocol"),
                      (["--world", "maze"], "raymaze")):  # fmt: skip
        failed = runner.invoke(app, [*words[:-1], *bad])
        assert failed.exit_code == 2 and told in failed.output


def test_frontier_and_table() -> None:
    def row(memory: str, psnr: float, drift: float, seconds: float) -> dict:
        return {"memory": memory, "recall_psnr": psnr, "drift_db": drift, "seconds_per_frame": seconds,
                "memory_tokens": 1, "attended_tokens": 7, "kv_bytes": 1024}  # fmt: skip

    rows = [row("a", 20, 1, 1), row("b", 25, 1, 1), row("c", 24, 0.5, 1), row("d", 19, 1, 0.5)]
    assert pareto_front(rows) == ["b", "c", "d"]
    assert "`b` *" in memory_table(rows) and "`a` |" in memory_table(rows)
    assert "| 1 | 7 | 1 |" in memory_table(rows)


def test_summary_of_rooms_without_recall() -> None:
    row = {"memory": "window", "training": 0, "room": 1, "memory_tokens": 1, "kv_bytes": 1, "kept_bytes": 1,
           "seconds_per_frame": 1.0, "drift_db": 0.0, "own_by_step": [1.0], "real_by_step": [1.0]}  # fmt: skip
    line = summarise([row])[0]
    assert line["attended_tokens"] == 1, "rows of older runs do not tell it"
    assert line["recall_psnr"] is None and line["loss_gap_nats"] is None and line["drift_db"] == 0.0


def test_wrong_options_are_told_before_models_are_loaded(tmp_path: Path) -> None:
    words = ["memory", "--weights", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    protocol = CliRunner().invoke(app, [*words, "--protocol", "loop"])
    assert protocol.exit_code == 2 and "panoroom has no protocol 'loop'" in protocol.output
    threads = CliRunner().invoke(app, [*words, "--threads", "0"])
    assert threads.exit_code == 2 and "--threads 0; write 1 or more" in threads.output
    shown = CliRunner().invoke(app, ["memory", "--help"], terminal_width=200)
    assert "extra `worlds`" in " ".join(shown.output.split())
