"""Whole sequences decoded with a rule: their law, their ledgers, and the exact rule at image vocabulary sizes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mediaspec.core.ledger import Ledger, hellinger_bound
from mediaspec.core.rng import DRAFT, RowRng
from mediaspec.core.tree import TreeSpec
from mediaspec.core.types import Draft, Verdict, Warp
from mediaspec.core.verify import VerifyInputs
from mediaspec.kernels.sample import sample
from mediaspec.rules import AcceptanceRule, CoolSDRule, make_rule
from mediaspec.testing.check_rule import chi_square_p_value

from .exact_laws import GivenNumbers, sequence_law, toy_laws


def decode_toy(
    rule: AcceptanceRule, vocab: int, length: int, horizon: int, rows: int
) -> tuple[Tensor, Ledger, Tensor]:
    """Tokens [rows, horizon], ledger and rounds per row of the toy models, drafts tested up to the last token."""
    tokens = torch.zeros(rows, horizon + length + 1, dtype=torch.int64)
    lengths, rounds = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
    rng = RowRng(torch.arange(rows), vocab, horizon + length + 1)
    ledger = Ledger(rows, "cpu", rule.ledger)
    order = torch.arange(length)
    place = torch.arange(1, tokens.shape[1] + 1)
    while bool((lengths < horizon).any()):
        h = (place * (tokens + 1) * (place <= lengths[:, None])).sum(1)
        laws_p, laws_q = [], []
        for i in range(length + 1):
            p, q = toy_laws(h, vocab)
            laws_p.append(p)
            if i < length:
                laws_q.append(q)
                here = (lengths + i)[:, None]
                logits = q.log().float()[:, None, None]
                drawn = sample(logits, Warp(), seeds=rng.seeds, positions=here, purpose=DRAFT).tokens
                h = h + (lengths + i + 1) * (drawn[:, 0] + 1)
                tokens.scatter_(1, here, drawn)
        drafted = tokens.gather(1, lengths[:, None] + order)
        draft = Draft(drafted, (horizon - lengths).clamp(max=length), torch.stack(laws_q, 1).float())
        logits = torch.stack(laws_p, 1).log().float()[:, None]
        verdict = rule.verify(VerifyInputs(logits, draft, Warp(), rng, lengths))
        live = lengths < horizon
        ledger.add(verdict)
        rounds += live
        tokens.scatter_(1, (lengths + verdict.num_accepted)[:, None], verdict.next_token[:, None])
        lengths = torch.where(live, (lengths + verdict.num_accepted + 1).clamp(max=horizon), lengths)
    ledger.store(range(rows))
    return tokens[:, :horizon], ledger, rounds


@pytest.mark.parametrize("omegas, residual", [([2.0, 1.5], "gstar"), ([2.0, 1.5], "band"), ([1.0, 1.0], "gstar")])
def test_decoded_law_and_ledgers_are_the_enumerated_ones(omegas: list[float], residual: str) -> None:
    """T = 5, V = 3: TV, TV ledger, Hellinger ledger and rounds within 4 standard errors of their exact values."""
    rows, horizon, vocab = 20_000, 5, 3
    rule = CoolSDRule(omega=omegas, residual=residual, ledger="hellinger")
    exact = sequence_law(rule, vocab, len(omegas), horizon)
    tokens, ledger, rounds = decode_toy(rule, vocab, len(omegas), horizon, rows)
    report = ledger.report()

    keys = sorted(exact["target"])
    law = torch.tensor([exact["law"][key] for key in keys], dtype=torch.float64)
    target = torch.tensor([exact["target"][key] for key in keys], dtype=torch.float64)
    number = (tokens * vocab ** torch.arange(horizon - 1, -1, -1)).sum(1)
    assert chi_square_p_value(torch.bincount(number, minlength=vocab**horizon), law) > 1e-4

    surplus = law > target
    share, wanted = float(surplus[number].double().mean()), float(law[surplus].sum())
    error = math.sqrt(wanted * (1 - wanted) / rows)
    measured = share - float(target[surplus].sum())
    assert abs(measured - exact["tv"]) < 4 * error + 1e-9

    assert abs(float(rounds.mean()) - exact["rounds"]) < 4 * float(rounds.std()) / math.sqrt(rows)
    assert ledger.drift() == report.drift.tolist()
    if rule.lossless:
        assert not report.drift.any() and report.bound == 0 and measured < 4 * error
        return
    for sums, mean in ((report.drift, exact["ledger"]), (report.hellinger, 1 - exact["bc"])):
        assert abs(float(sums.double().mean()) - mean) < 4 * float(sums.std()) / math.sqrt(rows)
    bound = hellinger_bound(report.hellinger)
    assert measured < bound < float(report.drift.mean()) and report.bound == bound


def image_rows(vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    """Logits of a target and a draft row, wide as image rows are."""
    generator = torch.Generator().manual_seed(seed)
    target = 1.5 * torch.randn(vocab, generator=generator)
    return target, target + torch.randn(vocab, generator=generator)


def exact_rounds(tree: TreeSpec | None, rounds: int, vocab: int, warp: Warp) -> tuple[Tensor, Tensor, Tensor]:
    """First tokens of many rounds of the exact rule, the acceptance, and the warped target law."""
    target, drafted = image_rows(vocab, 3)
    law = warped(target, warp)
    q = warped(drafted, warp)
    rule, first, accepted = make_rule("exact"), [], []
    width = 1 if tree is None else tree.num_nodes
    generator = torch.Generator().manual_seed(17)
    part = 5_000
    for _ in range(rounds // part):
        start = torch.zeros(part, dtype=torch.int64)
        noise = torch.empty(part, 2, vocab).exponential_(generator=generator)
        scores = q / torch.empty(part, vocab).exponential_(generator=generator)
        tokens = scores.topk(width).indices
        rng = GivenNumbers(start, torch.rand(part, 1, width, generator=generator), noise)
        draft = Draft(tokens, start + 1, q.float().expand(part, 1, -1), tree)
        logits = target.expand(part, 1, width + 1, -1)
        verdict: Verdict = rule.verify(VerifyInputs(logits, draft, warp, rng, start))
        chosen = torch.zeros_like(start) if tree is None else (verdict.path[:, 0] - 1).clamp(min=0)
        drafts = tokens.gather(1, chosen[:, None])[:, 0]
        first.append(torch.where(verdict.num_accepted > 0, drafts, verdict.next_token))
        accepted.append(verdict.num_accepted)
    return torch.cat(first), torch.cat(accepted), law


def warped(logits: Tensor, warp: Warp) -> Tensor:
    if warp.top_k:
        logits = logits.masked_fill(logits < logits.topk(warp.top_k).values[-1], -torch.inf)
    return logits.softmax(-1)


@pytest.mark.parametrize(
    "rounds", [pytest.param(20_000, id="20k"), pytest.param(200_000, marks=pytest.mark.slow, id="200k")]
)
@pytest.mark.parametrize("widths", [None, [3]], ids=["chain", "tree"])
def test_exact_rule_at_image_vocabulary_with_top_k(widths: list[int] | None, rounds: int) -> None:
    """V = 1024, top-k 200: chi-square against the target's law, level 1e-4, fixed seed."""
    warp, vocab = Warp(top_k=200), 1024
    tree = None if widths is None else TreeSpec.from_widths(widths)
    tokens, accepted, law = exact_rounds(tree, rounds, vocab, warp)
    counts = torch.bincount(tokens, minlength=vocab)
    assert chi_square_p_value(counts, law) > 1e-4
    assert not counts[law == 0].any()
    rate = float(accepted.double().mean())
    overlap = float(torch.minimum(law, warped(image_rows(vocab, 3)[1], warp)).sum())
    if tree is None:
        assert abs(rate - overlap) < 4 * math.sqrt(overlap * (1 - overlap) / rounds)
    else:
        assert rate > overlap + 0.1  # two more children are worth something
