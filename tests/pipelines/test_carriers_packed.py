"""Carriers of networks that pack their history: called as their own pipelines call them, chunk after chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from mediaspec.memory.arvdm import generate
from mediaspec.memory.base import FrameGroup, MemoryRead
from mediaspec.memory.frame_noise import FrameNoise
from mediaspec.memory.full import FullMemory
from mediaspec.memory.pack import PackMemory
from mediaspec.pipelines.carriers.far import FARCarrier, chunks_of
from mediaspec.pipelines.carriers.framepack import FramePackCarrier
from mediaspec.pipelines.carriers.helios import HeliosCarrier
from mediaspec.pipelines.carriers.packed_history import lay_out

from . import tiny_packed
from .tiny_packed import (
    CELLS,
    CLOSE,
    NAMES,
    frames_of,
    noise_of,
    randn,
    rollout,
    same_call,
    told,
    watched,
    written,
)
from .tiny_video import WIDTH

pytestmark = pytest.mark.filterwarnings("ignore")


# ---- as their own pipelines


@pytest.mark.parametrize("sampling_type", ["vanilla", "inverted_anti_drifting"])
def test_framepack_is_its_pipeline(framepack: Any, sampling_type: str) -> None:
    """Five sections, so that the gaps of the inverted order reach their limits: 3, 2, 2, 1, 0 windows."""
    inverted = sampling_type != "vanilla"
    picture = Image.fromarray((np.random.default_rng(0).random((32, 32, 3)) * 255).astype("uint8"))
    text = {
        "prompt_embeds": randn(1, 5, WIDTH, seed=7),
        "pooled_prompt_embeds": randn(1, 8, seed=8),
        "prompt_attention_mask": torch.tensor([[1, 1, 1, 1, 0]]),
    }
    if not inverted:
        text |= {f"negative_{key}": value + 1 - (value == 0).to(value) for key, value in text.items()}
        text["negative_prompt_attention_mask"] = torch.tensor([[1, 1, 1, 1, 1]])
    scale = {"true_cfg_scale": 1.0 if inverted else 2.5, "guidance_scale": 4.0}
    with watched(framepack.transformer) as theirs:
        result = framepack(
            picture, height=32, width=32, num_frames=45, latent_window_size=3, num_inference_steps=2,
            sampling_type=sampling_type, output_type="latent", generator=torch.Generator().manual_seed(3),
            return_dict=False, **text, **scale,
        )[0][-1]  # fmt: skip
    first = theirs[0]["latents_clean"][:, :, :1]
    per_section = 2 if inverted else 4
    assert len(theirs) == 5 * per_section
    noise = noise_of([theirs[i]["hidden_states"] for i in range(0, len(theirs), per_section)], 1, inverted)

    carrier = FramePackCarrier(framepack, sampling_type=sampling_type, latent_window_size=3)
    pixels = framepack.video_processor.preprocess(picture, 32, 32)
    carrier.condition(image=pixels, **text, **scale)
    schedule = carrier.schedule(steps=2, height=32, width=32)
    with watched(framepack.transformer) as ours:
        made = rollout(carrier, schedule, noise, num_frames=15, history=first)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        other.pop("attention_kwargs")
        same_call(mine, other)
    torch.testing.assert_close(torch.cat([first, made], 2), result, **CLOSE)


def test_helios_is_its_pipeline(helios: Any) -> None:
    """Four chunks from text alone: the first frame made becomes the anchor."""
    text = {"prompt_embeds": randn(1, 5, WIDTH, seed=7), "negative_prompt_embeds": randn(1, 5, WIDTH, seed=8)}
    with watched(helios.transformer) as theirs:
        result = helios(
            height=32, width=32, num_frames=60, num_inference_steps=2, sigmas=np.array([1.0, 0.5]), guidance_scale=3.0,
            num_latent_frames_per_chunk=4, output_type="latent", generator=torch.Generator().manual_seed(3),
            return_dict=False, **text,
        )[0]  # fmt: skip
    chunks = [theirs[i]["hidden_states"] for i in range(0, len(theirs), 4)]
    carrier = HeliosCarrier(helios, num_latent_frames_per_chunk=4)
    carrier.condition(guidance_scale=3.0, **text)
    schedule = carrier.schedule(steps=2, height=32, width=32)
    with watched(helios.transformer) as ours:
        made = rollout(carrier, schedule, noise_of(chunks, 0), num_frames=4 * len(chunks))
    assert len(ours) == len(theirs) and len(chunks) >= 4
    for mine, other in zip(ours, theirs):
        other.pop("attention_kwargs")
        same_call(mine, other)
    torch.testing.assert_close(made, result[:, :, -made.shape[2] :], **CLOSE)


@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
def test_far_is_its_pipeline(far: Any, guidance_scale: float) -> None:
    """A picture and three chunks: older ones are coarse by then; keys and values come from the cache."""
    noise, first = randn(1, 4, 7, *CELLS), frames_of(1)
    text = {"prompt_embeds": randn(1, 5, WIDTH, seed=7)}
    if guidance_scale > 1:
        text["negative_prompt_embeds"] = randn(1, 5, WIDTH, seed=8)
    with watched(far.transformer) as theirs:
        result = far(
            video_latents=first.transpose(1, 2), latents=noise, height=32, width=32, num_frames=25,
            num_inference_steps=2, chunk_partition=[1, 2, 2, 2], guidance_scale=guidance_scale,
            output_type="latent", return_dict=False, **text,
        )[0]  # fmt: skip
    carrier = FARCarrier(far)
    carrier.condition(guidance_scale=guidance_scale, **text)
    with watched(far.transformer) as ours:
        made = rollout(carrier, carrier.schedule(steps=2), noise_of([noise[:, :, 1:]], 1), num_frames=6, history=first)
    assert len(ours) == len(theirs) == 9  # per chunk, one call that writes the cache and two steps
    for mine, other in zip(ours, theirs):
        other.pop("attention_kwargs")
        same_call(mine, other)
    torch.testing.assert_close(torch.cat([first, made], 2), result, **CLOSE)


# ---- the history


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("age", [1, 2, 5])
def test_every_group_of_the_history_counts(carriers: Any, name: str, age: int) -> None:
    """A frame `age` back is read: at full resolution, at 2x, at 4x (for FAR at (1, 4, 4))."""
    carrier = told(carriers[name]())
    clean = frames_of(8)
    other = clean.clone()
    other[:, :, -age] += 1
    x, ids = frames_of(2, 6), torch.tensor([8, 9])
    outputs = []
    for frames in (clean, other):
        memory = carrier.memory()
        assert memory is not None
        memory.write(frames)
        with torch.no_grad():
            outputs.append(carrier(x, torch.full((2,), 0.7).double(), ids, memory.read([8]), None))
    assert (outputs[0] - outputs[1]).abs().max() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_chunks_twice_the_same_and_after_a_stop(carriers: Any, name: str) -> None:
    carrier = told(carriers[name]())
    schedule, count = carrier.schedule(steps=2), 3 * carrier.schedule().w

    def start() -> Any:
        noise = FrameNoise(torch.tensor([4]), (4, *CELLS))
        return generate(carrier, schedule, carrier.sampler(), noise, num_frames=count, memory=carrier.memory())

    whole = [done.frames for done in start()]
    assert len(whole) == 3 and all(bool(torch.isfinite(one).all()) for one in whole)
    carrier.reset()
    first = start()
    assert torch.equal(next(first).frames, whole[0])
    saved = first.state_dict()
    carrier.reset()
    again = start()
    again.load_state_dict(saved)
    assert all(torch.equal(done.frames, one) for done, one in zip(again, whole[1:], strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_two_videos_of_a_batch_are_their_own(carriers: Any, name: str) -> None:
    carrier = carriers[name]()
    x, frames, ids = frames_of(2, 6, rows=2), frames_of(4, rows=2), torch.tensor([4, 5])
    levels = torch.full((2,), 0.7).double()

    def ask(rows: slice) -> Tensor:
        told(carrier, batch=len(x[rows]))
        read = MemoryRead((FrameGroup(frames[rows], torch.arange(4).expand(len(x[rows]), -1)),))
        with torch.no_grad():
            out: Tensor = carrier(x[rows], levels, ids, read, None)
        return out

    both = ask(slice(0, 2))
    torch.testing.assert_close(both[1:], ask(slice(1, 2)), **CLOSE)


def test_custom_history_sizes(framepack: Any, helios: Any) -> None:
    for carrier in (
        told(FramePackCarrier(framepack, history_sizes=(8, 4, 2), latent_window_size=5)),
        told(HeliosCarrier(helios, history_sizes=(8, 4, 2), num_latent_frames_per_chunk=5)),
    ):
        memory = carrier.memory()
        assert isinstance(memory, PackMemory) and memory.sizes == [8, 4, 2] and memory.max_frames == 15
        read, x = written(memory, 30), frames_of(5, 6)
        near, second, third, window = carrier.slots(x, torch.arange(30, 35), read)
        counts = {len(group.indices): group.indices.tolist() for group in (near, second, third)}
        assert counts == {3: [0, 13, 14], 4: [9, 10, 11, 12], 8: [1, 2, 3, 4, 5, 6, 7, 8]}
        assert window.tolist() == [15, 16, 17, 18, 19]
        frames = frames_of(30)
        assert torch.equal(near.frames, frames[:, :, [0, 28, 29]])
        four = next(group for group in (second, third) if len(group.indices) == 8)
        assert torch.equal(four.frames, frames[:, :, 16:24])
        noise = FrameNoise(torch.tensor([4]), (4, *CELLS))
        made = rollout(carrier, carrier.schedule(steps=1), noise, num_frames=20)
        assert made.shape == (1, 4, 20, *CELLS) and bool(torch.isfinite(made).all())
        with pytest.raises(ValueError, match="history_sizes"):  # a memory of other sizes is not cut in silence
            carrier.slots(x, torch.arange(30, 35), written(PackMemory(), 30))


def test_any_memory_of_frames(helios: Any) -> None:
    """What keeps more than there are slots shows its first and its last frames."""
    carrier = HeliosCarrier(helios, history_sizes=(4, 2, 1))
    short, mid, long, _ = carrier.slots(frames_of(2, 6), torch.tensor([12, 13]), written(FullMemory(), 12))
    frames = frames_of(12)
    assert torch.equal(short.frames, frames[:, :, [0, 11]]) and torch.equal(mid.frames, frames[:, :, 9:11])
    assert torch.equal(long.frames, frames[:, :, 5:9])


def test_an_old_anchor_is_no_history() -> None:
    """The first frame stands among the history only while no frame between the two was dropped."""
    groups = (FrameGroup(frames_of(1), torch.tensor([[0]])), FrameGroup(frames_of(2, 6), torch.tensor([[7, 8]])))
    carrier = told(FramePackCarrier(tiny_packed.framepack_transformer()))
    clean, twice, four, _ = carrier.slots(frames_of(2), torch.tensor([9, 10]), MemoryRead(groups))
    assert torch.equal(clean.frames[:, :, 1:], frames_of(2, 6)[:, :, 1:])
    assert twice.real.tolist() == [False, True] and not four.real.any()


def test_runs_are_chained_by_history(helios: Any) -> None:
    """Eight frames in one run are four frames, and four more with the former as history."""
    carrier = told(HeliosCarrier(helios, num_latent_frames_per_chunk=4))
    schedule, noise = carrier.schedule(steps=2), FrameNoise(torch.tensor([4]), (4, *CELLS))
    whole = rollout(carrier, schedule, noise, num_frames=8)
    second = rollout(carrier, schedule, noise, num_frames=4, history=whole[:, :, :4])
    assert torch.equal(second, whole[:, :, 4:])


# ---- empty slots


def test_framepack_hides_empty_slots(framepack: Any) -> None:
    """An empty group's tokens are its embedding's bias: with empty="skip" nothing depends on it."""
    model, x, ids = framepack.transformer, frames_of(3, 6), torch.arange(1, 4)
    levels, read = torch.full((3,), 0.7).double(), MemoryRead((FrameGroup(frames_of(1), torch.tensor([[0]])),))
    bias = model.clean_x_embedder.proj_4x.bias
    own, results = bias.detach().clone(), {}
    for empty in ("zeros", "skip"):
        carrier = told(FramePackCarrier(framepack, empty=empty))
        with torch.no_grad():
            before = carrier(x, levels, ids, read, None)
            bias += 1
            after = carrier(x, levels, ids, read, None)
            bias.copy_(own)
        results[empty] = before
        assert torch.equal(before, after) == (empty == "skip")
    assert not torch.allclose(results["zeros"], results["skip"])
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    assert all(not block._forward_pre_hooks for block in blocks)
    with torch.no_grad():
        assert torch.equal(told(FramePackCarrier(framepack))(x, levels, ids, read, None), results["zeros"])


def test_framepack_hides_with_a_batch_and_a_text_mask(framepack: Any) -> None:
    carrier = FramePackCarrier(framepack, empty="skip")
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    x, levels = frames_of(3, 6, rows=2), torch.full((3,), 0.7).double()
    read = MemoryRead((FrameGroup(frames_of(2, rows=2), torch.arange(2).expand(2, -1)),))
    with torch.no_grad():
        told(carrier, batch=2, prompt_attention_mask=mask)
        both = carrier(x, levels, torch.arange(2, 5), read, None)
        told(carrier, prompt_attention_mask=mask)
        one = MemoryRead((FrameGroup(read.groups[0].frames[1:], torch.arange(2)[None]),))
        torch.testing.assert_close(both[1:], carrier(x[1:], levels, torch.arange(2, 5), one, None), **CLOSE)


def test_helios_leaves_empty_groups_out(helios: Any) -> None:
    carrier = told(HeliosCarrier(helios, empty="skip"))
    x, levels = frames_of(3, 6), torch.full((3,), 0.7).double()
    with watched(helios.transformer) as calls, torch.no_grad():
        alone = carrier(x, levels, torch.arange(3), MemoryRead(), None)
        carrier(x, levels, torch.arange(2, 5), written(carrier.memory(), 2), None)
    assert not [key for key in calls[0] if "history" in key]
    own = helios.transformer(
        x, torch.tensor([700.0]), carrier.conditioning.embeds, torch.arange(20, 23)[None], return_dict=False
    )[0]
    torch.testing.assert_close(alone, own, **CLOSE)
    assert calls[1]["indices_latents_history_short"].tolist() == [[0, 19]]  # the first frame, and the one just made
    assert calls[1]["indices_latents_history_mid"].tolist() == [[18]] and "latents_history_long" not in calls[1]
    with watched(helios.transformer) as calls, torch.no_grad():  # what the weights know
        told(HeliosCarrier(helios))(x, levels, torch.arange(3), MemoryRead(), None)
    counts = [calls[0][f"latents_history_{name}"].shape[2] for name in ("long", "mid", "short")]
    assert counts == [16, 2, 2] and not any(calls[0][f"latents_history_{name}"].any() for name in ("long", "mid"))


def test_helios_without_anchor(helios: Any) -> None:
    carrier = told(HeliosCarrier(helios, keep_first_frame=False, history_sizes=(0, 2, 1), empty="skip"))
    memory = carrier.memory()
    assert memory.sizes == [2, 2] and memory.sink == 0
    short, mid, long, window = carrier.slots(frames_of(2), torch.tensor([9, 10]), written(memory, 9))
    assert (short.indices.tolist(), mid.indices.tolist(), long) == ([2, 3], [0, 1], None)
    assert window.tolist() == [4, 5]


def test_slots_from_the_end() -> None:
    near, second, far_off = lay_out(frames_of(4), (1, 2, 16), 10, at_end=False, zeros=False)
    assert [group.indices.tolist() for group in (near, second, far_off)] == [[10], [11, 12], [13]]
    assert torch.equal(near.frames, frames_of(4)[:, :, :1])


# ---- FAR


def test_far_cache_is_the_whole_network() -> None:
    """Where the class adds no keys of its own (128 tokens a window), the cache changes nothing but the cost."""
    carrier = told(FARCarrier(tiny_packed.far_transformer(full_chunk_limit=3), chunk=2))
    carrier.schedule(steps=2)
    history, x = randn(1, 4, 7, 16, 16), randn(1, 4, 2, 16, 16, seed=1)
    read = MemoryRead((FrameGroup(history, torch.arange(7)[None]),))
    levels, ids = torch.ones(2).double(), torch.tensor([7, 8])
    with torch.no_grad():
        cached = carrier(x, levels, ids, read, None)
        assert carrier.memory_tokens(read) == 4 * 64 + 3 * 16
        assert carrier.cache_bytes == 2 * 2 * 2 * 16 * 4 * carrier.memory_tokens(read)  # layers, k and v, heads, ...
        carrier.use_kv_cache = False
        torch.testing.assert_close(cached, carrier(x, levels, ids, read, None), rtol=1e-5, atol=1e-5)


def test_far_is_told_where_steps_end(far: Any) -> None:
    carrier = told(FARCarrier(far))
    schedule = carrier.schedule(steps=3)
    assert schedule.shift == 5.0 and schedule.references.groups == ((64, (1, 4, 4)), (2, (1, 2, 2)))
    with watched(far.transformer) as calls:
        rollout(carrier, schedule, FrameNoise(torch.tensor([0]), (4, *CELLS)), num_frames=2)
    levels = torch.tensor([schedule.level(m) for m in range(4)], dtype=torch.float64) * 1000
    torch.testing.assert_close(torch.cat([call["timestep"] for call in calls]), levels[:-1])
    torch.testing.assert_close(torch.cat([call["r_timestep"] for call in calls]), levels[1:])
    strange = torch.full((2,), 0.123).double()
    assert torch.equal(carrier.ends(strange), strange)  # no step starts there: the velocity at that level


def test_far_positions_and_chunks() -> None:
    assert [chunks_of(n, 3) for n in (0, 2, 3, 8)] == [[], [2], [3], [2, 3, 3]]
    carrier = told(FARCarrier(tiny_packed.far_transformer(rope_max_seq_len=8), old=64))
    with pytest.raises(ValueError, match="positions for 8"):
        carrier(frames_of(2), torch.ones(2).double(), torch.tensor([9, 10]), written(FullMemory(), 9), None)
    read = MemoryRead((FrameGroup(randn(1, 4, 4, 2, 2), torch.arange(4)[None]),))
    with pytest.raises(ValueError, match="smaller than the patch"):
        carrier(randn(1, 4, 2, 2, 2), torch.ones(2).double(), torch.tensor([4, 5]), read, None)
