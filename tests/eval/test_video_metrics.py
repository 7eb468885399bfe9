"""Video metrics against stored numbers of an independent program, and against clips whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mediaspec.eval import video_metrics as vm
from mediaspec.eval.video_metrics.flow import block_matching
from tests.eval.clips import flickering, moving_square

CASES = json.loads((Path(__file__).parents[1] / "data" / "video_metric_cases.json").read_text())


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def test_features_case() -> None:
    case = CASES["features"]
    rows = np.array(case["E"])
    assert vm.consistency_chain(rows) == near(case["consistency"])
    np.testing.assert_allclose(vm.adjacent_cosines(rows), case["adjacent_cos"], rtol=1e-9)
    assert vm.cscv(rows) == near(case["cscv_10"])
    assert vm.frame_similarity(rows) == near(np.mean(case["adjacent_cos"]))
    assert vm.consistency_chain(3 * rows) == near(case["consistency"])  # length of a row says nothing


def test_pixels_case() -> None:
    case = CASES["pixels"]
    frames = np.array(case["video"], np.uint8)
    assert vm.temporal_flicker(frames) == near(case["flicker"])
    assert vm.interpolation_smoothness(frames) == near(case["interp_smoothness"])


@pytest.mark.parametrize("case", CASES["dynamic"], ids=lambda one: f"{one['radii'][0]}-{one['moving']}")
def test_dynamic_cases(case: dict) -> None:
    assert vm.is_dynamic(case["radii"], case["h"], case["w"], case["T"]) is case["moving"]


def test_warp_case() -> None:
    case = CASES["warp"]
    image = np.array(case["img"])
    shifted = np.roll(image, case["shift_x"], axis=1)
    flow = np.zeros((1, *image.shape, 2))
    flow[..., 0] = case["shift_x"]
    video = np.stack([image, shifted])
    assert vm.warping_error(video, flow, -flow)[0] == pytest.approx(case["error_with_true_flow"], abs=1e-12)
    assert vm.warping_error(video, 0 * flow, 0 * flow)[0] == near(case["error_with_zero_flow"])
    warped, _ = vm.backward_warp(image, np.full((*image.shape, 2), 0.5))
    np.testing.assert_allclose(warped[:3, :3], case["half_pixel"], rtol=0, atol=1e-9)


def test_pixels_that_one_frame_hides_are_left_out() -> None:
    """Flow forth and back that do not meet mask the pixel; so do flows that leave the picture."""
    forward = np.zeros((6, 6, 2))
    backward = np.zeros((6, 6, 2))
    assert vm.visible(forward, backward).all()
    backward[2, 3] = (1.0, 0.0)  # gap 1 > 0.01 * 1 + 0.5
    assert not vm.visible(forward, backward)[2, 3] and vm.visible(forward, backward).sum() == 35
    forward[:, -1, 0] = 0.5
    assert not vm.visible(forward, backward)[:, -1].any()
    hidden = vm.warping_error(np.zeros((2, 6, 6)), np.full((1, 6, 6, 2), 9.0), np.zeros((1, 6, 6, 2)))
    assert hidden == (0.0, 0.0)


def test_a_frozen_clip_wins_every_steadiness_number_and_does_not_move() -> None:
    frozen = np.repeat(moving_square(1), 12, 0)
    assert vm.temporal_flicker(frozen) == vm.interpolation_smoothness(frozen) == 1.0
    flow = vm.load_flow("blocks")(frozen[:-1], frozen[1:])
    assert not flow.any() and not vm.is_dynamic(vm.motion_radii(flow), 32, 32)


def test_flicker_lowers_both_pixel_scores() -> None:
    calm = moving_square()
    assert vm.temporal_flicker(flickering(calm)) < vm.temporal_flicker(calm)
    assert vm.interpolation_smoothness(flickering(calm)) < vm.interpolation_smoothness(calm)


@pytest.mark.parametrize("name", ["blocks", "farneback", "dis"])
@pytest.mark.parametrize(("dx", "dy"), [(3, 0), (0, -2), (2, 3)])
def test_flow_finds_a_shift(name: str, dx: int, dy: int) -> None:
    """A textured picture moved as a whole: the median of the inner flow is the shift."""
    if name != "blocks":
        pytest.importorskip("cv2")
    rng = np.random.default_rng(3)
    picture = np.kron(rng.integers(0, 255, (16, 16, 3)), np.ones((4, 4, 1))).astype(np.uint8)
    moved = np.roll(picture, (dy, dx), axis=(0, 1))
    flow = vm.load_flow(name)(picture[None], moved[None])
    assert flow.shape == (1, 64, 64, 2) and flow.dtype == np.float32
    inner = flow[0, 12:-12, 12:-12].reshape(-1, 2)
    np.testing.assert_allclose(np.median(inner, 0), (dx, dy), atol=0.25)


def test_block_matching_does_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    from mediaspec.eval.video_metrics import flow

    clip = moving_square(6, texture=10)
    whole = block_matching(clip[:-1], clip[1:])
    monkeypatch.setattr(flow, "CHUNK", 1)
    np.testing.assert_array_equal(block_matching(clip[:-1], clip[1:]), whole)


@pytest.mark.parametrize("name", ["blocks", "farneback", "dis"])
@pytest.mark.parametrize("shape", [(3, 1, 1, 3), (2, 5, 9, 3), (2, 33, 17, 3)])
def test_flow_of_odd_and_tiny_pictures(name: str, shape: tuple[int, ...]) -> None:
    if name != "blocks":
        pytest.importorskip("cv2")
    frames = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
    forward, backward = vm.estimate_flow(vm.load_flow(name), frames)
    assert forward.shape == backward.shape == (shape[0] - 1, *shape[1:3], 2)
    assert np.isfinite(forward).all() and np.isfinite(backward).all()


def test_true_motion_explains_the_clip_and_flicker_does_not() -> None:
    calm = moving_square(8, step=2, texture=12)
    errors = {}
    for name, clip in {"calm": calm, "flicker": flickering(calm, 20)}.items():
        errors[name] = vm.warping_error(clip / 255.0, *vm.estimate_flow(vm.load_flow("blocks"), clip))
    assert errors["calm"][0] < 0.3 * errors["flicker"][0] and errors["calm"][1] > 0.5


def test_fast_change_sees_fast_waves_only() -> None:
    """A wave of amplitude 20 has an rms of 20 / sqrt 2 at 0.4 cycles a frame, and next to none in the band at 0.05."""
    time = np.arange(80)

    def wave(frequency: float) -> np.ndarray:
        value = 120 + 20 * np.sin(2 * np.pi * frequency * time)
        return np.rint(value).astype(np.uint8)[:, None, None, None] * np.ones((1, 5, 3, 3), np.uint8)

    assert vm.fast_change(wave(0.4)) == pytest.approx(20 / np.sqrt(2), rel=0.02)
    assert vm.fast_change(wave(0.05)) < 0.5
    spectrum = vm.temporal_spectrum(wave(0.4))
    assert spectrum.shape == (16,) and spectrum.argmax() == 12 and spectrum.sum() == pytest.approx(200, rel=0.03)
    assert vm.fast_change(wave(0.4)[:5, :, :, :1]) > 0  # one channel, odd length
    with pytest.raises(ValueError, match="at least 4"):
        vm.fast_change(wave(0.4)[:3])


def test_one_cut_lowers_cscv_and_an_even_drift_does_not() -> None:
    angle = np.linspace(0, 1.2, 16)
    even = np.stack([np.cos(angle), np.sin(angle)], 1)
    jump = np.repeat(even[[0, -1]], 8, 0)
    assert vm.cscv(even) == pytest.approx(1, abs=1e-9) and vm.cscv(jump) < 0.5
    assert vm.cscv(np.array([[1.0, 0], [-1, 0]])) == 0.0


def test_dynamic_stride_is_python_rounding() -> None:
    assert [vm.dynamic_stride(fps) for fps in (1, 8, 12, 20, 24, 30)] == [1, 1, 2, 2, 3, 4]
    with pytest.raises(ValueError, match="positive"):
        vm.dynamic_stride(0)


def test_attention_diagnosis() -> None:
    eye = vm.diagnose_attention(torch.eye(8)[None], torch.linspace(0, 1, 8)[None])
    assert eye.diagonal == 1 and eye.row_step == pytest.approx(2) and sum(eye.rho_histogram) == pytest.approx(1)
    even = vm.diagnose_attention(torch.full((8, 8), 1 / 8))
    assert even.diagonal == pytest.approx(1 / 8) and even.row_step == 0 and even.rho_histogram == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vm.temporal_flicker(np.zeros((1, 4, 4, 3), np.uint8)), "at least 2"),
        (lambda: vm.interpolation_smoothness(np.zeros((2, 4, 4, 3), np.uint8)), "at least 3"),
        (lambda: vm.temporal_flicker(np.zeros((3, 4, 4, 3))), "uint8"),
        (lambda: vm.temporal_flicker(np.zeros((3, 0, 4, 3), np.uint8)), "no pixels"),
        (lambda: vm.cscv(np.array([[1.0, np.nan], [1, 1]])), "NaN"),
        (lambda: vm.cscv(np.zeros((2, 2))), "no direction"),
        (lambda: vm.cscv(np.ones((1, 2))), "T >= 2"),
        (lambda: vm.load_flow("raft"), "there is no flow"),
        (lambda: block_matching(*[np.zeros((1, 4, 4, 3), np.uint8)] * 2, window=4), "odd window"),
        (lambda: vm.warping_error(np.zeros((2, 4, 4)), np.zeros((1, 4, 4, 2)), np.zeros((2, 4, 4, 2))), "both ways"),
        (lambda: vm.diagnose_attention(torch.ones(4, 4)), "sum to 1"),
        (lambda: vm.diagnose_attention(torch.ones(3, 4)), "N, N"),
    ],
)
def test_bad_input_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
