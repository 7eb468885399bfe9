"""Blocks of frames as packed tokens and back."""

from __future__ import annotations

import pytest
import torch

from mediaspec.models.block_codec import BlockCodec


def blocks(length: int, count: int = 64, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(length)
    scale = torch.linspace(2.0, 0.1, width)
    return torch.randn(1, count, length, 4, 4, width) * scale + 0.5, torch.randn(1, count, length * 3)


def fitted(length: int, packed: int) -> BlockCodec:
    torch.manual_seed(0)
    codec = BlockCodec(6, packed, length, 3)
    codec.zero_outputs()
    codec.fit(*blocks(length, 400))
    return codec


def test_nothing_is_lost_where_nothing_is_dropped() -> None:
    frames, motion = blocks(2)
    codec = fitted(2, 48)
    packed = codec.pack(frames, motion)
    assert packed.shape == (1, 64, 4, 48)
    torch.testing.assert_close(codec.unpack(packed, motion), frames.flatten(3, 4), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [2, 4])
def test_principal_components_keep_most(length: int) -> None:
    frames, motion = blocks(length)
    errors = [
        (codec.unpack(codec.pack(frames, motion), motion) - frames.flatten(3, 4)).square().mean().item()
        for codec in (fitted(length, size) for size in (12, 24, 40))
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] < float(frames.var())


def test_a_component_more_than_the_best_basis_cannot_be_had() -> None:
    """The error of the linear codec is the energy of the dropped directions of the data it was fitted to."""
    frames, motion = blocks(2, 400)
    codec = fitted(2, 20)
    rows = frames.reshape(1, 400, 1, 2, 2, 2, 2, 2, 6).permute(0, 1, 2, 4, 6, 3, 5, 7, 8).reshape(-1, 48)
    spread = torch.linalg.eigvalsh(torch.cov(rows.T, correction=0))
    lost = (codec.unpack(codec.pack(frames, motion), motion) - frames.flatten(3, 4)).square().mean() * 48
    torch.testing.assert_close(lost, spread[:28].sum(), rtol=1e-3, atol=1e-4)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        BlockCodec(6, 12, 3, 3)
    with pytest.raises(ValueError, match="write 1 to 48"):
        BlockCodec(6, 49, 2, 3)
    with pytest.raises(ValueError, match="give at least 48"):
        BlockCodec(6, 24, 2, 3).fit(*blocks(2, 8))
