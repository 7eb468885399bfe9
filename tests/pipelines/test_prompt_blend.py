"""PromptBlend's parts: fields, alignment, frame schedule, gate, mass blend, against stored float64 cases."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from mediaspec.pipelines.prompt_align import align_fields, field_tokens, fill_tokens, special_tokens, within_budget
from mediaspec.pipelines.prompt_blend import PromptGate, blend_prompts, mass_blend, mass_log_weights
from mediaspec.pipelines.prompt_fields import FIELDS, INSTRUCTION, PromptFields, organise
from mediaspec.pipelines.timeline import blend_schedule

CASES = json.loads((Path(__file__).parents[1] / "data" / "prompt_blend_cases.json").read_text())


@pytest.mark.parametrize("fill", ["cycle", "stretch", "last"])
def test_alignment_cases(fill: str) -> None:
    assert align_fields(CASES["align"]["input"], fill) == CASES["align"][fill]


def test_schedule_case() -> None:
    case = CASES["schedule"]
    plan = blend_schedule(case["frames"], [tuple(s) for s in case["segments"]])
    assert [i for i, _ in plan] == [i for i, _ in case["per_frame"]]
    assert [a for _, a in plan] == pytest.approx([a for _, a in case["per_frame"]], abs=1e-9)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_gate_case(dtype: torch.dtype, tolerance: float) -> None:
    case, schedule = CASES["gate"], CASES["schedule"]
    prompts = torch.tensor(case["P"], dtype=dtype)[:, None]
    i, a = schedule["per_frame"][case["frame"]]
    gate = PromptGate(steps=tuple(s / 50 for s in case["steps_on"]), depth=case["depth_on"])
    assert len(case["condition"]) == 24
    for name, want in case["condition"].items():
        step, depth = (int(part.lstrip("stepdh")) for part in name.split("_"))
        amount = a if gate.is_open(step / 50, depth) else 0.0
        got = blend_prompts(prompts, [i], [amount])
        assert torch.allclose(got.flatten(), torch.tensor(want, dtype=dtype), atol=tolerance, rtol=0), name


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_mass_blend_case(dtype: torch.dtype, tolerance: float) -> None:
    case = {k: torch.tensor(v, dtype=dtype) if isinstance(v, list) else v for k, v in CASES["mass_blend"].items()}
    out, share = mass_blend(case["q"], list(case["K"]), list(case["V"]), case["a"])
    assert torch.allclose(out, case["out"], atol=tolerance, rtol=0)
    assert torch.allclose(share, case["w_next"], atol=tolerance, rtol=0)
    # and the biased softmax over both blocks, which the models run, says the same
    bias = mass_log_weights([0], [case["a"]], 2)[0].to(dtype).repeat_interleave(case["K"].shape[1])
    both = torch.nn.functional.scaled_dot_product_attention(
        case["q"], case["K"].flatten(0, 1), case["V"].flatten(0, 1), attn_mask=bias[None]
    )
    assert torch.allclose(both, case["out"], atol=tolerance, rtol=0)


def test_mass_weights_at_the_ends_and_in_the_middle() -> None:
    weights = mass_log_weights([0, 1, 1], [0.0, 0.25, 1.0], 3).exp()
    assert weights.tolist() == [[1, 0, 0], [0, pytest.approx(0.75), pytest.approx(0.25)], [0, 0, 1]]


def test_held_frames_are_bit_equal_to_their_prompt() -> None:
    prompts = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)).half()
    mixed = blend_prompts(prompts, [0, 2, 1, 1], [0.0, 0.0, 0.5, 0.0])
    assert torch.equal(mixed[[0, 1, 3]], prompts[[0, 2, 1]])
    assert mixed.dtype == torch.float16 and not torch.equal(mixed[2], prompts[1])


def test_gate_settings_are_checked_and_scale_with_the_number_of_steps() -> None:
    gate = PromptGate.unet()
    assert [i for i in range(10) if gate.is_open(i / 10)] == [1, 2, 3]
    assert [i for i in range(50) if gate.is_open(i / 50)] == list(range(5, 16))
    assert all(PromptGate.always().is_open(i / 7) for i in range(8))
    assert not PromptGate.transformer().is_open(0.19) and PromptGate.transformer().is_open(0.2)
    for bad in ({"steps": (0.5, 0.2)}, {"steps": (0, 2)}, {"depth": "middle"}, {"depth": -1}):
        with pytest.raises(ValueError, match="steps=|depth="):
            PromptGate(**bad)


def test_an_empty_field_takes_the_nearest_prompts_tokens() -> None:
    aligned = align_fields([[["a"], [], []], [["b", "c"], ["at", "dawn"], []], [["d"], ["at", "night"], []]])
    assert aligned[0] == [["a", "a"], ["at", "dawn"], []] and aligned[2][1] == ["at", "night"]
    with pytest.raises(ValueError, match="cannot be filled"):
        fill_tokens([], 3)
    with pytest.raises(ValueError, match="did you mean 'cycle'"):
        fill_tokens(["a"], 3, "cycles")  # type: ignore[arg-type]


def test_overflow_drops_filler_first_then_quality() -> None:
    raw = [[["s"], ["a"] * 2, [], ["p"] * 6, ["q"] * 3], [["s"] * 2, ["b"], [], ["r"], ["q"] * 3]]
    real = [[len(f) for f in row] for row in raw]
    rows = within_budget(align_fields(raw), real, 11)
    assert [sum(map(len, row)) for row in rows] == [11, 11]
    # the first prompt has filler in its subject only, then loses quality; the second loses filler of the place
    assert rows[0] == [["s"], ["a"] * 2, [], ["p"] * 6, ["q"] * 2]
    assert rows[1] == [["s"] * 2, ["b"] * 2, [], ["r"] * 4, ["q"] * 3]
    with pytest.raises(ValueError, match="prompt 0 has 9 tokens.*reads 8; shorten the longest field by 1"):
        within_budget(align_fields(raw), real, 8)


def test_fields_of_the_moving_emoji_grammar() -> None:
    subjects = ("a yellow taxi", "a fire engine", "an octopus", "a ladybug", "a blue book")
    motions = ("moves left", "moves right slowly", "moves up", "spins", "pulses", "bounces")
    places = ("on a grey road", "on green grass", "in a blue sky", "in the night sky", "on white snow")
    for subject, motion, place in itertools.product(subjects, motions, places):
        found = PromptFields.parse(f"{subject} {motion} {place}")
        assert found == PromptFields(subject, motion, "", place, "")
        assert found.text == f"{subject} {motion} {place}"


@pytest.mark.parametrize("text,want", [
    ("a brown bear walking slowly on a snowy forest path at night, 4k, cinematic",
     ("a brown bear", "walking slowly", "at night", "on a snowy forest path", "4k, cinematic")),
    ("a yellow smiling face moves up", ("a yellow smiling face", "moves up", "", "", "")),
    ("A cat on a sofa sleeps", ("A cat", "sleeps", "", "on a sofa", "")),
    ("an astronaut is riding a horse on the moon during a storm, high quality",
     ("an astronaut", "is riding a horse", "during a storm", "on the moon", "high quality")),
    ("two dogs play in the snow on a rainy day", ("two dogs", "play", "on a rainy day", "in the snow", "")),
    ("a woman wearing a red hat looks around in a busy street",
     ("a woman wearing a red hat", "looks around", "", "in a busy street", "")),
    ("a child playing with a ball, in a park, sunset", ("a child", "playing with a ball", "sunset", "in a park", "")),
    ("a boat sails from left to right across the lake",
     ("a boat", "sails from left to right", "", "across the lake", "")),
    ("a building in the morning", ("a building", "", "in the morning", "", "")),
    ("a red apple", ("a red apple", "", "", "", "")),
])  # fmt: skip
def test_fields_of_plain_captions(text: str, want: tuple[str, ...]) -> None:
    found = PromptFields.parse(text)
    assert tuple(found) == want
    words = sorted(text.replace(",", "").split())
    assert sorted(found.text.replace(",", "").split()) == words  # no word is lost


def test_fields_from_mappings_lists_and_their_errors() -> None:
    assert PromptFields.of({"subject": "a cat", "time": None}) == PromptFields("a cat")
    assert PromptFields.of(["a cat", "sits", "", "", ""]).action == "sits"
    with pytest.raises(ValueError, match="did you mean 'subject'"):
        PromptFields.of({"subjekt": "a cat"})
    with pytest.raises(ValueError, match="write five strings"):
        PromptFields.of(["a cat"])
    with pytest.raises(ValueError, match="all five fields are empty"):
        PromptFields()
    with pytest.raises(ValueError, match="has no words"):
        PromptFields.parse("  ")


def test_a_language_model_may_organise() -> None:
    asked = []

    def llm(instruction: str, texts: list[str]) -> str:
        asked.append((instruction, texts))
        rows = [{"subject": text, "action": "", "time": "", "place": "", "quality": "4k"} for text in texts]
        return f"Here you are:\n```json\n{json.dumps(rows)}\n```"

    given = PromptFields("a dog", "runs")
    found = organise(["cat", given, "bird"], llm)
    assert asked == [(INSTRUCTION, ["cat", "bird"])] and all(name in INSTRUCTION for name in FIELDS)
    assert [f.subject for f in found] == ["cat", "a dog", "bird"] and found[2].quality == "4k"
    with pytest.raises(ValueError, match="must return a list of 2 objects"):
        organise(["a", "b"], lambda *_: "[]")
    with pytest.raises(ValueError, match="no JSON list"):
        organise(["a", "b"], lambda *_: "I cannot")


def test_field_tokens_with_a_real_tokenizer() -> None:
    from tests.pipelines.tiny_video import clip_tokenizer

    tokenizer = clip_tokenizer()
    before, after = special_tokens(tokenizer)
    assert (before, after) == ([tokenizer.bos_token_id], [tokenizer.eos_token_id])
    prompts = [PromptFields.parse("a taxi moves left on a road"), PromptFields.parse("a red taxi spins on snow")]
    rows = field_tokens(prompts, tokenizer, 77)
    assert len(rows[0]) == len(rows[1]) <= 77
    action = [tokenizer(p.action, add_special_tokens=False)["input_ids"] for p in prompts]
    place = [tokenizer(p.place, add_special_tokens=False)["input_ids"] for p in prompts]
    width = max(map(len, place))
    for row, own in zip(rows, place):
        assert row[-1 - width : -1] == fill_tokens(own, width)
    assert max(map(len, action)) + width + 2 < len(rows[0])
    with pytest.raises(ValueError, match="shorten the longest field"):
        field_tokens(prompts, tokenizer, 6)
