"""What is particular to the EAGLE drafter: the head's two forms, its alignment with the target, refusals."""

import pytest
import torch

from mediaspec.core.kv import KVStore
from mediaspec.core.tree import TreeSpec
from mediaspec.core.types import Warp
from mediaspec.drafters import EagleDrafter
from mediaspec.models.eagle import EagleHead, EagleHeadConfig, guided_hidden
from mediaspec.rules.exact import ExactRule
from tests.drafters.heads import decode, toy_head
from tests.toy import ToyTarget


def head_and_inputs():
    torch.manual_seed(1)
    head = EagleHead(
        EagleHeadConfig(hidden_size=32, vocab_size=11, num_attention_heads=4, grid=(4, 4), hidden_scale=3.0)
    ).eval()
    for name, weight in head.named_parameters():
        torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return head, torch.randn(11, 32), torch.randint(11, (2, 16)), 3 * torch.randn(2, 16, 32)


def sequential(head, embeds, hidden, prefix, steps):
    """Drafting as `unroll` must reproduce it: true hidden states up to `prefix`, then the head's own."""
    cos, sin = head.rotary(16)
    fed, outputs = hidden[:, :prefix], []
    for step in range(steps):
        n = prefix + step
        out = head(embeds[:, :n], fed, cos[:n], sin[:n])[:, -1:]
        outputs.append(out)
        fed = torch.cat([fed, out], 1)
    return outputs


def test_unroll_is_drafting():
    head, table, tokens, hidden = head_and_inputs()
    embeds = table[tokens]
    cos, sin = head.rotary(16)
    passes = head.unroll(embeds, hidden, cos, sin, steps=4)
    assert torch.allclose(passes[0], head(embeds, hidden, cos, sin), atol=1e-4)
    for prefix in (1, 4, 12):
        for step, wanted in enumerate(sequential(head, embeds, hidden, prefix, 4)):
            got = passes[step][:, prefix - 1 + step]
            assert torch.allclose(got, wanted[:, 0], atol=2e-4), (prefix, step)


def test_unroll_trains_every_weight():
    head, table, tokens, hidden = head_and_inputs()
    cos, sin = head.rotary(16)
    passes = head.unroll(table[tokens], hidden, cos, sin, steps=3)
    logits = [head.logit_scale * out[:, step:] @ table.T for step, out in enumerate(passes)]
    sum(part.logsumexp(-1).mean() for part in logits).backward()
    assert all(weight.grad is not None and bool(weight.grad.isfinite().all()) for weight in head.parameters())


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (None, 0.05), (torch.bfloat16, 0.5)])
def test_inference_form_equals_the_module(dtype, atol):
    head, table, tokens, hidden = head_and_inputs()
    cos, sin = head.rotary(16)
    with torch.inference_mode():
        wanted = head(table[tokens], hidden, cos, sin)
        step = head.prepare(table, dtype)
        store = KVStore(1, 2, 4, 8, 20)
        got = []
        for first, stop in ((0, 5), (5, 6), (6, 16)):
            got.append(step(tokens[:, first:stop], hidden[:, first:stop], store, store.plan(stop - first)))
            store.advance(torch.full((2,), stop - first), [stop - first] * 2)
    assert (torch.cat(got, 1) - wanted).abs().max() < atol


def test_guided_hidden_is_the_combination():
    hidden = torch.randn(4, 3, 8)
    got = guided_hidden(hidden, torch.tensor([1.0, 3.0]))
    assert torch.allclose(got[0], hidden[0], atol=1e-6)
    assert torch.allclose(got[1], hidden[3] + 3 * (hidden[2] - hidden[3]), atol=1e-5)


class PerfectHead:
    """Not a network but the toy target's own transition, in the shape of a head: it must be accepted everywhere."""

    def __init__(self, target, misplace=0):
        self.config = EagleHeadConfig(
            hidden_size=8, vocab_size=target.vocab_size, num_attention_heads=2, grid=target.grid
        )
        self.dtype, self.heads, self.head_dim, self.logit_scale = torch.float32, 1, 1, None
        self.misplace = misplace

    def read(self, hidden, guidance):
        return hidden

    def prepare(self, embeddings, dtype=None):
        return self

    def __call__(self, tokens, hidden, store, slots):
        # the newest angle of h plus this token's contribution
        step = ((slots.positions + 1 + self.misplace) * (tokens + 1)).float()[..., None]
        store.write(0, slots, step[:, None], step[:, None])
        fast, slow = 0.9 * step, 0.5 * step
        turned = []
        for cos, sin, angle in ((0, 1, fast), (2, 3, slow)):
            c, s = hidden[..., cos, None], hidden[..., sin, None]
            turned += [c * angle.cos() - s * angle.sin(), s * angle.cos() + c * angle.sin()]
        return torch.cat([*turned, torch.zeros_like(hidden[..., 4:])], -1)


@pytest.mark.parametrize("guidance", [None, 2.0])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_perfect_head_is_always_accepted(rows, guidance):
    target = ToyTarget(vocab_size=7, num_tokens=16)
    result = decode(
        target, ExactRule(), EagleDrafter(PerfectHead(target)), rows, num_draft_tokens=4, guidance_scale=guidance
    )
    # 1 token from the prefill, then 5 per round
    assert result.stats.target_calls == 1 + 3
    tree = TreeSpec.from_paths([(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0)])
    result = decode(
        target, ExactRule(), EagleDrafter(PerfectHead(target)), rows, tree=tree, guidance_scale=guidance
    )
    assert result.stats.target_calls == 1 + 4


def test_a_misplaced_slot_shows():
    target = ToyTarget(vocab_size=7, num_tokens=16)
    result = decode(target, ExactRule(), EagleDrafter(PerfectHead(target, misplace=1)), 4, num_draft_tokens=4)
    assert result.stats.target_calls > 1 + 3


def test_greedy_drafts_and_trees():
    target = ToyTarget(vocab_size=7, num_tokens=9)
    greedy = Warp(temperature=0.0)
    plain = decode(target, ExactRule(), None, 3, warp=greedy)
    for tree in (None, TreeSpec.from_widths([3, 2])):
        got = decode(target, ExactRule(), EagleDrafter(toy_head(target)), 3, warp=greedy, tree=tree)
        assert torch.equal(got.tokens, plain.tokens)


def test_a_head_is_prepared_once_per_target():
    target = ToyTarget(vocab_size=7, num_tokens=9)
    drafter = EagleDrafter(toy_head(target))
    first = decode(target, ExactRule(), drafter, 2)
    step = drafter._prepared[0][2]
    second = decode(target, ExactRule(), drafter, 2)
    assert drafter._prepared[0][2] is step
    assert torch.equal(first.tokens, second.tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 8}, "vocab_size=8 but the target has 7"),
        ({"hidden_size": 16, "num_attention_heads": 2}, "hidden_size=16 but the target has 8"),
        ({"grid": (9, 1)}, r"\(9, 1\) grid"),
        ({"grid": None, "max_positions": 4}, "4 positions"),
    ],
)
def test_refuses_a_foreign_target(change, message):
    target = ToyTarget(vocab_size=7, num_tokens=9)
    settings = {"vocab_size": 7, "hidden_size": 8, "num_attention_heads": 2, "grid": (3, 3), **change}
    drafter = EagleDrafter(EagleHead(EagleHeadConfig(**settings)))
    with pytest.raises(ValueError, match=message):
        drafter.check(target)
    with pytest.raises(ValueError, match=message):
        decode(target, ExactRule(), drafter, 1)


def test_config_refuses_odd_heads():
    with pytest.raises(ValueError, match="multiple of 4"):
        EagleHeadConfig(hidden_size=30, num_attention_heads=4)
    with pytest.raises(ValueError, match="steps=0"):
        head, table, tokens, hidden = head_and_inputs()
        head.unroll(table[tokens], hidden, *head.rotary(16), steps=0)


def test_head_is_saved_and_loaded(tmp_path):
    head, table, tokens, hidden = head_and_inputs()
    head.save_pretrained(tmp_path)
    loaded = EagleHead.from_pretrained(tmp_path).eval()
    cos, sin = head.rotary(16)
    assert loaded.config.grid == (4, 4) or list(loaded.config.grid) == [4, 4]
    assert torch.equal(loaded(table[tokens], hidden, cos, sin), head(table[tokens], hidden, cos, sin))
    assert torch.equal(loaded.logit_scale, head.logit_scale)
