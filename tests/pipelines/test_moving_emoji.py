"""The shipped text-to-video model loads offline, makes clips, and its reader reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

import mediaspec
from mediaspec.models.clip_reader import ATTRIBUTES, load_clip_reader
from mediaspec.pipelines.video_models import load_moving_emoji

FOLDER = Path(mediaspec.__file__).parent / "models" / "moving_emoji"
CAPTION = "a yellow taxi moves left on a grey road"


@pytest.fixture(scope="module")
def pipe():
    pipe = load_moving_emoji()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make(pipe, steps: int = 2, seed: int = 0, num_frames: int = 16, prompt: str = CAPTION) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    made = pipe(
        prompt,
        num_frames=num_frames,
        num_inference_steps=steps,
        guidance_scale=4.0,
        generator=generator,
        output_type="np",
    )
    return np.asarray(made.frames[0])


def test_it_is_made_of_library_classes(pipe) -> None:
    names = {type(part).__name__ for part in pipe.components.values() if part is not None}
    assert names == {"UNetMotionModel", "AutoencoderKL", "CLIPTextModel", "CLIPTokenizer", "DDIMScheduler"}
    assert pipe.unet.config.motion_max_seq_length == 32 and pipe.vae.config.scaling_factor == 1.0
    assert all(p.dtype == torch.float32 for p in pipe.unet.parameters())
    assert pipe.scheduler.config.prediction_type == "v_prediction"


def test_clips_are_finite_and_follow_the_seed(pipe) -> None:
    first = make(pipe)
    assert first.shape == (16, 64, 64, 3) and np.isfinite(first).all() and first.std() > 0.01
    assert np.array_equal(first, make(pipe))
    assert not np.array_equal(first, make(pipe, seed=1))


def test_the_prompt_matters(pipe) -> None:
    other = make(pipe, prompt="a red apple spins on white snow")
    assert np.abs(other - make(pipe)).mean() > 0.05


def test_weights_stay_small() -> None:
    total = sum(f.stat().st_size for f in FOLDER.rglob("*") if f.is_file())
    assert total <= 20 * 2**20
    assert sum(f.stat().st_size for f in (FOLDER / "reader").iterdir()) <= 2 * 2**20


@pytest.mark.slow
def test_clips_show_their_captions(pipe) -> None:
    reader = load_clip_reader()
    captions = (CAPTION, "a red apple spins on green grass", "a soccer ball moves up in a blue sky")
    scores = []
    for seed, caption in enumerate(captions):
        frames = (make(pipe, 12, seed, prompt=caption) * 255 + 0.5).astype(np.uint8)
        found = reader.score(frames, caption)
        shown = (found["subject"], found["place"], reader.kind_of_motion(frames, caption))
        scores.append(torch.stack([one.mean() for one in shown]))
    assert (torch.stack(scores).mean(0) > 0.5).all(), scores


def test_reader_gives_probabilities_per_frame_whatever_the_chunk() -> None:
    reader = load_clip_reader()
    frames = np.random.default_rng(0).integers(0, 256, (21, 64, 64, 3), dtype=np.uint8)
    found = reader.read(frames)
    for name in ATTRIBUTES:
        assert found[name].shape == (21, len(reader.words[name]))
        assert torch.allclose(found[name].sum(-1), torch.ones(21), atol=1e-5)
        assert torch.allclose(found[name], reader.read(frames, chunk=4)[name], atol=1e-4)
    score = reader.score(torch.from_numpy(frames), CAPTION)
    assert set(score) == {*ATTRIBUTES, "all"} and all(v.shape == (21,) for v in score.values())
    assert torch.equal(score["subject"], found["subject"][:, reader.words["subject"].index("yellow taxi")])
    assert len(reader.read(frames[:1])["motion"]) == 1


def test_reader_says_what_it_cannot_read(tmp_path: Path) -> None:
    reader = load_clip_reader()
    with pytest.raises(ValueError, match="cannot read the caption"):
        reader.parse("a purple cow moves left on a grey road")
    with pytest.raises(ValueError, match=r"give \[N, 64, 64, 3\] uint8"):
        reader.read(np.zeros((4, 64, 64, 3), np.float32))
    with pytest.raises(ValueError, match="is missing"):
        load_clip_reader(tmp_path)
