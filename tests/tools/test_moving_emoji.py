"""The moving-emoji data set and its training parts: grammar, periodic motion, splits, tokenizer, batches."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "moving_emoji"))

import scene
from scene import MOTIONS, PLACES, STATE_INDEX, STATES, SUBJECTS, Clip

TOOLS = Path(__file__).parents[2] / "tools" / "moving_emoji"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> scene.Renderer:
    """A renderer over a home-made icon set: every icon is a red half disc."""
    pytest.importorskip("resvg_py")
    body = '<path d="M8 32a24 24 0 0 1 48 0z" fill="#ff0000"/>'
    data = tmp_path_factory.mktemp("icons")
    folder = data / scene.PACKAGE / "package"
    folder.mkdir(parents=True)
    icons = {name: {"body": body} for name in SUBJECTS.values()}
    (folder / "icons.json").write_text(json.dumps({"icons": icons, "aliases": {}, "width": 64, "height": 64}))
    return scene.Renderer(data)


def test_captions_read_back() -> None:
    clips = scene.combinations()
    assert len(clips) == len(SUBJECTS) * len(MOTIONS) * len(PLACES)
    assert [scene.parse(scene.caption(c)) for c in clips] == clips
    assert scene.caption(Clip("octopus", "spins", "on white snow")) == "an octopus spins on white snow"
    with pytest.raises(ValueError, match="no caption of moving-emoji"):
        scene.parse("a yellow taxi flies on a grey road")


@pytest.mark.parametrize("motion", MOTIONS)
def test_motions_are_periodic_and_stay_on_the_grid(motion: str) -> None:
    clip = Clip("rocket", motion, PLACES[0], lane=2, phase=5)
    shown = scene.states(clip, 96)
    repeat = scene.period(motion)
    assert all(shown[t] == shown[t + repeat] for t in range(96 - repeat))
    assert len(set(shown)) >= 8, "the subject has to move"
    assert all(s in STATE_INDEX for s in shown)


@pytest.mark.parametrize(("motion", "step"), [("moves left", (-4, 0)), ("moves down slowly", (0, 2))])
def test_directions(motion: str, step: tuple[int, int]) -> None:
    shown = scene.states(Clip("rocket", motion, PLACES[0]), 2)
    assert (shown[1][0] - shown[0][0], shown[1][1] - shown[0][1]) == step


def test_subjects_wrap_around_and_scenes_stand_still(renderer: scene.Renderer) -> None:
    clip = renderer.clip(Clip("rocket", "moves right", "on white snow"), 32)
    assert clip.shape == (32, 64, 64, 3) and clip.dtype == np.uint8
    assert (clip[:16] == clip[16:]).all()
    background = (scene.scene("on white snow") * 255 + 0.5).astype(np.uint8)
    drawn = [(frame != background).any(-1).sum() for frame in clip]
    assert max(drawn) - min(drawn) <= 2, "wrapping must not lose a part of the subject"
    assert (clip[:, :10] == background[:10]).all()


def test_drawing_is_the_same_every_time(renderer: scene.Renderer) -> None:
    first = [scene.sample_clip(np.random.default_rng([0, i])) for i in range(4)]
    again = [scene.sample_clip(np.random.default_rng([0, i])) for i in range(4)]
    assert first == again and len(set(first)) == 4
    assert (renderer.clip(first[0]) == scene.Renderer.clip(renderer, again[0])).all()


def test_split_is_disjoint_and_every_word_is_trained() -> None:
    train, held = scene.combinations("train"), scene.combinations("held_out")
    assert not set(train) & set(held) and len(train) + len(held) == len(scene.combinations())
    assert 0.08 < len(held) / (len(held) + len(train)) < 0.15
    assert {(c.subject, c.motion) for c in held} <= {(c.subject, c.motion) for c in train}
    assert {(c.subject, c.place) for c in held} <= {(c.subject, c.place) for c in train}
    drawn = {scene.sample_clip(np.random.default_rng([1, i]), "held_out") for i in range(50)}
    assert all(scene.held_out(c.subject, c.motion, c.place) for c in drawn)
    with pytest.raises(ValueError, match="allowed are"):
        scene.combinations("test")


def test_evaluation_prompts_are_those_on_disk() -> None:
    stored = json.loads((TOOLS / "held_out.json").read_text())
    assert stored == scene.evaluation_prompts()
    assert len(set(stored["prompts"])) == 64 and len(stored["pairs"]) == 32
    held = {scene.caption(c) for c in scene.combinations("held_out")}
    assert set(stored["prompts"]) <= held
    for a, b in stored["pairs"]:
        first, second = scene.parse(a), scene.parse(b)
        assert {a, b} <= held and first.subject == second.subject and first.place != second.place


def test_every_word_is_one_token(tmp_path: Path) -> None:
    import parts

    tokenizer = parts.build_tokenizer(tmp_path)
    texts = [scene.caption(c) for c in scene.combinations()]
    ids = tokenizer(texts).input_ids
    assert all(len(i) == len(t.split()) + 2 for i, t in zip(ids, texts, strict=True))
    assert max(len(i) for i in ids) <= parts.TEXT_LENGTH
    assert len(tokenizer("a zebra é").input_ids) > 5, "other words fall back to letters"
    assert parts.token_table(tokenizer)[""].shape == (parts.TEXT_LENGTH,)


def test_training_batches() -> None:
    pytest.importorskip("diffusers")
    import parts
    import train_denoiser

    rng = np.random.default_rng(0)
    numbers = torch.arange(len(STATES)).half().view(1, 1, -1, 1, 1, 1)
    grid = numbers.expand(len(SUBJECTS), len(PLACES), -1, 8, 8, 8)
    clip = Clip("rocket", "bounces", PLACES[1], 0, 3)
    expected = [float(STATE_INDEX[s]) for s in scene.states(clip)]
    assert train_denoiser.clip_latents(grid, clip)[:, 0, 0, 0].tolist() == expected
    times = train_denoiser.draw_times("diagonal", rng, 8, 16)
    assert (times.diff(dim=1) >= 0).all() and times.min() >= 0 and times.max() <= 999
    plain = train_denoiser.draw_times("clips", rng, 8, 16)
    assert (plain == plain[:, :1]).all() and plain.unique().numel() == 8
    history = train_denoiser.draw_times("history", rng, 8, 16)
    noisy = history.max(1, keepdim=True).values
    known = (history < noisy).sum(1)
    assert known.min() >= 1 and known.max() <= 4
    assert all(len(row.unique()) == 2 for row in history)
    known = train_denoiser.draw_times("directions", rng, 64, 16) == 0
    assert (known.sum(1) == 1).all() and 24 <= known[:, 0].sum() <= 48 and known[:, 1:].any()
    assert parts.new_scheduler().alphas_cumprod[-1] < 1e-4


def test_pairs_differ_in_the_direction_of_their_captions_alone() -> None:
    pytest.importorskip("diffusers")
    import train_denoiser

    grid = torch.arange(len(STATES)).half().view(1, 1, -1, 1, 1, 1).expand(len(SUBJECTS), len(PLACES), -1, 8, 8, 8)
    texts = [scene.caption(c) for c in scene.combinations()]
    tokens = {text: torch.full((16,), number) for number, text in enumerate(texts)}
    x, ids = train_denoiser.draw_pairs(grid, tokens, np.random.default_rng(1), 6, 16)
    assert x.shape == (12, 8, 16, 8, 8) and (x[:6] == x[6:]).all()
    for clip, right, opposite in zip(x, ids[:6], ids[6:], strict=False):
        told, other = scene.parse(texts[right[0]]), scene.parse(texts[opposite[0]])
        numbers = clip[0, :, 0, 0].tolist()
        phases = range(scene.period(told.motion))
        assert any(
            [float(STATE_INDEX[scene.state(told.motion, 1, p + t)]) for t in range(16)] == numbers for p in phases
        )
        (a,), (b,) = (
            {*told.motion.split()} - {*other.motion.split()},
            {*other.motion.split()} - {*told.motion.split()},
        )
        assert train_denoiser.OPPOSITE[a] == b
        assert (told.subject, told.place) == (other.subject, other.place)
        assert not scene.held_out(other.subject, other.motion, other.place)


def test_opposite_directions_are_moved_apart(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    import parts
    import train_denoiser

    tokenizer = parts.build_tokenizer(tmp_path)
    torch.manual_seed(0)
    encoder = parts.new_text_encoder(tokenizer)
    before = encoder.get_input_embeddings().weight.detach().clone()
    train_denoiser.set_apart(encoder, tokenizer, 1.5)
    after = encoder.get_input_embeddings().weight.detach()
    rows = {word: tokenizer(word).input_ids[1] for word in train_denoiser.OPPOSITE}
    assert set((before != after).any(1).nonzero().flatten().tolist()) == set(rows.values())
    for a, b in (("left", "right"), ("up", "down")):
        assert float((after[rows[a]] - after[rows[b]]).norm()) == pytest.approx(3.0, rel=1e-5)
        assert torch.allclose(after[[rows[a], rows[b]]].mean(0), before[[rows[a], rows[b]]].mean(0), atol=1e-6)


def test_the_learning_rate_falls_when_it_is_told_to() -> None:
    pytest.importorskip("diffusers")
    from train_denoiser import Fall

    fall = Fall(40, 20)
    assert [fall.factor(m) for m in (0, 40, 50, 60, 70)] == [1, 1, 0.5, 0, 0]
    fall.end_in(5, 50)
    assert [round(fall.factor(m), 6) for m in (50, 52.5, 55)] == [0.5, 0.25, 0]
    early = Fall(40, 20)
    early.end_in(4, 10)
    assert [early.factor(m) for m in (10, 12, 14)] == [1, 0.5, 0]


def test_every_frame_can_have_its_own_time() -> None:
    pytest.importorskip("diffusers")
    import parts

    torch.manual_seed(0)
    unet = parts.new_unet().eval()
    times = parts.FrameTimes(unet)
    x, text = torch.randn(1, 8, 4, 8, 8), torch.randn(4, 16, parts.TEXT_WIDTH)
    with torch.no_grad():
        plain = unet(x, torch.tensor([300]), text).sample
        times.set(torch.full((1, 4), 300))
        same = unet(x, torch.tensor([300]), text).sample
        times.set(torch.tensor([[0, 300, 600, 900]]))
        other = unet(x, torch.tensor([300]), text).sample
        times.clear()
        after = unet(x, torch.tensor([300]), text).sample
    assert torch.allclose(plain, same, atol=1e-5) and torch.equal(plain, after)
    assert not torch.allclose(plain, other, atol=1e-4)


def test_latent_statistics_move_into_the_autoencoder() -> None:
    pytest.importorskip("diffusers")
    import make_latents
    import train_vae

    torch.manual_seed(0)
    vae = train_vae.new_vae().eval()
    x = torch.rand(2, 3, 64, 64) * 2 - 1
    mean, std = torch.linspace(-1, 1, 8), torch.linspace(0.5, 2, 8)
    with torch.no_grad():
        before = vae.encode(x).latent_dist
        picture = vae.decode(before.mean).sample
        make_latents.normalise(vae, mean, std)
        after = vae.encode(x).latent_dist
        again = vae.decode(after.mean).sample
    shape = (1, -1, 1, 1)
    assert torch.allclose(after.mean, (before.mean - mean.view(shape)) / std.view(shape), atol=1e-5)
    assert torch.allclose(after.std, before.std / std.view(shape), atol=1e-5)
    assert torch.allclose(picture, again, atol=1e-4)


def test_optimiser_learns_and_resumes() -> None:
    from optimiser import Optimiser

    def run(
        steps: int, state: dict | None = None, model: torch.nn.Module | None = None
    ) -> tuple[float, object, object]:
        torch.manual_seed(1)
        model = model or torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.SiLU(), torch.nn.Conv2d(8, 3, 3))
        optimiser = Optimiser(model, 1e-2, 2e-2)
        if state:
            optimiser.load_state_dict(state)
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))
        for _ in range(steps):
            loss = (model(x) - x[..., 2:-2, 2:-2]).square().mean()
            loss.backward()
            optimiser.step(1.0)
        return loss.item(), optimiser.state_dict(), model

    first, _, _ = run(1)
    last, _, _ = run(30)
    assert last < 0.7 * first
    _, state, model = run(15)
    resumed, _, _ = run(15, state, model)
    assert resumed == pytest.approx(last, rel=1e-4)
