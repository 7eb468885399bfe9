"""The sweep over histories, the frontier and the bench of memories: tiny models, and rows with known answers."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "arvdm"))

import bench_memory
import frontier
import history_sweep

from mediaspec.eval.memory_plots import plot_frontier, plot_history_sweep
from mediaspec.eval.memory_rollout import denoising_nats, roll_out
from mediaspec.eval.memory_run import find_trained
from mediaspec.eval.worlds import TEST_SEED, make_episode, recall_frames
from mediaspec.models.frame_dit import FrameDiT, FrameDiTConfig
from tests.eval.tiny_worlds import save_tiny

PNG = b"\x89PNG"
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    for memory in ("window", "prepend"):
        save_tiny(root, "panoroom", memory)
    save_tiny(root, "panoroom", "prepend", "prepend-1", seed=1)
    return root


def test_all_of_the_history_is_the_evaluations_real_history(weights: Path) -> None:
    one = find_trained("panoroom", "prepend", weights)[0]
    episode = make_episode("panoroom", "needle", TEST_SEED)
    asked = recall_frames(episode, 8)
    row = history_sweep.sweep_room(one, episode, (1, 4, 64, 0), steps=2, points=3)
    assert row is not None
    real = roll_out(one.model, one.codec, episode, steps=2).real
    want = history_sweep.psnr_rows(real[asked], episode.frames[asked]).mean()
    assert row["recall_psnr"][-1] == pytest.approx(want, abs=1e-4)
    nats = denoising_nats(one.model, one.codec, episode, asked, points=3)
    assert row["denoising_nats"][-1] == pytest.approx(nats, rel=1e-5)
    # 64 is all of 33 to 52 frames; 1 frame is 16 tokens
    assert row["recall_psnr"][2] == row["recall_psnr"][3] and row["recall_psnr"][0] != row["recall_psnr"][1]
    assert row["memory_tokens"][0] == 16 and row["memory_tokens"][1] == 64
    assert len(row["needle_accuracy"]) == 4
    # the windowed model reads 4 frames, whatever it is shown
    flat = history_sweep.sweep_room(find_trained("panoroom", "window", weights)[0], episode, (4, 16, 0), steps=2)
    assert flat is not None and np.ptp(flat["recall_psnr"]) < 1e-4 and np.ptp(flat["memory_tokens"]) == 0


def test_a_batch_sweeps_as_its_rooms_do(weights: Path) -> None:
    one = find_trained("panoroom", "prepend", weights)[0]
    rooms = [make_episode("panoroom", "needle", TEST_SEED + i, hold=2, turn=10, dwell=2, tail=i) for i in (1, 1, 2)]
    rooms = [rooms[0], replace(rooms[1], seed=7), replace(rooms[1], horizon=0 * rooms[1].horizon)]
    # the second asks for its last frames only, the third for nothing
    rooms[1] = replace(rooms[1], horizon=np.where(np.arange(len(rooms[1])) < 21, 0, rooms[1].horizon))
    together = history_sweep.sweep_rooms(one, rooms, (2, 0), steps=2, points=3)
    assert [row["room"] for row in together] == [rooms[0].seed, 7]
    for row, room in zip(together, rooms):
        alone = history_sweep.sweep_room(one, room, (2, 0), steps=2, points=3)
        assert alone is not None and alone.keys() == row.keys()
        assert row["memory_tokens"] == alone["memory_tokens"] and row["recall_frames"] == alone["recall_frames"]
        assert row["recall_psnr"] == pytest.approx(alone["recall_psnr"], abs=1e-3)
        assert row["denoising_nats"] == pytest.approx(alone["denoising_nats"], rel=1e-3)
    assert together[0]["recall_frames"] > together[1]["recall_frames"] > 0
    assert history_sweep.sweep_room(one, rooms[2], (2, 0)) is None


@needs_matplotlib
def test_sweep_goes_on_and_draws(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["history_sweep.py", "--weights", str(weights), "--protocols", "needle", "--memories", "full,window",
             "--histories", "2,8,0", "--steps", "1", "--points", "2", "--out", str(tmp_path), "--rooms", "2",
             "--batch", "2", "--threads", str(torch.get_num_threads())]  # fmt: skip
    monkeypatch.setattr(sys, "argv", words)
    history_sweep.main()
    first = capsys.readouterr().out
    path = tmp_path / "panoroom" / "needle" / "sweep.jsonl"
    assert len(path.read_text().splitlines()) == 1 + 6, "two trainings of prepend, one of window"
    history_sweep.main()
    assert len(path.read_text().splitlines()) == 7 and capsys.readouterr().out == first
    result = json.loads(first.splitlines()[-1])["protocols"]["needle"]
    assert [(row["memory"], row["history"]) for row in result["rows"]] == [
        (memory, h) for memory in ("prepend", "window") for h in (2, 8, 0)
    ]
    assert result["rows"][0]["trainings"] == 2 and any("window, recall PSNR" in line for line in result["verdicts"])
    assert (tmp_path / "panoroom" / "history_sweep.png").read_bytes()[:4] == PNG
    for bad in ("8,2,0", "0,4", "4"):
        monkeypatch.setattr(sys, "argv", ["history_sweep.py", "--histories", bad])
        with pytest.raises(SystemExit):
            history_sweep.main()


def test_verdicts_on_known_curves() -> None:
    rng = np.random.default_rng(0)

    def rows(memory: str, means: list[float]) -> list[dict]:
        base = rng.normal(0, 5, 30)  # rooms differ far more than histories do: steps must be paired
        return [
            {"memory": memory, "training": 0, "room": room, "memory_tokens": [1, 2, 3],
             "recall_psnr": [float(base[room] + m + 0.1 * rng.normal()) for m in means],
             "denoising_nats": [float(base[room] - m + 0.1 * rng.normal()) for m in means]}
            for room in range(30)
        ]  # fmt: skip

    found = [*rows("good", [20, 22, 24]), *rows("flat", [20, 20, 20]), *rows("bad", [20, 22, 21])]
    lines = history_sweep.summarise_sweep(found, (1, 4, 0))
    said = {line.split(":")[0]: line for line in history_sweep.verdicts(lines)}
    for metric in ("recall PSNR, dB", "denoising error, nats"):
        assert "better in 2 of 2 steps" in said[f"good, {metric}"]
        assert "NOT monotone, worse at 4 -> all" in said[f"bad, {metric}"]
        assert "monotone within the intervals" in said[f"flat, {metric}"] and "NOT" not in said[f"flat, {metric}"]
    assert "needle_accuracy" not in lines[0] and lines[0]["history"] == 1
    assert lines[1]["recall_psnr"]["step"]["mean"] == pytest.approx(2, abs=0.1)
    assert "| `bad` | all | 3 |" in history_sweep.sweep_table(lines)


def write_rows(folder: Path, forgot: dict[str, float], drift: dict[str, float], **settings: object) -> None:
    """Rows of two memories in ten rooms with given forgetting and drift."""
    rng = np.random.default_rng(1)
    told = {"world": "panoroom", "protocol": "needle", "steps": 10, "seed": 0, "nats": True, **settings}
    lines: list[dict] = [{"settings": told}]
    rooms = 5 * np.random.default_rng(2).random(10)
    for memory in forgot:
        for room, base in enumerate(rooms.tolist()):
            lines.append(
                {"memory": memory, "training": 0, "weights": "new", "room": room, "memory_tokens": 64,
                 "kv_bytes": 1024, "ceiling_psnr": 35 + base, "real_recall_psnr": 35 + base - forgot[memory],
                 "recall_psnr": 20.0, "drift_db": drift[memory] + 0.01 * rng.normal(),
                 "denoising_nats": 100 * base + 10 * forgot[memory]}
            )  # fmt: skip
    lines.insert(1, {**lines[1], "weights": "old", "real_recall_psnr": -1000.0})
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "rows.jsonl").write_text(text + '{"memory": "cut sh')


def test_frontier_of_known_points(tmp_path: Path) -> None:
    write_rows(tmp_path / "plain", {"a": 10, "b": 2}, {"a": 1, "b": 3})
    write_rows(tmp_path / "noise", {"a": 11, "b": 4}, {"a": 1.5, "b": 2}, history_noise=0.1)
    write_rows(tmp_path / "keep", {"a": 10, "b": 5}, {"a": 1, "b": 3}, keep=8)
    groups = frontier.read_rows([tmp_path, tmp_path / "plain"])["panoroom needle"]
    points = {(p["memory"], p["setting"]): p for p in frontier.frontier_points(groups)}
    assert len(points) == 6 and points["b", "noise 0.1"]["forgetting"]["mean"] == pytest.approx(4)
    assert points["a", "all, clean"]["rooms"] == 10, "rooms read twice count once, old weights not at all"
    front = {key for key, point in points.items() if point["front"]}
    assert {("b", "all, clean"), ("b", "noise 0.1")} < front and ("a", "noise 0.1") not in front
    assert ("b", "keep 8") not in front
    assert frontier.agreement(list(points.values())) == -1.0
    steps = {(s["memory"], s["knob"]): s for s in frontier.knob_steps(groups)}
    turned = steps["b", "noise"]
    assert (turned["old"], turned["new"]) == ("all, clean", "noise 0.1")
    assert (turned["forgetting"]["verdict"], turned["drift"]["verdict"]) == ("rises", "falls")
    assert steps["b", "keep"]["forgetting"]["mean"] == pytest.approx(3)
    nats = {(p["memory"], p["setting"]): p for p in frontier.frontier_points(groups, "nats")}
    assert nats["b", "all, clean"]["forgetting"]["mean"] == pytest.approx(0)
    assert nats["a", "all, clean"]["forgetting"]["mean"] == pytest.approx(80)
    table = frontier.frontier_table(list(points.values()), "db", "drift_db")
    assert "| `b` * | all, clean | 2.00 (2.00 - 2.00) |" in table
    write_rows(tmp_path / "other", {"a": 1}, {"a": 1}, steps=4)
    with pytest.raises(ValueError, match="keep one"):
        frontier.read_rows([tmp_path])
    with pytest.raises(ValueError, match="no rows.jsonl"):
        frontier.read_rows([tmp_path / "nothing"])


@needs_matplotlib
def test_frontier_measures_what_is_missing(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["frontier.py", "--weights", str(weights), "--protocols", "needle", "--memories", "full", "--noise",
             "0,0.1", "--keep", "8", "--rooms", "1", "--steps", "1", "--no-nats", "--out", str(tmp_path),
             "--batch", "3", "--threads", str(torch.get_num_threads())]  # fmt: skip
    monkeypatch.setattr(sys, "argv", words)
    frontier.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    points = result["protocols"]["panoroom needle"]["points"]
    assert [p["setting"] for p in points] == ["keep 8", "noise 0.1", "all, clean"]
    assert all(p["trainings"] == 2 for p in points)
    assert len({p["forgetting"]["mean"] for p in points}) == 3, "every knob changes what is recalled"
    assert (tmp_path / "frontier.png").read_bytes()[:4] == PNG and (tmp_path / "frontier.md").exists()


@needs_matplotlib
def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_history_sweep({"needle": []})
    with pytest.raises(ValueError, match="no points"):
        plot_frontier({"needle": []}, "a", "b")


def test_bench_of_memories() -> None:
    models = {
        name: FrameDiT(
            FrameDiTConfig(hidden_size=16, memory_size=16, num_hidden_layers=1, num_attention_heads=2, channels=6,
                           memory=name, memory_limit=16 if name == "pack_k2" else 0)
        ).eval()
        for name in ("window", "pack_k2", "prepend")
    }  # fmt: skip
    rows = {(r["memory"], r["history"]): r for r in bench_memory.bench(models, (28, 112), calls=1, repeats=3)}
    assert rows["window", 112]["memory_tokens"] == 64 and rows["prepend", 112]["memory_tokens"] == 112 * 16
    assert rows["pack_k2", 28]["memory_tokens"] == 64 + 12 * 4
    assert rows["pack_k2", 112]["memory_tokens"] == 64 + 16 * 4, "the limit holds"
    assert rows["window", 28]["ratio"] == 1.0 and rows["prepend", 28]["ratio"] > 0
    assert rows["prepend", 112]["kv_bytes"] == 2 * 112 * 16 * 16 * 4
    assert set(bench_memory.growth(list(rows.values()), 28, 112)) == set(models)
    assert "| `pack_k2` | 112 |" in bench_memory.bench_table(list(rows.values())) and "1/14.0" in (
        bench_memory.bench_table(list(rows.values()))
    )
    step = bench_memory.Step(models["pack_k2"], 28, 1)
    step.seconds()
    step.seconds()
    assert step.cache.frames == 32, "every timed step starts from the same history"
    with pytest.raises(ValueError, match="at least one"):
        bench_memory.bench(models, (), repeats=1)
