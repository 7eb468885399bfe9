"""The frame transformer: shapes, what it may look at, packing, the cache, saving; and the patch codec."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mediaspec.models.frame_cache import FrameCache
from mediaspec.models.frame_dit import FrameDiT, FrameDiTConfig, History
from mediaspec.models.frame_history import MEMORIES, nearest_frames, plan_reading
from mediaspec.models.frame_positions import centre_pose, motion_features, pose_distance, position_features
from mediaspec.models.patch_codec import PatchCodec, fit_codec, from_patches, to_patches


def tiny(memory: str, position: str = "column", **settings: int) -> FrameDiT:
    torch.manual_seed(0)
    config = FrameDiTConfig(
        hidden_size=32, memory_size=24, num_hidden_layers=2, num_attention_heads=2, channels=6, memory=memory,
        position=position, **settings,
    )  # fmt: skip
    model = FrameDiT(config).eval()
    for parameter in model.parameters():  # outputs start at zero, where nothing could be told apart
        torch.nn.init.normal_(parameter, std=0.15)
    return model


def walk(frames: int, position: str = "column", rows: int = 2) -> History:
    torch.manual_seed(frames)
    if position == "column":
        yaw = torch.remainder(8 * torch.arange(frames).float() + 480, 512).expand(rows, -1)
        poses = torch.stack([yaw, torch.full_like(yaw, 512)], dim=-1)
    else:
        poses = torch.cumsum(0.3 * torch.randn(rows, frames, 3), dim=1)
    return History(
        torch.randn(rows, frames, 6, 8, 8), poses, torch.randint(0, 3, (rows, frames)), 0.1 * torch.rand(rows, frames)
    )


def asked(history: History, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    rows = len(history.poses)
    return torch.randn(rows, 4, 6, 8, 8), torch.rand(rows, 4), history.poses[:, 2:6], torch.randint(0, 3, (rows, 4))


@pytest.mark.parametrize("position", ["column", "pose"])
@pytest.mark.parametrize("memory", [*MEMORIES, "pack_k2 unpacked", "pack_k4 unpacked"])
def test_cache_reads_what_the_past_reads(memory: str, position: str) -> None:
    memory, _, unpacked = memory.partition(" ")
    more = {"packed_size": 40, "memory_limit": 2} if unpacked else {}
    model, past = tiny(memory, position, retrieve=3, channel_frames=3, **more), walk(21, position)
    x, levels, poses, actions = asked(past)
    whole = model.read(past, poses)
    cache = FrameCache(model)
    for start, stop in ((0, 9), (9, 10), (10, 14), (14, 21)):
        cache.write(History(*(value[:, start:stop] for value in vars(past).values())))
    kept = cache.read(poses)
    assert kept.tokens == whole.tokens and kept.attended == whole.attended
    assert (kept.attended > kept.tokens) == bool(unpacked)
    want = model(x, levels, poses, actions, whole)
    torch.testing.assert_close(model(x, levels, poses, actions, kept), want, rtol=1e-4, atol=1e-4)
    assert want.shape == x.shape and torch.isfinite(want).all()
    again = FrameCache(model)
    again.load_state_dict(cache.state_dict())
    more = walk(4, position)
    for one in (cache, again):
        one.write(more)
    assert again.nbytes == cache.nbytes
    assert torch.equal(
        model(x, levels, poses, actions, cache.read(poses)), model(x, levels, poses, actions, again.read(poses))
    )


@pytest.mark.parametrize(
    ("memory", "tokens"),
    [("none", 0), ("window", 64), ("prepend", 336), ("channel", 64), ("cross", 336), ("pack_k2", 112),
     ("pack_k4", 84), ("retrieve", 128)],
)  # fmt: skip
def test_what_is_read(memory: str, tokens: int) -> None:
    model, past = tiny(memory), walk(21)
    x, levels, poses, actions = asked(past)
    assert model.read(past, poses).tokens == tokens
    base = model(x, levels, poses, actions, model.read(past, poses))

    def changed_by(frame: int) -> bool:
        latents = past.latents.clone()
        latents[:, frame] += 1
        other = model.read(History(latents, past.poses, past.actions, past.levels), poses)
        return not torch.allclose(model(x, levels, poses, actions, other), base, atol=1e-6)

    assert changed_by(20) is (memory != "none")
    old = {"none": [], "window": [], "channel": [0, 2, 5, 16], "retrieve": [2, 3, 5]}.get(memory, [0, 2, 3, 5, 16])
    for frame in (0, 2, 3, 5, 16):
        assert changed_by(frame) is (frame in old), frame


def test_untrained_packer_equals_pooled_latents() -> None:
    torch.manual_seed(0)
    for memory, length in (("pack_k2", 2), ("pack_k4", 4)):
        model = FrameDiT(FrameDiTConfig(hidden_size=32, num_hidden_layers=2, channels=6, memory=memory)).eval()
        past = walk(8)
        past = History(past.latents, past.poses, past.actions * 0, past.levels * 0)
        pooled = torch.nn.functional.avg_pool3d(past.latents.transpose(1, 2), (length,) * 3).transpose(1, 2)
        side = 8 // length // 2
        parts = pooled.unflatten(-1, (side, 2)).unflatten(-3, (side, 2))  # [B, N, C, side, 2, side, 2]
        tokens = parts.permute(0, 1, 3, 5, 4, 6, 2).flatten(4).flatten(2, 3)
        extra = model.past_action.weight[0] + model.past_level(model._level_features(torch.zeros(1)))
        places = model._past_places(centre_pose("column", past.poses.unflatten(1, (-1, length))), side)
        want = model._finish(model.past_embed(tokens) + extra + places)
        found = model.place_blocks(model.pack(past, length), past.poses.unflatten(1, (-1, length)))
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_levels_are_per_frame_and_clean_frames_stay() -> None:
    model, past = tiny("window"), walk(6)
    x, _, poses, actions = asked(past)
    levels = torch.tensor([[0.0, 0.3, 0.7, 1.0]]).expand(2, -1)
    out = model(x, levels, poses, actions, model.read(past, poses))
    assert torch.equal(out[:, 0], x[:, 0]), "a frame at level 0 is clean already"
    assert not torch.allclose(out[:, 1], x[:, 1])


def test_saved_and_loaded(tmp_path: Path) -> None:
    model, past = tiny("pack_k2"), walk(13)
    x, levels, poses, actions = asked(past)
    model.save_pretrained(tmp_path)
    again = FrameDiT.from_pretrained(tmp_path).eval()
    assert torch.equal(
        again(x, levels, poses, actions, again.read(past, poses)),
        model(x, levels, poses, actions, model.read(past, poses)),
    )


def test_parameter_counts() -> None:
    for memory in MEMORIES:
        count = sum(p.numel() for p in FrameDiT(FrameDiTConfig(memory=memory)).parameters())
        assert 0.4e6 < count < 2.6e6, (memory, count)


def test_settings_are_checked() -> None:
    assert FrameDiTConfig(memory="full").memory == "prepend"
    with pytest.raises(ValueError, match="none of none, window"):
        FrameDiTConfig(memory="everything")
    with pytest.raises(ValueError, match="multiple of"):
        FrameDiTConfig(hidden_size=30)
    with pytest.raises(ValueError, match="position"):
        FrameDiTConfig(position="row")
    cache = FrameCache(tiny("window"))
    bad = walk(3)
    bad.latents[0, 0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        cache.write(bad)
    lost = walk(3)
    lost.poses[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="pose"):
        cache.write(lost)
    wrong = walk(3)
    wrong.actions[0, 0] = 99
    with pytest.raises(IndexError):
        cache.write(wrong)
    assert cache.frames == 0 and cache.nbytes == 0, "a write that fails writes nothing"
    cache.write(walk(3))
    with pytest.raises(ValueError, match="another's"):
        FrameCache(tiny("pack_k2")).load_state_dict(cache.state_dict())
    with pytest.raises(ValueError, match="no state"):
        cache.load_state_dict({})


def test_nearest_frames_are_old_and_different() -> None:
    yaws = torch.tensor([[0.0, 0, 8, 16, 24, 16, 8, 0]])
    poses = torch.stack([yaws, torch.full_like(yaws, 512)], dim=-1)
    targets = torch.tensor([[[0.0, 512], [8, 512]]])
    assert nearest_frames("column", poses, targets, 3)[0].tolist() == [0, 2, 3]
    limited = plan_reading("pack_k2", "column", poses.repeat(1, 4, 1), targets, window=4, retrieve=2, channel_frames=2,
                           memory_limit=5)  # fmt: skip
    assert limited.blocks.shape == (1, 5, 2)


def test_places_are_those_of_the_world() -> None:
    """A column of the world has the same features wherever it appears in the frame, also across the seam."""
    a = position_features("column", torch.tensor([[480.0, 512.0]]), 4, 4)
    b = position_features("column", torch.tensor([[496.0, 512.0]]), 4, 4)
    torch.testing.assert_close(a.reshape(4, 4, -1)[:, 1:], b.reshape(4, 4, -1)[:, :3])
    torch.testing.assert_close(centre_pose("column", torch.tensor([[508.0, 512.0], [4.0, 512.0]]))[0] % 512,
                               torch.tensor(0.0), atol=1e-3, rtol=0)  # fmt: skip
    turned = torch.tensor([1.5, 1.5, 0.1]), torch.tensor([1.5, 1.5, 0.1 + 2 * torch.pi])
    assert float(pose_distance("pose", *turned)) < 1e-5
    torch.testing.assert_close(motion_features("pose", *turned), motion_features("pose", turned[0], turned[0]),
                               atol=1e-5, rtol=0)  # fmt: skip


def test_codec(tmp_path: Path) -> None:
    torch.manual_seed(0)
    frames = torch.rand(70, 16, 24, 3)
    assert torch.equal(from_patches(to_patches(frames)), frames)
    whole = fit_codec(frames, components=192)
    torch.testing.assert_close(whole.decode(whole.encode(frames)), frames, atol=1e-4, rtol=0)
    codec = fit_codec(frames, components=20, power=0.5)
    latents = codec.encode(frames)
    assert latents.shape == (70, 20, 2, 3)
    assert abs(float(latents.var(dim=(0, 3), unbiased=False).mean()) - 1) < 1e-3
    codec.save(tmp_path / "codec.safetensors")
    assert torch.equal(PatchCodec.load(tmp_path / "codec.safetensors").decode(latents), codec.decode(latents))
    with pytest.raises(ValueError, match="NaN"):
        codec.encode(torch.full((1, 16, 24, 3), float("nan")))
    with pytest.raises(ValueError, match="multiples of 8"):
        codec.encode(torch.rand(1, 15, 24, 3))
    with pytest.raises(ValueError, match="no codec"):
        PatchCodec.load(tmp_path / "none.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(ValueError, match="damaged"):
        PatchCodec.load(tmp_path / "cut.safetensors")


def test_codec_of_a_panorama_is_that_of_its_frames() -> None:
    """Frames are slices of whole cells, so that a whole world can be encoded at once."""
    torch.manual_seed(1)
    strip = torch.rand(1, 64, 128, 3)
    codec = fit_codec(strip.unfold(2, 64, 8).permute(0, 2, 1, 4, 3).flatten(0, 1), components=12)
    torch.testing.assert_close(codec.encode(strip)[..., 3:11], codec.encode(strip[:, :, 24:88]))
