"""One timestep per frame on UNetMotionModel and Wan."""

from __future__ import annotations

import pytest
import torch

from mediaspec.pipelines.frame_times import frame_times, token_timesteps

from .tiny_video import motion_unet, wan_transformer


def inputs(frames: int = 4, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    return torch.randn(rows, 4, frames, 8, 8), torch.randn(rows * frames, 8, 16)


@torch.no_grad()
def test_equal_timesteps_change_nothing_and_different_ones_do() -> None:
    unet = motion_unet()
    latents, text = inputs()
    plain = unet(latents, 300, encoder_hidden_states=text).sample
    per_row = unet(latents, torch.tensor([300, 20]), encoder_hidden_states=text).sample
    with frame_times(unet):
        assert torch.equal(unet(latents, 300, encoder_hidden_states=text).sample, plain)
        same = unet(latents, torch.full((2, 4), 300), encoder_hidden_states=text).sample
        torch.testing.assert_close(same, plain, atol=1e-5, rtol=1e-5)
        rows = torch.tensor([300, 20])[:, None].expand(2, 4)
        torch.testing.assert_close(unet(latents, rows, text).sample, per_row, atol=1e-5, rtol=1e-5)
        mixed = unet(latents, torch.tensor([[0, 100, 500, 900]]), encoder_hidden_states=text).sample
        assert (mixed - plain).abs().max() > 1e-3
        assert torch.equal(unet(latents, 300, encoder_hidden_states=text).sample, plain)
    assert torch.equal(unet(latents, 300, encoder_hidden_states=text).sample, plain)


@torch.no_grad()
def test_frames_that_do_not_look_at_each_other_see_their_own_time() -> None:
    """With attention along time silenced, only its norm ties frames; where that is silent too, frame n of a mixed call
    is the frame of a call at its time."""
    unet = motion_unet()
    for name, weight in unet.named_parameters():
        if "motion_modules" in name and "proj_out" in name:
            torch.nn.init.zeros_(weight)
    latents, text = inputs(rows=1)
    times = torch.tensor([[0, 100, 500, 900]])
    with frame_times(unet):
        mixed = unet(latents, times, encoder_hidden_states=text).sample
    for n in range(4):
        alone = unet(latents, times[0, n], encoder_hidden_states=text).sample
        torch.testing.assert_close(mixed[:, :, n], alone[:, :, n], atol=1e-5, rtol=1e-4)


def test_gradients_reach_the_time_embedding() -> None:
    unet = motion_unet()
    latents, text = inputs()
    with frame_times(unet):
        unet(latents, torch.tensor([[0, 100, 500, 900]]), encoder_hidden_states=text).sample.square().mean().backward()
        weight = unet.time_embedding.linear_1.weight
        assert weight.grad is not None and weight.grad.abs().max() > 0
        unet.enable_gradient_checkpointing()
        with pytest.raises(ValueError, match="disable_gradient_checkpointing"):
            unet(latents, torch.tensor([[0, 100, 500, 900]]), encoder_hidden_states=text)


@torch.no_grad()
def test_shapes_that_do_not_fit_are_refused_and_an_error_leaves_no_trace() -> None:
    unet = motion_unet()
    latents, text = inputs()
    plain = unet(latents, 300, encoder_hidden_states=text).sample
    with frame_times(unet):
        for shape in ((2, 3), (3, 4), (2, 4, 1)):
            with pytest.raises(ValueError, match="timestep has shape"):
                unet(latents, torch.zeros(shape), encoder_hidden_states=text)
        with pytest.raises(RuntimeError):
            unet(latents, torch.zeros(2, 4), encoder_hidden_states=text[..., :3])
        assert torch.equal(unet(latents, 300, encoder_hidden_states=text).sample, plain)
    with pytest.raises(ValueError, match="time_proj"):
        frame_times(torch.nn.Linear(2, 2))


@torch.no_grad()
def test_wan_takes_a_timestep_per_token() -> None:
    model = wan_transformer()
    latents, text = torch.randn(1, 4, 3, 4, 4), torch.randn(1, 6, 16)
    plain = model(latents, torch.tensor([300.0]), text).sample
    same = model(latents, token_timesteps(torch.full((1, 3), 300.0), 4, 4), text).sample
    torch.testing.assert_close(same, plain, atol=1e-5, rtol=1e-4)
    mixed = model(latents, token_timesteps(torch.tensor([[0.0, 300.0, 900.0]]), 4, 4), text).sample
    assert (mixed - plain).abs().max() > 1e-4
    assert token_timesteps(torch.tensor([[1, 2]]), 2, 4).tolist() == [[1, 1, 2, 2]]
    assert token_timesteps(torch.tensor([[1, 2]]), 2, 2, (2, 2, 2)).tolist() == [[2]]
    with pytest.raises(ValueError, match="divide"):
        token_timesteps(torch.tensor([[1, 2]]), 3, 4)
