"""TiARA on the real transformer classes of diffusers, at tiny size."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    WanPipeline,
    WanTransformer3DModel,
)

import mediaspec
from mediaspec.attention.tiara import TiARA
from mediaspec.integrations.tiara_dit_processors import is_foreign
from mediaspec.integrations.tiara_dits import joint_attentions

FRAMES, BATCH = 6, 2
ALWAYS = {"queries_per_frame": 64, "refresh": 1}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wan(image: bool = False) -> tuple[Any, dict[str, Any]]:
    more = {"image_dim": 8, "added_kv_proj_dim": 24} if image else {}
    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=16,
        ffn_dim=32, num_layers=2, **more,
    )  # fmt: skip
    given = {
        "hidden_states": noise(BATCH, 4, FRAMES, 6, 4),
        "timestep": torch.full((BATCH,), 500),
        "encoder_hidden_states": noise(BATCH, 512 if image else 7, 8, seed=1),
    }
    if image:
        given["encoder_hidden_states_image"] = noise(BATCH, 5, 8, seed=2)
    return model, given


def cogvideox(rotary: bool = True, merged: int | None = None) -> tuple[Any, dict[str, Any]]:
    """merged: latent frames of one token, as CogVideoX 1.5 has them."""
    model = CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=8, num_layers=2, sample_width=6, sample_height=6, sample_frames=4 * (FRAMES - 1) + 1,
        max_text_seq_length=7, use_rotary_positional_embeddings=rotary, patch_size_t=merged,
    )  # fmt: skip
    given = {
        "hidden_states": noise(BATCH, FRAMES * (merged or 1), 4, 6, 6),
        "timestep": torch.full((BATCH,), 500),
        "encoder_hidden_states": noise(BATCH, 7, 8, seed=1),
    }
    if rotary:
        angle = noise(FRAMES * 9, 8, seed=2).repeat_interleave(2, 1)
        given["image_rotary_emb"] = (angle.cos(), angle.sin())
    return model, given


def ltx() -> tuple[Any, dict[str, Any]]:
    model = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, cross_attention_dim=24,
        num_layers=2, caption_channels=8,
    )  # fmt: skip
    given = {
        "hidden_states": noise(BATCH, FRAMES * 6, 4),
        "timestep": torch.full((BATCH,), 500),
        "encoder_hidden_states": noise(BATCH, 7, 8, seed=1),
        "encoder_attention_mask": torch.ones(BATCH, 7).bool(),
        "num_frames": FRAMES,
        "height": 3,
        "width": 2,
    }
    return model, given


def hunyuan() -> tuple[Any, dict[str, Any]]:
    model = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=False, text_embed_dim=8,
        pooled_projection_dim=8, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    seen = torch.ones(BATCH, 7)
    seen[0, 5:], seen[1, 3:] = 0, 0
    given = {
        "hidden_states": noise(BATCH, 4, FRAMES, 6, 4),
        "timestep": torch.full((BATCH,), 500),
        "encoder_hidden_states": noise(BATCH, 7, 8, seed=1),
        "encoder_attention_mask": seen,
        "pooled_projections": noise(BATCH, 8, seed=2),
    }
    return model, given


MAKERS = {"wan": wan, "cogvideox": cogvideox, "ltx": ltx, "hunyuan": hunyuan}


@pytest.fixture(params=MAKERS, scope="module")
def family(request) -> tuple[str, Any, dict[str, Any]]:
    torch.manual_seed(0)  # the classes of diffusers draw their weights from torch's generator
    model, given = MAKERS[request.param]()
    sharpen(model)
    return request.param, model.eval(), given


def sharpen(model: Any) -> None:
    """Fresh weights attend everywhere alike; larger ones give attention that a bias can change."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("to_q.weight", "to_k.weight", "add_q_proj.weight", "add_k_proj.weight")):
                weight.mul_(4)


@torch.no_grad()
def out_of(model: Any, given: dict[str, Any], **changes: Any) -> torch.Tensor:
    return model(**{**given, **changes}, return_dict=False)[0]


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def test_enable_changes_and_remove_restores(family):
    name, model, given = family
    before = out_of(model, given)
    processors = dict(model.attn_processors)
    handle = mediaspec.enable(model, attention=TiARA(joint_alpha=1.5, **ALWAYS))
    edited = out_of(model, given)
    assert gap(edited, before) > 1e-4 and edited.isfinite().all()
    found = handle.summary()
    assert found["modules"] == 2 and found["calls"] == 2
    assert 0 < found["mean_delta"] <= 1.5 and 0 <= found["mean_rho"] <= 1
    assert 0 < found["own_frame_mass_after"] < found["own_frame_mass"] < 1
    wanted = {"hunyuan": ["transformer_blocks.0.attn", "single_transformer_blocks.0.attn"]}
    default = [f"{'blocks' if name == 'wan' else 'transformer_blocks'}.{i}.attn1" for i in (0, 1)]
    assert list(found["by_module"]) == wanted.get(name, default)
    handle.remove()
    assert model.attn_processors == processors
    assert torch.equal(out_of(model, given), before)


def test_zero_strength_is_the_model_itself(family):
    _, model, given = family
    before = out_of(model, given)
    for config in (TiARA(joint_alpha=0.0, **ALWAYS), TiARA(alpha=0, **ALWAYS)):
        with mediaspec.enable(model, attention=config) as handle:
            assert torch.equal(out_of(model, given), before)
            found = handle.summary()
            assert found["modules"] == 2 and found["mean_delta"] == 0 and found["own_frame_mass"] > 0


def test_our_processors_are_the_models_own(family):
    """A tiny strength goes through all of our code and must give what the model gives: rotation, norms, masks."""
    _, model, given = family
    before = out_of(model, given)
    for route in ("auto", "dense", "columns", "split"):
        with mediaspec.enable(model, attention=TiARA(joint_alpha=1e-7, route=route, **ALWAYS)):
            assert gap(out_of(model, given), before) < 2e-5, route


@pytest.mark.parametrize("mode", ["frame", "self_token", "neighbourhood"])
def test_routes_give_one_result(family, mode):
    _, model, given = family
    found = {}
    for route in ("dense", "subtract") + (("columns", "split") if mode == "frame" else ()):
        with mediaspec.enable(model, attention=TiARA(joint_alpha=1.2, mode=mode, route=route, **ALWAYS)):
            found[route] = out_of(model, given)
    for route, out in found.items():
        assert gap(out, found["dense"]) < 5e-5, route
    assert gap(found["dense"], out_of(model, given)) > 1e-5


def test_rows_of_a_guidance_batch_are_independent(family):
    """Both halves of guidance in one batch: each is edited as it is alone."""
    _, model, given = family
    with mediaspec.enable(model, attention=TiARA(joint_alpha=1.5, **ALWAYS)):
        both = out_of(model, given)
        for row in range(BATCH):
            one = {key: x[row : row + 1] if isinstance(x, torch.Tensor) else x for key, x in given.items()}
            assert gap(out_of(model, one), both[row : row + 1]) < 2e-5


def test_padded_text_does_not_matter():
    torch.manual_seed(0)
    model, given = hunyuan()
    sharpen(model)
    other = given["encoder_hidden_states"].clone()
    other[0, 5:], other[1, 3:] = 9.0, -9.0
    with mediaspec.enable(model.eval(), attention=TiARA(joint_alpha=1.5, **ALWAYS)):
        assert gap(out_of(model, given), out_of(model, given, encoder_hidden_states=other)) < 1e-5


def test_save_and_load(family, tmp_path):
    _, model, given = family
    before = out_of(model, given)
    with mediaspec.enable(model, attention=TiARA(**ALWAYS)):
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(out_of(loaded, given), before)


@pytest.mark.parametrize("maker", [wan, cogvideox])
def test_fused_projections(maker):
    """Fused before or after enabling; CogVideoX puts other processors in, and the edit comes back."""
    torch.manual_seed(0)
    model, given = maker()
    sharpen(model.eval())
    config = TiARA(joint_alpha=1.5, **ALWAYS)
    with mediaspec.enable(model, attention=config):
        wanted = out_of(model, given)
        model.fuse_qkv_projections()
        assert gap(out_of(model, given), wanted) < 2e-5
    fused = out_of(model, given)
    assert gap(fused, wanted) > 1e-4
    handle = mediaspec.enable(model, attention=config)
    assert gap(out_of(model, given), wanted) < 2e-5
    handle.remove()
    assert torch.equal(out_of(model, given), fused)


def test_image_tokens_of_wan_are_left_alone():
    torch.manual_seed(0)
    model, given = wan(image=True)
    sharpen(model.eval())
    before = out_of(model, given)
    own = {key: one for key, one in model.attn_processors.items() if "attn2" in key}
    with mediaspec.enable(model, attention=TiARA(joint_alpha=1.5, **ALWAYS)) as handle:
        assert gap(out_of(model, given), before) > 1e-5
        assert handle.summary()["modules"] == 2
        assert all(model.attn_processors[key] is one for key, one in own.items())
    assert torch.equal(out_of(model, given), before)


@pytest.mark.parametrize("changes", [{"rotary": False}, {"merged": 2}])
def test_other_cogvideox(changes):
    """Learned positions; and two latent frames in one token."""
    torch.manual_seed(0)
    model, given = cogvideox(**changes)
    sharpen(model.eval())
    before = out_of(model, given)
    with mediaspec.enable(model, attention=TiARA(joint_alpha=1e-7, **ALWAYS)):
        assert gap(out_of(model, given), before) < 2e-5
    with mediaspec.enable(model, attention=TiARA(joint_alpha=1.5, **ALWAYS)) as handle:
        assert gap(out_of(model, given), before) > 1e-5
        assert model.transformer_blocks[0].attn1.processor.edit.layout(FRAMES * 9, 7).frames == FRAMES
        assert handle.summary()["modules"] == 2


def test_group_offload():
    torch.manual_seed(0)
    model, given = wan()
    sharpen(model.eval())
    config = TiARA(joint_alpha=1.5, **ALWAYS)
    with mediaspec.enable(model, attention=config):
        wanted = out_of(model, given)
    model.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")
    with mediaspec.enable(model, attention=config):
        assert torch.equal(out_of(model, given), wanted)


@pytest.mark.slow  # torch loads its compiler
def test_compiled_model():
    """Compiled before and after enabling: the edit takes part, with and without a kept row."""
    torch.manual_seed(0)
    model, given = wan()
    sharpen(model.eval())
    with mediaspec.enable(model, attention=TiARA(joint_alpha=1.5, refresh=2, queries_per_frame=64)) as handle:
        compiled = torch.compile(model, backend="eager")
        for step in range(3):
            handle.set_step(step)
            wanted = out_of(model, given, hidden_states=given["hidden_states"] + step)
            handle.set_step(step)
            found = out_of(compiled, given, hidden_states=given["hidden_states"] + step)
            assert gap(found, wanted) < 1e-4, step
        assert handle.summary()["calls"] == 12


def test_cache_contexts_keep_their_own_rows():
    """A row of "cond" is not used for "uncond", and is kept for `refresh` steps in each."""
    torch.manual_seed(0)
    model, given = wan()
    sharpen(model.eval())
    other = noise(BATCH, 7, 8, seed=5)
    uncond = noise(BATCH, 4, FRAMES, 6, 4, seed=6)
    with mediaspec.enable(model, attention=TiARA(joint_alpha=1.5, refresh=2, queries_per_frame=64)) as handle:
        rows = model.blocks[0].attn1.processor.edit.rows
        for step in range(2):
            handle.set_step(step)
            with model.cache_context("cond"):
                out_of(model, given)
            with model.cache_context("uncond"):
                out_of(model, given, encoder_hidden_states=other, hidden_states=uncond)
        kept = {branch: one for (branch, _), one in rows._kept.items()}
        assert set(kept) == {"cond", "uncond"} and all(one.step == 0 for one in kept.values())
        assert not torch.equal(kept["cond"].edit.delta, kept["uncond"].edit.delta)
        handle.set_step(2)
        with model.cache_context("cond"):
            out_of(model, given)
        assert [one.step for (branch, _), one in rows._kept.items() if branch == "cond"] == [2]
        assert handle.summary()["by_step"].keys() == {0, 1, 2}


def test_a_copy_is_the_plain_model():
    torch.manual_seed(0)
    model, given = wan()
    sharpen(model.eval())
    before = out_of(model, given)
    with mediaspec.enable(model, attention=TiARA(joint_alpha=1.5, **ALWAYS)) as handle:
        out_of(model, given)
        copied = copy.deepcopy(model)
        assert torch.equal(out_of(copied, given), before) and handle.summary()["calls"] == 2
    assert type(copied.blocks[0].attn1.processor) is type(model.blocks[0].attn1.processor)
    config = TiARA(joint_alpha=1.5, **ALWAYS)
    with mediaspec.enable(copied, attention=config) as handle, copied.cache_context("cond"):
        assert gap(out_of(copied, given), before) > 1e-5 and handle.context.branch == "cond"
    assert torch.equal(out_of(copied, given), before)


def test_two_transformers_are_counted_apart():
    """Wan 2.2: modules of both have the same names, and each of them has to be reached."""
    torch.manual_seed(0)
    (high, given), (low, _) = wan(), wan()
    pipe = WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=high.eval(), transformer_2=low.eval(), boundary_ratio=0.5,
    )  # fmt: skip
    pipe.scheduler.set_timesteps(4)
    before = [out_of(model, given) for model in (high, low)]
    with mediaspec.enable(pipe, attention=TiARA(joint_alpha=1.5, **ALWAYS)) as handle:
        for model, t in zip((high, high, high, low), pipe.scheduler.timesteps):
            out_of(model, given, timestep=t.expand(BATCH))
        found = handle.summary()
        assert (
            found["modules"] == found["installed"] == 4
            and found["calls"] == 8
            and list(found["by_step"]) == [0, 1, 2, 3]
        )
        calls = {name: one["calls"] for name, one in found["by_module"].items()}
        assert calls["transformer.blocks.0.attn1"] == 3 and calls["transformer_2.blocks.0.attn1"] == 1
    assert all(torch.equal(out_of(model, given), one) for model, one in zip((high, low), before))


def test_a_second_video_measures_its_own_rows():
    """Also where the steps are told and fewer than `refresh`."""
    torch.manual_seed(0)
    model, given = wan()
    sharpen(model.eval())
    config = TiARA(joint_alpha=1.5, refresh=4, queries_per_frame=64)
    other = {**given, "hidden_states": noise(BATCH, 4, FRAMES, 6, 4, seed=9)}
    with mediaspec.enable(model, attention=config) as handle:
        for step in range(2):
            handle.set_step(step, 2)
            out_of(model, given)
        handle.set_step(0, 2)
        second = out_of(model, other)
    with mediaspec.enable(model, attention=config):
        assert torch.equal(out_of(model, other), second)


def test_steps_and_layers():
    torch.manual_seed(0)
    model, given = wan()
    sharpen(model.eval())
    before = out_of(model, given)
    config = TiARA(joint_alpha=1.5, layers=[1], steps=(1, 1), **ALWAYS)
    with mediaspec.enable(model, attention=config) as handle:
        handle.set_step(0)
        assert torch.equal(out_of(model, given), before)
        handle.set_step(1)
        assert gap(out_of(model, given), before) > 1e-5
        assert list(handle.summary()["by_module"]) == ["blocks.1.attn1"]
    assert [name for name, _ in joint_attentions(model, TiARA(layers=r"blocks\.0"))] == ["blocks.0.attn1"]
    for wrong in ([2], "transformer_blocks"):
        with pytest.raises(ValueError, match="attentions"):
            joint_attentions(model, TiARA(layers=wrong))


def test_short_clips_are_plain():
    torch.manual_seed(0)
    model, given = wan()
    short = given["hidden_states"][:, :, :4]
    before = out_of(model.eval(), given, hidden_states=short)
    with mediaspec.enable(model, attention=TiARA(joint_alpha=1.5)):
        assert torch.equal(out_of(model, given, hidden_states=short), before)


def test_backends_are_kept():
    """`set_attention_backend` reaches the model's own processor through ours, and frame codes run on the backend."""
    torch.manual_seed(0)
    model, given = wan()
    sharpen(model.eval())
    config = TiARA(joint_alpha=1.5, route="columns", **ALWAYS)
    with mediaspec.enable(model, attention=config):
        wanted = out_of(model, given)
        own = model.blocks[0].attn1.processor.former
        assert own._attention_backend is None
        try:
            model.set_attention_backend("_native_math")
            assert own._attention_backend == "_native_math"
            assert model.blocks[0].attn1.processor._attention_backend == "_native_math"
            assert gap(out_of(model, given), wanted) < 2e-5
        finally:
            model.reset_attention_backend()
    assert is_foreign("flash") and not any(map(is_foreign, ("sage_hub", None, "_native_cudnn", "native")))


@pytest.mark.parametrize("whole", [True, False])
def test_bfloat16(whole):
    """A model in bfloat16, and one in float32 under autocast, whose queries come out of the norms in float32."""
    torch.manual_seed(0)
    model, given = wan()
    sharpen(model.eval())
    config = TiARA(joint_alpha=1.5, **ALWAYS)
    with mediaspec.enable(model, attention=config):
        wanted = out_of(model, given)
    if whole:
        model = model.to(torch.bfloat16)
        given = {key: x.bfloat16() if x.is_floating_point() else x for key, x in given.items()}
    with mediaspec.enable(model, attention=config), torch.autocast("cpu", torch.bfloat16, enabled=not whole):
        found = out_of(model, given)
    assert gap(found.float(), wanted) < 0.05
    assert gap(found.float(), out_of(model, given).float()) > 5e-4


def test_training_gets_gradients():
    torch.manual_seed(0)
    model, given = wan()
    sharpen(model)
    with mediaspec.enable(model, attention=TiARA(joint_alpha=1.5, **ALWAYS)):
        model(**given, return_dict=False)[0].square().sum().backward()
    assert model.blocks[0].attn1.to_q.weight.grad.abs().max() > 0


def test_runs_with_a_scheduler():
    """Four steps of the real loop: rows are measured at steps 0 and 2 only, and reading them changes nothing."""
    torch.manual_seed(0)
    model, given = wan()
    sharpen(model.eval())

    def sample(config: TiARA | None) -> tuple[torch.Tensor, Any]:
        scheduler = FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(4)
        x = given["hidden_states"]
        handle = None if config is None else mediaspec.enable(model, attention=config)
        for t in scheduler.timesteps:
            x = scheduler.step(out_of(model, given, hidden_states=x, timestep=t.expand(BATCH)), t, x)[0]
        found = None if handle is None else handle.summary()
        if handle is not None:
            handle.remove()
        return x, found

    plain, _ = sample(None)
    edited, found = sample(TiARA(joint_alpha=1.5, refresh=2))
    assert gap(edited, plain) > 1e-4
    assert found["calls"] == 8 and list(found["by_step"]) == [0, 1, 2, 3]
    assert found["by_step"][0]["mean_rho"] == found["by_step"][1]["mean_rho"] != found["by_step"][2]["mean_rho"]
    assert torch.equal(sample(TiARA(joint_alpha=0.0))[0], plain)


def test_refusals():
    torch.manual_seed(0)
    model, given = ltx()
    handle = mediaspec.enable(model.eval(), attention=TiARA())
    with pytest.raises(ValueError, match="num_frames, height and width"):
        out_of(model, given, num_frames=None, video_coords=noise(BATCH, 3, FRAMES * 6).abs())
    handle.remove()
    for wrong, words in (
        ({"route": "hook"}, "takes 'auto'"),
        ({"route": "split", "mode": "self_token"}, "whole frames"),
        ({"corner_frames": 2, "corner_strength": 1.0}, "leave it out"),
    ):
        with pytest.raises(ValueError, match=words):
            mediaspec.enable(model, attention=TiARA(**wrong))
    copied = copy.deepcopy(model)
    copied.transformer_blocks[0].attn1.set_processor(lambda *given: None)
    with pytest.raises(ValueError, match="cannot stand in"):
        mediaspec.enable(copied, attention=TiARA())
    with pytest.raises(ValueError, match="knows no attention"):
        joint_attentions(torch.nn.Linear(2, 2), TiARA())
