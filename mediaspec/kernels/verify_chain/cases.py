"""Inputs that the tests and the benchmark of chain verification share. Every case is a function of its seed alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..sample import Warp, probabilities
from ..sample.cases import make_logits
from . import ChainVerdict, Mode, Residual, verify_chain

__all__ = ["Case", "cases", "make_draft", "run"]


@dataclass(frozen=True)
class Case:
    """Arguments of one call of `verify_chain`, under a name."""

    name: str
    target_logits: Tensor
    tokens: Tensor
    lengths: Tensor
    warp: Warp
    draft_probs: Tensor | None
    seeds: Tensor
    start: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None
    residual: Residual = "gstar"
    guidance: Tensor | None = None
    allowed: Tensor | None = None
    forced: Tensor | None = None
    noise: Tensor | None = None
    uniforms: Tensor | None = None
    mode: Mode = "ratio"


def run(case: Case, impl: str | None = None, need_choices: bool = False, need_probs: bool = False) -> ChainVerdict:
    """Calls the operation on a case."""
    values = {name: value for name, value in vars(case).items() if name != "name"}
    return verify_chain(**values, need_choices=need_choices, need_probs=need_probs, impl=impl)


def make_draft(generator: torch.Generator, target_logits: Tensor, distance: float, warp: Warp) -> Tensor:
    """[B, G, K+1, V] target logits -> [B, K, V] draft law: the first branch, disturbed, warped alike."""
    near = target_logits[:, :1, :-1]
    return probabilities(
        near + distance * torch.randn(near.shape, generator=generator), warp, impl="reference"
    )  # fmt: skip


def cases(vocab: int, batch: int = 2, length: int = 3, device: str = "cpu", seed: int = 0) -> list[Case]:
    """The cases at one size: every switch alone, the usual ones together, and degenerate rows."""
    g = torch.Generator().manual_seed(seed)
    plain = make_logits(g, batch, 1, length + 1, vocab)
    guided = make_logits(g, batch, 2, length + 1, vocab)
    top = Warp(top_k=max(2, vocab // 2))
    draft = make_draft(g, plain, 0.3, Warp())
    draft_top = make_draft(g, plain, 0.3, top)
    far = make_draft(g, plain, 3.0, Warp())
    tokens = draft.flatten(0, 1).multinomial(1, generator=g).view(batch, length)
    tokens_top = draft_top.flatten(0, 1).multinomial(1, generator=g).view(batch, length)
    lengths = torch.full((batch,), length)
    ragged = torch.arange(batch) % (length + 1)
    seeds = torch.arange(batch, dtype=torch.int64) * 104729 + seed
    start = torch.arange(batch, dtype=torch.int64) * 5 + 1
    guidance = torch.linspace(0.4, 2.0, batch)
    allowed = torch.rand(vocab, generator=g) < 0.7
    allowed[tokens.flatten()] = True
    forced = torch.full((batch, length + 1), -1)
    forced[0, 0] = tokens[0, 0]
    forced[-1, -1] = 1
    refused = torch.full((batch, length + 1), -1)
    refused[:, length // 2] = (tokens[:, length // 2] + 1) % vocab
    omega = torch.linspace(2.5, 0.5, length)
    by_row = torch.linspace(0.5, 4.0, batch * length).view(batch, length)
    mixed = torch.full((length,), 0.6)
    uniforms = torch.rand(batch, length, generator=g)
    noise = torch.empty(batch, length + 1, vocab).exponential_(generator=g)
    broken = plain.clone()
    broken[0, 0, 0, vocab // 2] = float("nan")
    broken[-1, 0, -1] = float("-inf")
    tied = plain.mul(2).round().div(2)
    rest = (seeds, start)
    found = [
        Case("exact", plain, tokens, lengths, Warp(), draft, *rest),
        Case("exact-ones", plain, tokens, lengths, Warp(), draft, *rest, scale=torch.ones(length)),
        Case("exact-far", plain, tokens, lengths, Warp(), far, *rest),
        Case("exact-stored", plain, tokens, lengths, Warp(), draft, *rest, noise=noise, uniforms=uniforms),
        Case("ragged", plain, tokens, ragged, Warp(), draft, *rest, scale=omega),
        Case("empty", plain, tokens, torch.zeros_like(lengths), Warp(), draft, *rest, scale=omega),
        Case("omega", plain, tokens, lengths, Warp(temperature=0.9), draft, *rest, scale=omega),
        Case("omega-by-row", plain, tokens, lengths, Warp(), draft, *rest, scale=by_row),
        Case("omega-band", plain, tokens, lengths, Warp(), far, *rest, scale=omega, residual="band"),
        Case("exact-band", plain, tokens, lengths, Warp(), far, *rest, residual="band"),
        Case("ensemble", plain, tokens, lengths, Warp(), far, *rest, scale=mixed, offset=1 - mixed),
        Case("top-k", plain, tokens_top, lengths, top, draft_top, *rest, scale=omega),
        Case("top-k-ties", tied, tokens_top, lengths, top, draft_top, *rest),
        Case("top-p", plain, tokens, lengths, Warp(top_p=0.8), draft, *rest),
        Case("guided", guided, tokens, lengths, top, draft, *rest, guidance=guidance, scale=omega),
        Case("allowed", plain, tokens, lengths, Warp(), draft, *rest, allowed=allowed),
        Case("forced", plain, tokens, lengths, Warp(), draft, *rest, forced=forced, scale=mixed, offset=1 - mixed),
        Case("refused", plain, tokens, lengths, Warp(), draft, *rest, forced=refused, scale=omega),
        Case("point", plain, tokens, lengths, Warp(), None, *rest),
        Case("point-omega", plain, tokens, lengths, Warp(), None, *rest, scale=omega * 3),
        Case("point-band", plain, tokens, lengths, Warp(), None, *rest, scale=omega * 3, residual="band"),
        Case("point-ensemble", plain, tokens, lengths, Warp(), None, *rest, scale=mixed, offset=1 - mixed),
        Case("greedy", tied, tied[:, 0, :-1].argmax(-1), ragged, Warp(temperature=0.0), None, *rest),
        Case("match", plain, tokens, lengths, Warp(), None, *rest, mode="match"),
        Case("match-greedy", tied, tied[:, 0, :-1].argmax(-1), lengths, Warp(temperature=0.0), None, *rest,
             mode="match"),
        Case("match-all", guided, tokens, ragged, top, None, *rest, guidance=guidance, allowed=allowed, forced=forced,
             noise=noise, mode="match"),
        Case("broken", broken, tokens, lengths, Warp(), draft, *rest, scale=omega * 99),
        Case("broken-top-k", broken, tokens, lengths, top, draft, *rest),
        Case("broken-match", broken, tokens, lengths, Warp(), None, *rest, mode="match"),
        Case("broken-greedy", broken, tokens, lengths, Warp(temperature=0.0), None, *rest),
    ]  # fmt: skip
    return [_to(case, device) for case in found]


def _to(case: Case, device: str) -> Case:
    moved = {name: value.to(device) for name, value in vars(case).items() if isinstance(value, Tensor)}
    return replace(case, **moved)  # type: ignore[arg-type]
