"""The sampler: its law with an exact denoiser, its identities, and going on after a stop."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mediaspec.memory.arvdm import generate
from mediaspec.memory.base import MemoryRead, load_state, save_state
from mediaspec.memory.budget import MemoryLedger, TrainedLength
from mediaspec.memory.frame_noise import FRESH, INIT, FrameNoise
from mediaspec.memory.full import FullMemory
from mediaspec.memory.gaussian import GaussianRollout
from mediaspec.memory.gaussian_law import GaussianDenoiser, GaussianVideo, gaussian_kl, last_features, scene
from mediaspec.memory.loss_gap import loss_gap
from mediaspec.memory.pack import PackMemory
from mediaspec.memory.retrieve import RetrieveMemory
from mediaspec.memory.schedule_presets import make_schedule
from mediaspec.memory.schedule_tables import fifo_init_frames
from mediaspec.memory.slot_steps import CosinePath, FlowPath, SlotSampler
from mediaspec.memory.window import WindowMemory
from mediaspec.memory.window_schedule import WindowSchedule, staircase

from .cases import CASES
from .test_gaussian import HIGH, LOW, chunks, queue

SHAPE = (2, 4, 4)
ROWS = 4096


class SmallNet(torch.nn.Module):
    """A velocity from neighbours in the call, the level, the references and the action; fixed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Conv3d(2, 2, 3, padding=1)
        g = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.mix.weight.copy_(0.2 * torch.randn(self.mix.weight.shape, generator=g))
            self.mix.bias.zero_()
        self.seen: list[tuple[list[float], list[int], list[int]]] = []

    def forward(
        self, x: Tensor, levels: Tensor, frame_ids: Tensor, read: MemoryRead, actions: Tensor | None
    ) -> Tensor:
        known = read.frame_ids
        self.seen.append((levels.tolist(), frame_ids.tolist(), [] if known is None else known[0].tolist()))
        out = self.mix(x) * (1 + levels.to(x)[:, None, None])
        if read.frames is not None:
            age = (frame_ids.float().mean() - known[0].float())[:, None, None]
            out = out + (read.frames * torch.exp(-0.1 * age)).mean(2, keepdim=True)
        return out if actions is None else out + actions.mean(-1)[:, None, :, None, None]


def noise(seeds: tuple[int, ...] = (5, 6)) -> FrameNoise:
    return FrameNoise(torch.tensor(seeds), SHAPE)


def rollout(schedule: WindowSchedule, net: SmallNet | None = None, **settings_):
    return generate(net or SmallNet(), schedule, SlotSampler(FlowPath()), noise(), **settings_)


def joined(video) -> tuple[Tensor, list[int]]:
    parts = list(video)
    return torch.cat([part.frames for part in parts], 2), [i for part in parts for i in part.frame_ids]


# ---- the law


def sampled(exact: GaussianRollout, kind: str, references: int, net: GaussianDenoiser) -> Tensor:
    """[rows, frames] finished frames of our sampler with the exact denoiser."""
    plan = exact.schedule
    room = plan.w - plan.delta
    source = FrameNoise(torch.arange(ROWS), (1,), torch.float64)
    count = len(exact.video.covariance)
    clean = exact.video.sample(source(range(count), 7)[:, 0])[:, None, :room] if room else None
    video = generate(
        net, plan, SlotSampler(CosinePath(), kind, "sample"), source, num_frames=exact.count * plan.delta,
        memory=WindowMemory(references) if references else None, init=clean,
    )  # fmt: skip
    return joined(video)[0][:, 0]


@pytest.mark.parametrize(
    ("name", "make", "kind", "references", "errors"),
    [
        ("chunk_ar1_bias0.05", chunks, "posterior", 1, {"bias": 0.05}),
        ("chunk_ar1_gain0.05", chunks, "posterior", 1, {"gain": 0.05}),
        ("chunk_ar1_optimal_bias0.05", chunks, "tracked", 1, {"bias": 0.05}),
        ("chunk_ar1_renoise_m4", chunks, "renoise", 1, {}),
        ("fifo_ar1_w4", queue, "posterior", 0, {}),
        ("fifo_ar1_w4_ref2", queue, "posterior", 2, {}),
        ("fifo_ar1_w4_optimal", queue, "tracked", 0, {}),
    ],
)
def test_sampler_with_the_exact_denoiser_has_the_law_of_the_theory(name, make, kind, references, errors):
    """Means and covariances of every finished clip and of the whole video within 4 standard errors of 4,096 samples.

    About 40 numbers a case at 4 deviations: a right sampler fails a case with probability 0.3 %, and these seeds pass.
    """
    exact = make(references, sampler=kind, **errors)
    net = GaussianDenoiser(exact.video, last_features(references) if references else None, LOW, **errors)
    frames = sampled(exact, kind, references, net)
    mean, cov = exact.sampler_law()
    mean, cov = mean[exact.clean], cov[exact.clean][:, exact.clean]
    spread = cov.diagonal()
    assert frames.shape == (ROWS, len(mean))
    found = torch.cov(frames.T)
    assert bool(((frames.mean(0) - mean).abs() < 4 * (spread / ROWS).sqrt()).all())
    assert bool(((found - cov).abs() < 4 * ((spread[:, None] * spread + cov**2) / ROWS).sqrt()).all())
    delta = exact.schedule.delta
    for k, wanted in enumerate(CASES["linear_gaussian"][name]["kl_clip"]):
        ids = torch.arange(k * delta, (k + 1) * delta)
        true = exact.cov[exact.clean][:, exact.clean][ids][:, ids]
        assert gaussian_kl(0 * mean[ids], true, mean[ids], cov[ids][:, ids]) == pytest.approx(
            wanted, rel=1e-6, abs=1e-9
        )
        # the divergence from sampled moments: its slope in them is of order 1, its noise a few per cent
        assert gaussian_kl(0 * mean[ids], true, frames.mean(0)[ids], found[ids][:, ids]) == pytest.approx(
            wanted, rel=0.15, abs=0.02
        )


def test_loss_gap_of_the_exact_denoiser_is_the_closed_form_within_one_per_cent():
    cov = scene([1, 1, 1, 0, 0, 1], 0.25)
    video, rows, sub_steps, g = GaussianVideo(cov), 2048, 600, torch.Generator().manual_seed(0)
    normal = torch.randn(rows, 6, generator=g, dtype=torch.float64)
    normal = normal - normal.mean(0)  # whitened, so that what the clips alone decide is exact
    normal = normal @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(normal.T, correction=0))).T
    clips = video.sample(normal)[:, None]
    # even steps in ln(snr): u = 2/pi atan(snr^-1/2)
    ends = [math.log(math.tan(math.pi * u / 2) ** -2) for u in (HIGH, LOW)]
    ratios = torch.linspace(ends[0], ends[1], sub_steps + 1, dtype=torch.float64)[:-1]
    u = torch.atan(torch.exp(-ratios / 2)) * (2 / math.pi)
    progress = (u - LOW) / (HIGH - LOW)
    progress[0] = 1.0
    plan = WindowSchedule(
        1, 1, (HIGH,), sub_steps, clean_level=LOW, noise_level=HIGH, progress=tuple(progress.tolist())
    )
    memories = [WindowMemory(2), FullMemory()]
    for memory in memories:
        memory.write(clips[:, :, :5])
    small, big = (memory.read() for memory in memories)
    found = loss_gap(
        GaussianDenoiser(video), clips[:, :, 5:], plan, SlotSampler(CosinePath(), "posterior", "sample"), small, big,
        lambda m: torch.randn(rows, 1, 1, generator=g, dtype=torch.float64), torch.tensor([5]),
    )  # fmt: skip
    assert found == pytest.approx(CASES["i_mmse"]["exact"], rel=0.01)


# ---- identities


def chunk_by_chunk(net: SmallNet, frames: int, chunk: int, last: int, steps: int) -> Tensor:
    """Outpainting written out: each chunk from noise to clean, looking at the last frames."""
    source, video = noise(), torch.zeros(2, 2, 0, 4, 4)
    for start in range(0, frames, chunk):
        ids = torch.arange(start, start + chunk)
        x = source(ids.tolist(), FRESH)
        memory = FullMemory()
        if start and last:
            kept = range(max(0, start - last), start)
            memory.write(video[:, :, kept.start : kept.stop], kept)
        for m in range(steps):
            now, then = 1 - m / steps, 1 - (m + 1) / steps if m + 1 < steps else 0.0
            level = torch.full((chunk,), now, dtype=torch.float64)
            v = net(x, level, ids, memory.read(), None)
            x = x + (torch.full((chunk,), then).double() - level).float()[:, None, None] * v
        video = torch.cat([video, x], 2)
    return video


@pytest.mark.parametrize("last", [0, 1, 5])
def test_one_level_is_outpainting_bit_for_bit(last):
    plan = make_schedule("staircase", stages=1, delta=3, steps=4, last=last)
    frames, ids = joined(rollout(plan, num_frames=12))
    assert ids == list(range(12))
    assert torch.equal(frames, chunk_by_chunk(SmallNet(), 12, 3, last, 4))
    other = make_schedule("outpainting", delta=3, last=last, steps=4)
    assert torch.equal(frames, joined(rollout(other, num_frames=12))[0])


def test_memory_off_is_plain_chunking_bit_for_bit():
    plan = make_schedule("self_forcing").with_(progress=None, shift=1.0)
    wanted = chunk_by_chunk(SmallNet(), 9, 3, 0, 4)
    for memory in (None, WindowMemory(0)):
        assert torch.equal(joined(rollout(plan, num_frames=9, memory=memory))[0], wanted)
    assert not torch.equal(joined(rollout(plan, num_frames=9, memory=FullMemory()))[0], wanted)


MEMORIES = {
    "none": lambda: None,
    "window": lambda: WindowMemory(3),
    "retrieve": lambda: RetrieveMemory(2, 1),
    "pack": lambda: PackMemory(),
}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", ["fifo", "staircase", "outpainting"])
def test_stopped_at_any_step_and_resumed_from_disk_is_bit_equal(name, memory, tmp_path):
    settings_ = {
        "fifo": {"frames": 2, "parts": 2},
        "staircase": {"stages": 3, "delta": 2},
        "outpainting": {"delta": 3, "steps": 2},
    }
    plan = make_schedule(name, **settings_[name])
    sampler = SlotSampler(CosinePath(), "ddim", "v_prediction", eta=1.0)

    def start():
        return generate(SmallNet(), plan, sampler, noise(), num_frames=6, memory=MEMORIES[memory]())

    whole, _ = joined(start())
    assert bool(whole.isfinite().all())
    before, made = start(), []
    for stop in range(12):
        if before.emitted >= 6:
            break
        save_state(tmp_path / "state.safetensors", before.state_dict())
        after = start()
        after.load_state_dict(load_state(tmp_path / "state.safetensors"))
        rest = [part.frames for part in [*made, *after]]
        assert torch.equal(torch.cat(rest, 2)[:, :, :6], whole), f"differs when stopped after {stop} steps"
        done = before.step()
        made += [] if done is None else [done]
    assert stop >= 2


def test_a_longer_video_goes_on_from_a_shorter_one(tmp_path):
    """Frames of the last step beyond `num_frames` are kept for it, not lost."""
    plan = make_schedule("outpainting", delta=4, last=2, steps=2)
    whole, _ = joined(rollout(plan, num_frames=11))
    parts, state = [], None
    for count in (5, 6, 11):
        video = rollout(plan, num_frames=count)
        if state is not None:
            video.load_state_dict(state)
        parts += list(video)
        save_state(tmp_path / "state.safetensors", video.state_dict())
        state = load_state(tmp_path / "state.safetensors")
    assert [i for part in parts for i in part.frame_ids] == list(range(11))
    assert torch.equal(torch.cat([part.frames for part in parts], 2), whole)


def test_a_video_does_not_depend_on_its_batch():
    plan = make_schedule("staircase", stages=2, delta=2, last=2)
    pair, _ = joined(rollout(plan, num_frames=6))
    alone, _ = joined(generate(SmallNet(), plan, SlotSampler(FlowPath()), noise((6,)), num_frames=6))
    torch.testing.assert_close(pair[1:], alone, rtol=1e-5, atol=1e-6)


# ---- the loop


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(1, 14), st.booleans())
def test_every_frame_passes_every_level_once(delta, stages, m_ar, drop, count, warm):
    """For any window (also ones that `delta` does not divide), with and without a first clip."""
    w = max(delta, delta * stages - min(drop, delta - 1))
    levels = staircase(stages, delta)[delta * stages - w :]
    plan = WindowSchedule(w, delta, tuple(levels), m_ar).validate()
    net = SmallNet()
    init = None if warm or w == delta else torch.zeros(2, 2, w - delta, 4, 4)
    video = rollout(plan, net, num_frames=count, init=init)
    frames, ids = joined(video)
    assert ids == list(range(count)) and frames.shape[2] == count
    seen: dict[int, list[float]] = {}
    for now, frame_ids, _ in net.seen:
        for i, level in zip(frame_ids, now):
            seen.setdefault(i, []).append(level)
    for i in range(count):
        way = seen[i]
        assert all(b < a for a, b in zip(way, way[1:]))
        slot = w - 1 - (delta - 1 - (i + (0 if init is None else delta - (w - delta) % delta) % delta) % delta)
        wanted = m_ar * (slot // delta + 1)
        if init is None or i >= w - delta:
            assert way[0] == 1.0 and len(way) == wanted


def test_fifo_from_a_clip_and_its_calls():
    plan, net, ledger = make_schedule("fifo", frames=4, parts=2), SmallNet(), MemoryLedger()
    clip = torch.randn(2, 2, 4, 4, 4, generator=torch.Generator().manual_seed(1))
    seeds = torch.tensor(fifo_init_frames(4, 2)[:-1])
    video = rollout(
        plan, net, num_frames=5, init=clip[:, :, seeds], discard=4, memory=WindowMemory(2), callback_on_step_end=ledger
    )
    frames, ids = joined(video)
    assert ids == [0, 1, 2, 3, 4] and video.index == 5 + 4 and video.calls == 4 * 9
    assert [len(levels) for levels, _, _ in net.seen[:4]] == [4] * 4
    assert net.seen[3][0] == [0.125, 0.125, 0.125, 0.25]  # two finished frames in front, at the lowest level
    assert net.seen[0][0] == [0.625, 0.75, 0.875, 1.0]
    assert net.seen[-1][2] == [2, 3] and ledger.summary()["max_memory_frames"] == 2
    assert max(i for _, shown, _ in net.seen for i in shown) == 4 + 7 and min(net.seen[3][1]) == 0


def test_first_frames_come_out_as_they_were_noised():
    plan = WindowSchedule(4, 2, (0.5, 0.5, 1.0, 1.0), 1)
    clip = torch.randn(2, 2, 2, 4, 4, generator=torch.Generator().manual_seed(2))
    wanted = 0.5 * clip + 0.5 * noise()([0, 1], INIT)

    def exact(x, levels, frame_ids, read, actions):
        return torch.cat([2 * (x[:, :, :2] - clip), x[:, :, 2:]], 2) if int(frame_ids[0]) == 0 else x

    video = rollout(plan, exact, init=clip)  # type: ignore[arg-type]
    torch.testing.assert_close(video.window, wanted)
    torch.testing.assert_close(next(video).frames, clip)


def test_history_actions_and_noised_references():
    plan = make_schedule("outpainting", delta=2, last=2, steps=1)
    history = torch.randn(2, 2, 5, 4, 4, generator=torch.Generator().manual_seed(3))
    net = SmallNet()
    actions = torch.arange(7.0)[None, :, None].expand(2, -1, 1)
    video = rollout(plan, net, num_frames=4, history=history, actions=actions)
    frames, ids = joined(video)
    assert ids == [5, 6, 7, 8] and net.seen[0][2] == [3, 4] and net.seen[1][2] == [5, 6]
    assert not torch.equal(frames, joined(rollout(plan, num_frames=4, history=history))[0])
    level = replace(plan.references, level=0.1)
    shown: list[MemoryRead] = []

    def spy(x, levels, frame_ids, read, actions):
        shown.append(read)
        return x

    next(rollout(plan.with_(references=level), spy, history=history))  # type: ignore[arg-type]
    drawn = noise()([3, 4], 3, 0)
    torch.testing.assert_close(shown[0].frames, 0.9 * history[:, :, 3:] + 0.1 * drawn)
    assert shown[0].level == 0.1


def test_from_the_end():
    plan, net = make_schedule("framepack_inverted", frames=3, steps=1), SmallNet()
    first = torch.zeros(2, 2, 1, 4, 4)
    video = rollout(plan, net, num_frames=7, history=first)
    parts = list(video)
    assert [part.frame_ids for part in parts] == [[5, 6, 7], [2, 3, 4], [1]]
    assert [seen for _, _, seen in net.seen] == [[0], [0, 5, 6, 7], [0, 2, 3, 4, 5, 6, 7]]
    groups = video.memory.read().groups  # the newest group holds what was made last: frame 1
    assert [group.frame_ids[0].tolist() for group in groups] == [[0], [4, 5, 6, 7], [2, 3], [1]]


def test_wrong_settings_are_refused():
    plan = make_schedule("staircase")
    for settings_, match in (
        ({"num_frames": 0}, "at least 1"),
        ({"init": torch.zeros(2, 2, 3, 4, 4)}, "w - delta = 2"),
        ({"init": torch.full((2, 2, 2, 4, 4), float("nan"))}, "NaN"),
        ({"memory": "full"}, "give a FrameMemory"),
        ({"discard": -1}, "negative"),
    ):
        with pytest.raises(ValueError, match=match):
            rollout(plan, **settings_)
    with pytest.raises(ValueError, match="not monotone"):
        rollout(WindowSchedule(2, 1, (1.0, 1.0), 1))
    with pytest.raises(ValueError, match="the network returned shape"):
        next(rollout(plan, lambda x, *_: x[:, :, :1]))
    with pytest.raises(ValueError, match="frames 0 to 1 came out with NaN"):
        next(rollout(plan, lambda x, *_: x * float("nan")))
    with pytest.raises(ValueError, match="history needs a memory"):
        rollout(plan, history=torch.zeros(2, 2, 3, 4, 4))
    with pytest.raises(ValueError, match="saved without a memory"):
        rollout(plan, memory=FullMemory()).load_state_dict(rollout(plan).state_dict())


def test_beyond_the_trained_length():
    plan = make_schedule("outpainting", delta=2, last=6, steps=1)
    with pytest.raises(ValueError, match="trained on 6"):
        list(rollout(plan, num_frames=10, guard=TrainedLength(6)))
    net = SmallNet()
    list(rollout(plan, net, num_frames=12, guard=TrainedLength(6, "crop")))
    assert max(max(ids) - min([*seen, *ids]) + 1 for _, ids, seen in net.seen) == 6
    net = SmallNet()
    list(rollout(plan, net, num_frames=12, memory=FullMemory(), guard=TrainedLength(6, "reindex", keep=1)))
    assert net.seen[-1][1] == [10, 11] and net.seen[-1][2] == [6, 7, 8, 9]
