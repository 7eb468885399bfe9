"""Training of the frame models: batches, one step per memory, going on where it stopped, export."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "arvdm"))

import batches as arvdm_batches
from ship_models import export
from train_all import trained
from train_frame_dit import (
    Plan,
    batch_loss,
    begin_with,
    fit_block_codec,
    new_model,
    train,
    unpacking_loss,
)

from mediaspec.eval.worlds import PanoRoom
from mediaspec.models.frame_dit import FrameDiT
from mediaspec.models.frame_history import MEMORIES
from mediaspec.models.patch_codec import PatchCodec


@pytest.fixture(scope="module")
def codec() -> PatchCodec:
    return arvdm_batches.new_codec("panoroom", components=12, episodes=60)


def test_room_batches_are_what_a_camera_sees(codec: PatchCodec) -> None:
    source = arvdm_batches.PanoBatches(codec, 3)
    for number in range(4):
        one, again = source.batch(number, 3), arvdm_batches.PanoBatches(codec, 3).batch(number, 3)
        assert torch.equal(one.latents, again.latents) and torch.equal(one.past.latents, again.past.latents)
        rng = np.random.default_rng([3, 10, number])
        _, width, first = arvdm_batches.pano_walk(rng)
        seeds = rng.integers(0, source.rooms, 3)
        assert one.past.frames == first and one.latents.shape == (3, 4, 12, 8, 8)
        for row in range(3):
            room = PanoRoom(int(seeds[row]), width)
            view = torch.from_numpy(room.frame(int(one.poses[row, 2, 0]))).float()[None]
            torch.testing.assert_close(codec.encode(view)[0], one.latents[row, 2], rtol=1e-4, atol=1e-4)
        turned = one.poses[:, 1:, 0] - one.poses[:, :-1, 0]
        turned = (turned + width / 2) % width - width / 2
        assert torch.equal(turned / 8 + 1, one.actions[:, 1:].float())


def test_maze_batches_repeat_after_a_restart() -> None:
    codec = arvdm_batches.new_codec("raymaze", components=12, episodes=20)

    def source() -> arvdm_batches.ClipBatches:
        return arvdm_batches.ClipBatches(codec, 1, lambda seed: arvdm_batches.maze_clip(seed, 90), size=3, most=40)

    running = source()
    rows = [running.batch(number, 2) for number in range(6)]
    restarted = source().batch(5, 2)
    assert torch.equal(rows[5].latents, restarted.latents) and torch.equal(rows[5].past.poses, restarted.past.poses)
    assert rows[0].poses.shape == (2, 4, 3)


def test_trainings_share_no_clip() -> None:
    seeds = [{arvdm_batches.clip_seed(training, number) for number in range(600)} for training in range(3)]
    assert len(set.union(*seeds)) == 1800, "no clip comes twice, in one training or in two"
    assert arvdm_batches.clip_seed(1, 2) == arvdm_batches.clip_seed(1, 2) != arvdm_batches.clip_seed(2, 1)
    used: list[int] = []

    def make(seed: int) -> arvdm_batches.Clip:
        used.append(seed)
        return arvdm_batches.maze_clip(seed, 50)

    codec = arvdm_batches.new_codec("raymaze", components=4, episodes=20)
    arvdm_batches.ClipBatches(codec, 2, make, size=2, most=30).batch(0, 6)
    assert set(used) == {arvdm_batches.clip_seed(2, number) for number in range(2)}


@pytest.mark.parametrize("memory", MEMORIES)
def test_one_step_reaches_every_weight(memory: str, codec: PatchCodec) -> None:
    plan = Plan("panoroom", memory, steps=1, hidden_size=16, layers=2, packed_size=0 if memory == "pack_k4" else 48)
    model = new_model(plan, codec)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    source = arvdm_batches.PanoBatches(codec, 0)
    number = next(n for n in range(50) if source.batch(n, 1).past.frames > 16)
    batch = source.batch(number, 2)
    for step in range(6):  # outputs begin at zero, so gradients travel one layer further with each step
        loss = batch_loss(model, batch, np.random.default_rng(2), torch.Generator().manual_seed(step))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    missing = [
        name for name, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()
        or float(p.grad.abs().max()) == 0
    ]  # fmt: skip
    assert not missing


def test_training_goes_on_where_it_stopped(tmp_path: Path, codec: PatchCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(
        "panoroom", "pack_k2", steps=6, batch=2, hidden_size=16, layers=2, packed_size=48, watch_minutes=1e9
    )
    monkeypatch.setattr("train_frame_dit.watch", lambda *_: {"recall_psnr": 0.0})
    for run in ("whole", "parts"):
        codec.save(tmp_path / run / "panoroom" / "codec.safetensors")
    train(plan, tmp_path / "whole")

    class Stop(Exception):
        pass

    real = arvdm_batches.PanoBatches.batch

    def stopping(self: arvdm_batches.PanoBatches, number: int, size: int) -> arvdm_batches.Batch:
        if number == 3:
            raise Stop
        return real(self, number, size)

    # minutes run fast enough that every step is saved
    clock = iter(range(0, 10**9, 180))
    monkeypatch.setattr("train_frame_dit.time.monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(arvdm_batches.PanoBatches, "batch", stopping)
    with pytest.raises(Stop):
        train(plan, tmp_path / "parts")
    monkeypatch.setattr(arvdm_batches.PanoBatches, "batch", real)
    train(plan, tmp_path / "parts")
    states = [
        torch.load(tmp_path / run / "panoroom" / "pack_k2" / "checkpoint.pt", weights_only=True)
        for run in ("whole", "parts")
    ]
    assert states[0]["step"] == states[1]["step"] == 6
    for part in ("model", "average"):
        assert all(torch.equal(states[0][part][name], states[1][part][name]) for name in states[0][part])
    with pytest.raises(ValueError, match="was trained with"):
        train(replace(plan, lr=1.0), tmp_path / "parts")
    folder = tmp_path / "parts" / "panoroom" / "pack_k2"
    assert trained(folder) == states[1]["minutes"] > 0 and trained(tmp_path) == 0
    with (folder / "log.jsonl").open("a") as file:  # a kill after a line of the log, before its checkpoint
        file.write('{"minutes": 1e9}\n')
    assert trained(folder) == states[1]["minutes"]
    size = export(tmp_path / "parts", "panoroom", "pack_k2", tmp_path / "package", tmp_path / "logs")
    assert size > 1000 and (tmp_path / "logs" / "panoroom" / "pack_k2.jsonl").exists()
    loaded = FrameDiT.from_pretrained(tmp_path / "package" / "panoroom" / "pack_k2", dtype=torch.float32)
    want = states[1]["average"]["embed.weight"].half().float()
    assert loaded.embed.weight.dtype == torch.float32 and torch.equal(loaded.embed.weight, want)
    with pytest.raises(ValueError, match="train it with"):
        export(tmp_path / "parts", "panoroom", "cross", tmp_path / "package", tmp_path / "logs")


def test_a_training_begins_with_another_models_weights(tmp_path: Path, codec: PatchCodec) -> None:
    torch.manual_seed(1)
    whole = new_model(Plan("panoroom", "retrieve", steps=1, hidden_size=16, layers=2, seed=5), codec)
    whole.save_pretrained(tmp_path / "retrieve")
    model = new_model(Plan("panoroom", "pack_k2", steps=1, hidden_size=16, layers=2, packed_size=48), codec)
    left = begin_with(model, str(tmp_path / "retrieve"))
    assert left and all(name.startswith("block_codec.") for name in left)
    assert torch.equal(model.past_embed.weight, whole.past_embed.weight)
    with pytest.raises(ValueError, match="no folder"):
        begin_with(model, str(tmp_path / "nothing"))
    new_model(Plan("panoroom", "window", steps=1, hidden_size=32, layers=2), codec).save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match="its sizes differ"):
        begin_with(model, str(tmp_path / "wide"))


def test_a_fitted_block_codec_leaves_less_than_a_random_one(codec: PatchCodec) -> None:
    model = new_model(Plan("panoroom", "pack_k2", steps=1, hidden_size=16, layers=2, packed_size=48), codec)
    source = arvdm_batches.PanoBatches(codec, 0)
    past = next(source.batch(n, 4).past for n in range(50) if source.batch(n, 1).past.frames > 16)
    before = unpacking_loss(model, past, np.random.default_rng(0), 4)
    fit_block_codec(model, source, 0)
    after = unpacking_loss(model, past, np.random.default_rng(0), 4)
    assert before is not None and after is not None and float(after) < 0.3 < 0.8 < float(before)
