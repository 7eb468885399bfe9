"""A bank's embeddings, and its installation in the real model classes: right text, right frames, gone when removed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mediaspec.pipelines.prompt_bank import PromptBank
from mediaspec.pipelines.prompt_blend import PromptGate
from mediaspec.pipelines.prompt_conditioning import StepClock, install_prompt_bank, unet_cross_attentions
from mediaspec.pipelines.timeline import Timeline
from tests.pipelines import tiny_video

LINE = Timeline.of([("a taxi moves left", 0, 1), ("a frog spins on snow", 4, 5)])
S, C = 6, tiny_video.WIDTH


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bank(positions: int = S, gate: PromptGate | None = None, blend: str = "promptblend", line: Timeline = LINE):
    return PromptBank(random(len(line.segments), positions, C, seed=9), line, gate=gate, blend=blend)


def test_embeddings_follow_schedule_and_step_gate() -> None:
    one = bank()
    held = one.embeddings(torch.arange(6), 0.5)
    assert torch.equal(held, one.prompts[[0, 0, 0, 0, 1, 1]])
    mixed = one.embeddings(torch.arange(6), 0.2)
    assert torch.allclose(mixed[2], one.prompts[0] * 2 / 3 + one.prompts[1] / 3, atol=1e-6)
    assert torch.equal(mixed[[0, 1, 4, 5]], held[[0, 1, 4, 5]])
    # frames at different steps, as in a FIFO queue; frames outside the video hold its ends
    queue = one.embeddings(torch.tensor([2, 3, -4, 99]), torch.tensor([0.9, 0.1, 0.2, 0.2]))
    assert torch.equal(queue[0], one.prompts[0]) and torch.equal(queue[2:], one.prompts)
    assert torch.allclose(queue[1], one.prompts[0] / 3 + one.prompts[1] * 2 / 3, atol=1e-6)
    assert torch.equal(bank(blend="cut").embeddings(torch.arange(6), 0.2), one.prompts[[0, 0, 0, 1, 1, 1]])
    assert torch.equal(bank(blend="linear").embeddings(torch.arange(6), 0.9), mixed)


def test_embeddings_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="frames is empty"):
        bank().embeddings(torch.arange(0), 0.1)
    with pytest.raises(ValueError, match="2 step fractions were given for 3 frames"):
        bank().embeddings(torch.arange(3), torch.tensor([0.1, 0.2]))
    with pytest.raises(ValueError, match="2 segments"):
        PromptBank(torch.zeros(3, S, C), LINE)
    with pytest.raises(ValueError, match="did you mean 'linear'"):
        bank(blend="lineal")


def test_the_clock_counts_steps_and_starts_again() -> None:
    clock = StepClock(4)
    times = [999, 999, 749, 499, 249, 999, 749]
    assert [clock.fraction(torch.tensor(t)) for t in times] == [0, 0, 0.25, 0.5, 0.75, 0, 0.25]
    assert StepClock(None).fraction(700.0) == pytest.approx(0.3)


# UNetMotionModel


def unet_call(unet, text, seed: int = 0):
    with torch.no_grad():
        return unet(random(text.shape[0] // 6, 4, 6, 8, 8, seed=seed), 500, text).sample


def test_unet_takes_each_frames_text_at_each_depth() -> None:
    unet = tiny_video.motion_unet()
    attentions, first_up = unet_cross_attentions(unet)
    assert [name.split(".")[0] for name, _ in attentions] == ["down_blocks", "mid_block", "up_blocks", "up_blocks"]
    assert first_up == 2
    one = bank()
    seen: list[torch.Tensor] = []
    text = torch.cat([random(6, S, C, seed=5), one.anchor.repeat(6, 1, 1)])  # negative, then conditional
    plain = unet_call(unet, text)
    with install_prompt_bank(unet, one, num_inference_steps=50) as handle:
        for _, module in attentions:
            inner = module.register_forward_pre_hook(
                lambda m, args, kwargs: seen.append(kwargs["encoder_hidden_states"]), with_kwargs=True
            )
            handle.add(inner.remove)
        unet_call(unet, text)
        assert handle.summary() == {"modules": 4, "calls": 1, "rows": 6, "settings": one.settings}
    early = one.prompts[[0, 0, 0, 0, 1, 1]]  # step 0 lies before the gate
    late = torch.stack([torch.lerp(one.prompts[0], one.prompts[1], a) for a in (0, 0, 1 / 3, 2 / 3, 1, 1)])
    for depth, got in enumerate(seen):
        assert torch.equal(got[:6], text[:6])
        assert torch.allclose(got[6:], early if depth < first_up else late, atol=1e-6), depth
    assert torch.equal(unet_call(unet, text), plain)  # removed: bit for bit


def test_unet_installed_equals_text_given_per_frame() -> None:
    unet, one = tiny_video.motion_unet(), bank(gate=PromptGate.always())
    wanted = unet_call(unet, one.embeddings(torch.arange(6), 0.0))
    one.asked = None
    with install_prompt_bank(unet, one):
        assert torch.equal(unet_call(unet, one.anchor.repeat(6, 1, 1)), wanted)
        # and a sampler that passes the embeddings itself, of other frames, is understood
        frames = torch.tensor([1, 2, 3, 4, 5, 5])
        given = one.embeddings(frames, 0.7)
        shifted = unet_call(unet, given)
    assert torch.equal(unet_call(unet, given), shifted) and not torch.equal(shifted, wanted)


def test_unet_with_a_samplers_embeddings_gets_the_depth_gate() -> None:
    unet, one = tiny_video.motion_unet(), bank()
    given = one.embeddings(torch.arange(6), 0.9)  # gate shut by step
    plain = unet_call(unet, given)
    with install_prompt_bank(unet, one) as handle:
        deep = unet_call(unet, one.embeddings(torch.arange(6), 0.9))
        assert handle.summary()["rows"] == 6
    assert not torch.allclose(deep, plain)


def test_an_unused_bank_is_an_error_and_so_are_wrong_models() -> None:
    unet = tiny_video.motion_unet()
    handle = install_prompt_bank(unet, bank())
    unet_call(unet, random(6, S, C))
    with pytest.raises(ValueError, match="has a prompt bank already"):
        install_prompt_bank(unet, bank())
    with pytest.raises(RuntimeError, match="never with the bank's text"):
        handle.remove()
    handle.remove()
    with pytest.raises(ValueError, match="cannot be installed in Linear"):
        install_prompt_bank(torch.nn.Linear(2, 2), bank())
    with pytest.raises(ValueError, match="has 4 cross-attentions"):
        install_prompt_bank(unet, bank(gate=PromptGate(depth=9)))
    with pytest.raises(ValueError, match="did you mean 'match'"):
        install_prompt_bank(unet, bank(), rows="matsch")
    with install_prompt_bank(unet, bank(), rows="last_half"):
        unet_call(unet, random(12, S, C))


def test_a_timeline_file_says_how_its_prompts_mix(tmp_path) -> None:
    path = tmp_path / "line.yaml"
    path.write_text("blend: cut\nalign: fields\nfill: last\nsegments: [a taxi, a frog]\nnum_frames: 12\n")
    pipe = tiny_video.animatediff(letters=True)
    one = PromptBank.from_timeline(pipe, path)
    assert (one.blend, one.settings["align"], one.settings["fill"]) == ("cut", "fields", "last")
    assert PromptBank.from_timeline(pipe, path, blend="linear", align="none").settings["blend"] == "linear"
    assert one.describe()["texts"] == ["a taxi", "a frog"]


def test_a_whole_animatediff_run() -> None:
    pipe = tiny_video.animatediff(letters=True)
    one = PromptBank.from_timeline(pipe, LINE)
    assert one.prompts.shape == (2, 77, C) and one.settings["align"] == "fields"
    options = dict(num_frames=6, height=16, width=16, num_inference_steps=3, guidance_scale=4.0, output_type="latent")

    def run() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return pipe(
            prompt_embeds=one.anchor, negative_prompt_embeds=random(1, 77, C), generator=generator, **options
        ).frames  # fmt: skip

    plain = run()
    with install_prompt_bank(pipe, one, num_inference_steps=3) as handle:
        mixed = run()
        assert handle.summary()["rows"] == 18
    assert not torch.allclose(plain, mixed)
    assert torch.equal(run(), plain)
    # plain prompts are encoded as the pipeline does
    each = PromptBank.from_timeline(pipe, LINE, align="none")
    want = pipe.encode_prompt("a taxi moves left", "cpu", 1, False)[0]
    assert torch.equal(each.anchor, want) and each.settings["align"] == "none"


# Wan


def wan_call(model, text, sample=None, **more):
    with torch.no_grad():
        sample = random(text.shape[0], 4, 6, 4, 4) if sample is None else sample
        return model(sample, torch.full((text.shape[0],), 500), text, **more).sample


def test_wan_takes_each_frames_text() -> None:
    model = tiny_video.wan_transformer()
    line = Timeline.of([("a", 0, 7), ("b", 16, 23)])
    one = bank(line=line, gate=PromptGate.always())
    plain = wan_call(model, one.anchor)
    projected = model.condition_embedder.text_embedder(one.prompts)
    queries: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    attention = model.blocks[0].attn2
    with install_prompt_bank(model, one) as handle:
        ends = (attention.register_forward_pre_hook(lambda m, args: queries.append(args[0])),
                attention.register_forward_hook(lambda m, args, out: outputs.append(out)))  # fmt: skip
        mixed = wan_call(model, one.anchor)
        for end in ends:
            end.remove()
        assert handle.summary()["modules"] == 2
    assert not torch.allclose(mixed, plain)
    amounts = [(n * 4 - 7) / 9 if 7 < n * 4 < 16 else float(n * 4 >= 16) for n in range(6)]
    for frame, a in enumerate(amounts):
        part = slice(4 * frame, 4 * frame + 4)
        with torch.no_grad():
            want = attention(queries[0][:, part], torch.lerp(projected[:1], projected[1:], a), None, None)
        assert torch.allclose(outputs[0][:, part], want, atol=1e-5), frame
    assert torch.equal(wan_call(model, one.anchor), plain)


def test_wan_leaves_the_negative_branch_and_one_prompt_alone() -> None:
    model, negative = tiny_video.wan_transformer(), random(1, S, C, seed=7)
    plain = wan_call(model, negative)
    one = bank(line=Timeline.of([("a", 0, 3), ("b", 16, 20)]), gate=PromptGate.always())
    single = bank(line=Timeline.of([("a", 0, 20)]))
    both = torch.cat([negative, one.anchor])
    handle = install_prompt_bank(model, one)
    assert torch.allclose(wan_call(model, negative), plain, atol=1e-5)
    assert torch.allclose(wan_call(model, both, random(1, 4, 6, 4, 4).repeat(2, 1, 1, 1, 1))[:1], plain, atol=1e-5)
    assert handle.summary()["rows"] == 1
    handle.remove()
    wanted = wan_call(model, single.anchor)
    with install_prompt_bank(model, single):
        assert torch.allclose(wan_call(model, single.anchor), wanted, atol=1e-5)


def test_wan_with_two_transformers_gets_the_bank_in_both() -> None:
    first, second = tiny_video.wan_transformer(), tiny_video.wan_transformer()
    pipe = SimpleNamespace(transformer=first, transformer_2=second, vae_scale_factor_temporal=2)
    one = bank(line=Timeline.of([("a", 0, 3), ("b", 6, 10)]), gate=PromptGate.always())
    plain = [wan_call(model, one.anchor) for model in (pipe.transformer, pipe.transformer_2)]
    with install_prompt_bank(pipe, one) as handle:
        assert handle.summary()["modules"] == 4 and handle.frames_per_latent == 2
        mixed = [wan_call(model, one.anchor) for model in (pipe.transformer, pipe.transformer_2)]
        with pytest.raises(ValueError, match="has a prompt bank already"):
            install_prompt_bank(pipe.transformer_2, one)
    assert not any(torch.allclose(a, b) for a, b in zip(plain, mixed))
    assert torch.equal(wan_call(pipe.transformer_2, one.anchor), plain[1])


def test_wan_image_to_video_keeps_its_image_tokens() -> None:
    model = tiny_video.wan_transformer(image_dim=8, added_kv_proj_dim=24)
    one = bank(512, line=Timeline.of([("a", 0, 20)]))
    image = random(1, 3, 8)
    wanted = wan_call(model, one.anchor, encoder_hidden_states_image=image)
    with install_prompt_bank(model, one):
        got = wan_call(model, one.anchor, encoder_hidden_states_image=image)
    assert torch.allclose(got, wanted, atol=1e-5)
    two = bank(512, line=Timeline.of([("a", 0, 3), ("b", 16, 20)]), gate=PromptGate.always())
    with install_prompt_bank(model, two):
        assert not torch.allclose(wan_call(model, two.anchor, encoder_hidden_states_image=image), wanted)


# joint attention


def cog_call(model, text, rotary: bool = False, repeat: int = 1):
    sample = random(1, 5, 4, 8, 8).repeat(text.shape[0], 1, 1, 1, 1)
    angles = random(5 * 16, 16, seed=3) if rotary else None
    rope = (angles.cos(), angles.sin()) if angles is not None else None
    with torch.no_grad():
        return model(sample, text, torch.full((text.shape[0],), 500), image_rotary_emb=rope).sample


@pytest.mark.parametrize("rotary,fused", [(False, False), (True, False), (True, True)])
def test_cogvideox_one_prompt_and_the_negative_branch_stay(rotary: bool, fused: bool) -> None:
    model = tiny_video.cogvideox(rotary)
    if fused:
        model.fuse_qkv_projections()
    single = bank(line=Timeline.of([("a", 0, 16)]))
    two = bank(line=Timeline.of([("a", 0, 3), ("b", 12, 16)]), gate=PromptGate.always())
    text = torch.cat([random(1, S, C, seed=7), single.anchor])
    plain = cog_call(model, text, rotary)
    with install_prompt_bank(model, single) as handle:
        assert torch.allclose(cog_call(model, text, rotary), plain, atol=1e-5)
        assert handle.summary()["modules"] == 2
    text = torch.cat([text[:1], two.anchor])
    before = cog_call(model, text, rotary)
    with install_prompt_bank(model, two):
        got = cog_call(model, text, rotary)
    assert torch.allclose(got[0], before[0], atol=1e-5)
    assert not torch.allclose(got[1], before[1], atol=1e-3)
    assert torch.equal(cog_call(model, text, rotary), before)


def test_cogvideox_unfused_reads_its_own_matrices_again() -> None:
    """diffusers keeps the joined matrix and its flag after unfusing; weights changed later are not in it."""
    models = [tiny_video.cogvideox(), tiny_video.cogvideox()]
    models[0].fuse_qkv_projections()
    models[0].unfuse_qkv_projections()
    two, outputs = bank(line=Timeline.of([("a", 0, 3), ("b", 12, 16)]), gate=PromptGate.always()), []
    for model in models:
        with torch.no_grad():
            model.transformer_blocks[0].attn1.to_v.weight.mul_(3)
        with install_prompt_bank(model, two):
            outputs.append(cog_call(model, two.anchor))
    assert torch.equal(*outputs)


def test_joint_attention_equals_the_dense_biased_softmax() -> None:
    from mediaspec.pipelines.prompt_joint import JointPlan, joint_prompt_attention

    frames, tokens, prompts, words, dim = 5, 3, 3, 4, 8
    video = tuple(random(2, 2, frames * tokens, dim, seed=s).double() for s in range(3))
    text = tuple(random(2, 2, prompts * words, dim, seed=s).double() for s in range(3, 6))
    index, amount = [0, 0, 1, 1, 2], [0.0, 0.3, 0.0, 0.75, 0.0]
    mask = torch.ones(2, prompts, words, dtype=torch.bool)
    mask[:, 1, 2:] = False
    mine = torch.tensor([True, False])
    got = joint_prompt_attention(video, text, JointPlan(prompts, index, amount, mine, mask))

    share = torch.zeros(frames, prompts, dtype=torch.float64)
    for n, (i, a) in enumerate(zip(index, amount)):
        share[n, i] = 1 - a
        if a:
            share[n, i + 1] = a
    length = frames * tokens + prompts * words
    bias = torch.zeros(2, length, length, dtype=torch.float64)
    for row in range(2):
        bias[row, : frames * tokens, frames * tokens :] = (
            share.log().repeat_interleave(tokens, 0).repeat_interleave(words, 1)
        )
        own = torch.eye(prompts, dtype=torch.float64).log().repeat_interleave(words, 0).repeat_interleave(words, 1)
        bias[row, frames * tokens :, frames * tokens :] = own
        if mine[row]:
            seen = (share.T > 0).double().log().repeat_interleave(words, 0).repeat_interleave(tokens, 1)
            bias[row, frames * tokens :, : frames * tokens] = seen
        bias[row, :, frames * tokens :].masked_fill_(~mask[row].flatten()[None], -torch.inf)
    query, key, value = (torch.cat([v, t], 2) for v, t in zip(video, text))
    want = torch.softmax(query @ key.transpose(-1, -2) / dim**0.5 + bias[:, None], -1) @ value
    assert torch.allclose(got[0], want[:, :, : frames * tokens], atol=1e-9)
    assert torch.allclose(got[1], want[:, :, frames * tokens :], atol=1e-9)


def test_cogvideox_refuses_a_foreign_processor() -> None:
    from diffusers.models.attention_processor import AttnProcessor2_0

    model = tiny_video.cogvideox()
    model.transformer_blocks[1].attn1.processor = AttnProcessor2_0()
    plain = model.transformer_blocks[0].attn1.processor
    with pytest.raises(ValueError, match="has the processor AttnProcessor2_0"):
        install_prompt_bank(model, bank())
    assert model.transformer_blocks[0].attn1.processor is plain


def test_hunyuan_video() -> None:
    model = tiny_video.hunyuan()

    def call(text, mask):
        sample = random(1, 4, 5, 4, 4).repeat(text.shape[0], 1, 1, 1, 1)
        count = text.shape[0]
        with torch.no_grad():
            return model(
                sample, torch.full((count,), 500), text, mask, random(1, 8, seed=8).repeat(count, 1)
            ).sample  # fmt: skip

    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    single = bank(line=Timeline.of([("a", 0, 16)]))
    plain = call(single.anchor, mask)
    with install_prompt_bank(model, single) as handle:
        assert torch.allclose(call(single.anchor, mask), plain, atol=1e-5)
        assert handle.summary()["modules"] == 2
    two = bank(line=Timeline.of([("a", 0, 3), ("b", 12, 16)]), gate=PromptGate.always())
    text, masks = torch.cat([random(1, S, C, seed=7), two.anchor]), mask.repeat(2, 1)
    before = call(text, masks)
    with install_prompt_bank(model, two):
        got = call(text, masks)
    assert torch.allclose(got[0], before[0], atol=1e-5) and not torch.allclose(got[1], before[1], atol=1e-3)
    assert torch.equal(call(text, masks), before)
