"""What VideoContinuationPipeline refuses, and that nothing is on disk then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mediaspec.models.frame_history import MEMORIES
from mediaspec.pipelines.auto import AutoPipeline
from mediaspec.pipelines.shipped_worlds import TRAINABLE, embedded_worlds
from mediaspec.pipelines.video_continuation import VideoContinuationPipeline

from .tiny_video import wan
from .tiny_worlds import GIVEN, frame_world, walk

N = 10
CALL: dict[str, Any] = {"num_inference_steps": 2, "output_type": "pt"}


@pytest.fixture(scope="module")
def pipe() -> VideoContinuationPipeline:
    pipe = VideoContinuationPipeline(frame_world("pack_k2"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_frames": 0}, "whole number"),
        ({"output_type": "pli"}, "did you mean 'pil'"),
        ({"prompt": "a ball"}, "actions= and poses="),
        ({"prompt": [None, "a ball"]}, "actions= and poses="),
        ({"negative_prompt": "a ball"}, "actions= and poses="),
        ({"prompt_embeds": torch.zeros(1, 2, 3)}, "actions= and poses="),
        ({"actions": None}, "needs actions"),
        ({"actions": np.full(GIVEN + N, 7)}, "0 to 2"),
        ({"poses": np.zeros((GIVEN + N, 3))}, "columns of the world"),
        ({"poses": np.full((GIVEN + N, 2), np.nan)}, "NaN"),
        ({"actions": np.full(5, 2)}, "5 rows for 19 frames"),
        ({"memory": "window"}, "trained with 'pack_k2'"),
        ({"memory": {"kep": 3}}, "did you mean 'keep'"),
        ({"memory": 3}, "FrameMemory"),
        ({"schedule": "outpainted"}, "outpainting"),
        ({"schedule": {"stps": 3}, "num_inference_steps": None}, "steps"),
        ({"schedule": 5}, "WindowSchedule"),
        ({"schedule": "fifo"}, r"num_inference_steps=2, and the steps of schedule 'fifo' follow from .*frames, parts"),
        ({"guidance_scale": 3.0}, "no guidance"),
        ({"video": np.zeros((0, 64, 64, 3))}, "no pictures"),
        ({"video": np.full((2, 64, 64, 3), 7.0)}, "0..1"),
        ({"video": np.full((2, 64, 64, 3), np.nan)}, "NaN"),
        ({"video": np.zeros((2, 32, 64, 3))}, "64 x"),
        ({"image": np.zeros((64, 64, 3))}, "one of video"),
        ({"seeds": [1, 2]}, "2 seeds"),
        ({"height": 32}, "64"),
        ({"trained_length": {"frams": 3}}, "did you mean 'frames'"),
        ({"callback_on_step_end_tensor_inputs": ["noise"]}, "latents"),
        ({"output_path": "x", "output_type": "latent"}, "writes no pictures"),
        ({"sampler": "eular"}, "euler"),
        ({"fps": 0}, "fps=0"),
        (  # the parts of both videos are on disk by then
            {"callback_on_step_end": lambda *_: {"latents": torch.zeros(1)}, "num_videos_per_prompt": 2},
            "the callback returned latents",
        ),
    ],
)  # fmt: skip
def test_refusals_leave_no_file_behind(
    pipe: VideoContinuationPipeline, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    call = {**walk(N), "num_frames": N, **CALL, "output_path": tmp_path / "new" / "walk"}
    with pytest.raises(ValueError, match=message):
        pipe(**{**call, **changes})
    assert not list(tmp_path.iterdir())


def test_a_misspelt_keyword_names_the_nearest(pipe: VideoContinuationPipeline) -> None:
    with pytest.raises(TypeError, match="did you mean 'num_frames'"):
        pipe(num_frame=3)


def test_a_window_that_the_network_cannot_take_leaves_no_file_behind(tmp_path: Path) -> None:
    """Windows that grow would be too long after some steps only, when there is work on disk."""
    pipe = VideoContinuationPipeline(wan(), trained_frames=5)
    pipe.set_progress_bar_config(disable=True)
    call: dict[str, Any] = {"num_frames": 5, "height": 16, "width": 16, "output_path": tmp_path / "new" / "clip"}
    rolling = {"name": "rolling_diffusion", "last": 1}
    for changes, message in (
        ({"schedule": {**rolling, "w": 4}, "trained_length": 3}, "a window of 4 frames; .* trained on 3"),
        ({"schedule": {**rolling, "w": 6}}, "a window of 6 frames; .* trained on 5"),
    ):
        with pytest.raises(ValueError, match=message):
            pipe("a red cat", **call, **changes)
        assert not list(tmp_path.iterdir())


def test_a_wrong_call_does_not_throw_work_away(pipe: VideoContinuationPipeline, tmp_path: Path) -> None:
    call = {**walk(N), "num_frames": N, "seeds": 0, "num_inference_steps": 2, "output_path": tmp_path / "walk"}

    def stop(pipe: Any, step: int, levels: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        pipe._interrupt = step == 3

    pipe(callback_on_step_end=stop, **call)
    parts = tmp_path / "walk.parts"
    before = {path: path.read_bytes() for path in sorted(parts.rglob("*")) if path.is_file()}
    assert parts / "state.pt" in before
    for changes in ({"prompt": "a ball"}, {"negative_prompt": "a ball"}, {"actions": None}):
        with pytest.raises(ValueError, match="actions"):
            pipe(**{**call, **changes, "resume": False})
        assert {path: path.read_bytes() for path in sorted(parts.rglob("*")) if path.is_file()} == before
    assert pipe(**call).stats["resumed"] == [1]


def test_worlds_that_are_not_shipped_name_the_command_that_trains_them() -> None:
    known = {f"{world}/{memory}" for world in TRAINABLE for memory in MEMORIES}
    missing = sorted(known - set(embedded_worlds()))
    assert missing
    for load in (VideoContinuationPipeline, AutoPipeline):
        for name in missing:
            world, memory = name.split("/")
            told = f"{name} are not part of .*train_frame_dit.py --world {world} --memory {memory} .*ship_models.py"
            with pytest.raises(ValueError, match=told):
                load.from_pretrained(name)
    with pytest.raises(ValueError, match="there is no frame world 'panoroom/pack2'; did you mean 'panoroom/pack_k2'"):
        VideoContinuationPipeline.from_pretrained("panoroom/pack2")
    with pytest.raises(ValueError, match="panoroom/pack_k2 is a frame world.*generate continuation"):
        AutoPipeline.from_pretrained("panoroom/pack_k2")
