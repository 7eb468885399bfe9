"""RIFLEx: frequencies, and its place in Wan, CogVideoX and HunyuanVideo."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed

from mediaspec.attention.riflex import intrinsic_index, periods, riflex_frequency, set_frequency
from mediaspec.pipelines.riflex import install_riflex

from .tiny_video import cogvideox, hunyuan, wan, wan_transformer


def test_published_periods_and_components() -> None:
    assert periods(44)[:6] == [6, 10, 15, 22, 34, 51]
    assert periods(16)[1] == 20 and periods(16, 256.0)[3] == 50
    assert intrinsic_index(16, 20) == 2 and intrinsic_index(16, 50, base=256.0) == 4 and intrinsic_index(44, 51) == 6
    for bad in ({"channels": 3}, {"channels": 0}):
        with pytest.raises(ValueError, match="channels="):
            periods(**bad)
    with pytest.raises(ValueError, match="repeats_at"):
        intrinsic_index(16, 0)


def test_the_frequency_turns_less_than_once_in_a_long_video_and_stays_in_a_short_one() -> None:
    assert riflex_frequency(16, 2, 97) == pytest.approx(0.9 * 2 * math.pi / 97)
    assert riflex_frequency(16, 2, 10) == pytest.approx(10000 ** (-2 / 16))
    for bad in ({"k": 0}, {"k": 9}, {"share": 0.0}, {"num_frames": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
            riflex_frequency(**{"channels": 16, "k": 2, "num_frames": 97, **bad})


def test_only_the_component_changes() -> None:
    cos, sin = get_3d_rotary_pos_embed(16, ((0, 0), (2, 2)), (2, 2), 30)
    new_cos, new_sin = set_frequency(cos, sin, 30, 1, 0.1)
    frame = torch.arange(30).repeat_interleave(4)
    for table, wanted in ((new_cos, torch.cos(frame * 0.1)), (new_sin, torch.sin(frame * 0.1))):
        torch.testing.assert_close(table[:, 0], wanted, atol=1e-5, rtol=0)
        torch.testing.assert_close(table[:, 1], wanted, atol=1e-5, rtol=0)
    assert torch.equal(new_cos[:, 2:], cos[:, 2:]) and torch.equal(new_sin[:, 2:], sin[:, 2:])
    same_cos, same_sin = set_frequency(cos, sin, 30, 2, 10000 ** (-2 / 4))  # its own frequency gives its own table
    torch.testing.assert_close(same_cos, cos, atol=1e-5, rtol=0)
    torch.testing.assert_close(same_sin, sin, atol=1e-5, rtol=0)


def calls() -> list[Any]:
    def run_wan(model: Any, frames: int) -> torch.Tensor:
        return model(torch.ones(1, 4, frames, 4, 4).cumsum(2), torch.tensor([5]), torch.ones(1, 6, 16)).sample

    def run_cog(model: Any, frames: int) -> torch.Tensor:
        tables = get_3d_rotary_pos_embed(16, ((0, 0), (2, 2)), (2, 2), frames)
        hidden = torch.ones(1, frames, 4, 4, 4).cumsum(1)
        return model(hidden, torch.ones(1, 6, 16), torch.tensor([5]), image_rotary_emb=tables).sample

    def run_hunyuan(model: Any, frames: int) -> torch.Tensor:
        return model(
            torch.ones(1, 4, frames, 4, 4).cumsum(2), torch.tensor([5]), torch.ones(1, 6, 16), torch.ones(1, 6),
            torch.ones(1, 8),
        ).sample  # fmt: skip

    return [(wan_transformer, run_wan), (partial(cogvideox, rotary=True), run_cog), (hunyuan, run_hunyuan)]


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["wan", "cogvideox", "hunyuan"])
@torch.no_grad()
def test_it_acts_on_long_calls_and_leaves_nothing_behind(kind: int) -> None:
    build, run = calls()[kind]
    model = build()
    long, short = run(model, 12), run(model, 3)
    with install_riflex(model, k=1) as handle:
        assert (run(model, 12) - long).abs().max() > 1e-5
        assert torch.equal(run(model, 3), short)
        assert handle.summary() == {"k": 1, "share": 0.9, "calls": 2, "changed": 1}
    assert torch.equal(run(model, 12), long)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="components 1 to 2 along time"):
        install_riflex(wan_transformer())
    with pytest.raises(ValueError, match="rotary ones"):
        install_riflex(cogvideox(), k=1)
    with pytest.raises(ValueError, match="cannot be installed in Linear"):
        install_riflex(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="share=2"):
        install_riflex(wan_transformer(), k=1, share=2)
    with install_riflex(wan(), k=1) as handle:
        assert handle.k == 1
