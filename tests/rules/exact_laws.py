"""Exact enumeration of what rules emit, in float64, and the toy models of the reference cases.

With h = sum_j j (x_j + 1) over the prefix and v = 1..V: target logits 1.2 sin(1.7 v + 0.9 h), draft logits the same
plus 0.8 cos(2.3 v + 0.5 h).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import torch
from torch import Tensor

from mediaspec.core.law import emitted_law, one_step_drift, residual_weights, squared_hellinger
from mediaspec.core.rng import RowRng
from mediaspec.rules import AcceptanceRule

Prefix = tuple[int, ...]


def toy_rows(prefix: Prefix, vocab: int) -> tuple[Tensor, Tensor]:
    """P and Q behind a prefix, float64 [V]."""
    return toy_laws(torch.tensor(float(sum((j + 1) * (x + 1) for j, x in enumerate(prefix)))), vocab)


def toy_laws(h: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """h [...] -> P and Q, float64 [..., V]."""
    v = torch.arange(1, vocab + 1, dtype=torch.float64)
    h = h.double()[..., None]
    target = 1.2 * torch.sin(1.7 * v + 0.9 * h)
    draft = target + 0.8 * torch.cos(2.3 * v + 0.5 * h)
    return target.softmax(-1), draft.softmax(-1)


def step(rule: AcceptanceRule, p: Tensor, q: Tensor, position: int) -> dict[str, Tensor]:
    """One draft position: accepted mass a, alpha, R, resampling law G, emitted law m, drift e."""
    a = rule.accepted_mass(p[None], q[None], position)[0]
    weights = residual_weights(p, a, rule.residual)
    return {
        "a": a,
        "alpha": a.sum(),
        "R": 1 - a.sum(),
        "G": weights / weights.sum(),
        "m": emitted_law(p, a, rule.residual),
        "e": one_step_drift(p, a),
    }


def target_law(vocab: int, length: int) -> dict[Prefix, float]:
    law = {}
    for x in itertools.product(range(vocab), repeat=length):
        law[x] = math.prod(float(toy_rows(x[:t], vocab)[0][x[t]]) for t in range(length))
    return law


def total_variation(one: dict[Prefix, float], other: dict[Prefix, float]) -> float:
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


def chain_round(rule: AcceptanceRule, vocab: int, length: int) -> dict:
    """The law of `length` tokens after one round whose rejected tail the target continues, with the drift bound."""
    law = dict.fromkeys(itertools.product(range(vocab), repeat=length), 0.0)
    out = {"bound": 0.0, "mean_accepted": 0.0, "p_all_accepted": 0.0}

    def continue_by_target(prefix: Prefix, mass: float) -> None:
        if len(prefix) == length:
            law[prefix] += mass
            return
        p, _ = toy_rows(prefix, vocab)
        for x in range(vocab):
            continue_by_target((*prefix, x), mass * float(p[x]))

    def walk(prefix: Prefix, mass: float) -> None:
        if len(prefix) == length:
            law[prefix] += mass
            out["p_all_accepted"] += mass
            return
        one = step(rule, *toy_rows(prefix, vocab), len(prefix))
        out["bound"] += mass * float(one["e"])
        out["mean_accepted"] += mass * float(one["alpha"])
        for x in range(vocab):
            continue_by_target((*prefix, x), mass * float(one["R"] * one["G"][x]))
            if one["a"][x] > 0:
                walk((*prefix, x), mass * float(one["a"][x]))

    walk((), 1.0)
    target = target_law(vocab, length)
    return {**out, "tv": total_variation(law, target), "law": law, "target": target}


def sequence_law(rule: AcceptanceRule, vocab: int, length: int, tokens: int) -> dict:
    """The law of `tokens` tokens over many rounds of `length` drafts, and both ledgers in expectation."""
    state: dict[tuple[Prefix, int], float] = {((), 0): 1.0}
    root: dict[tuple[Prefix, int], float] = {((), 0): 1.0}
    ledger, rounds, hellinger = 0.0, 1.0, 0.0
    for t in range(tokens):
        following: Counter[tuple[Prefix, int]] = Counter()
        following_root: Counter[tuple[Prefix, int]] = Counter()
        for (prefix, j), mass in state.items():
            p, q = toy_rows(prefix, vocab)
            weight = root[prefix, j]
            if j == length:
                for x in range(vocab):
                    following[(*prefix, x), 0] += mass * float(p[x])
                    following_root[(*prefix, x), 0] += weight * float(p[x])
                rounds += mass if t + 1 < tokens else 0.0
                continue
            one = step(rule, p, q, j)
            ledger += mass * float(one["e"])
            hellinger += weight * float(squared_hellinger(p, one["m"]))
            for x in range(vocab):
                taken, resampled, m = float(one["a"][x]), float(one["R"] * one["G"][x]), float(one["m"][x])
                ratio = math.sqrt(float(p[x]) / m) if m > 0 else 0.0
                for key, part in ((((*prefix, x), j + 1), taken), (((*prefix, x), 0), resampled)):
                    following[key] += mass * part
                    following_root[key] += weight * part * ratio
            rounds += mass * float(one["R"]) if t + 1 < tokens else 0.0
        state, root = dict(following), dict(following_root)
    law: dict[Prefix, float] = {}
    for (prefix, _), mass in state.items():
        law[prefix] = law.get(prefix, 0.0) + mass
    target = target_law(vocab, tokens)
    return {
        "tv": total_variation(law, target),
        "ledger": ledger,
        "rounds": rounds,
        "bc": sum(root.values()),
        "bc_ledger": 1 - hellinger,
        "law": law,
        "target": target,
    }


def sampled_children(rules: list[AcceptanceRule], p: Tensor, q: Tensor) -> dict:
    """A node whose children are drawn from q without replacement; child k is tested by rules[k]."""
    m, out = torch.zeros_like(p), {"accept": 0.0, "bound": 0.0}

    def walk(p: Tensor, q: Tensor, reach: float, k: int) -> None:
        if k == len(rules) or float(q.sum()) <= 0:
            m.add_(reach * p)
            return
        one = step(rules[k], p, q, 0)
        out["bound"] += reach * float(one["e"])
        out["accept"] += reach * float(one["alpha"])
        m.add_(reach * one["a"])
        for x in range(len(p)):
            rejected = float(q[x] - one["a"][x])
            if rejected > 1e-15:
                left = q.clone()
                left[x] = 0
                walk(one["G"], left / left.sum() if float(left.sum()) > 0 else left, reach * rejected, k + 1)

    walk(p, q, 1.0, 0)
    return {**out, "m": m, "tv": float(0.5 * (m - p).abs().sum())}


def fixed_children(rules: list[AcceptanceRule], p: Tensor, tokens: list[int]) -> dict:
    """A node whose children are fixed by the draft, each a point mass; child k is tested by rules[k]."""
    m, reach, accept, target = torch.zeros_like(p), 1.0, 0.0, p
    for rule, token in zip(rules, tokens, strict=True):
        q = torch.zeros_like(p)
        q[token] = 1
        one = step(rule, p, q, 0)
        m[token] += reach * float(one["alpha"])
        accept += reach * float(one["alpha"])
        reach *= float(one["R"])
        p = one["G"]
    m += reach * p
    return {"m": m, "tv": float(0.5 * (m - target).abs().sum()), "accept": accept}


class GivenNumbers(RowRng):
    """A generator that hands out given numbers: uniforms [B, K] (or [B, K, W] for siblings) and noise [B, K+1, V]."""

    def __init__(self, start: Tensor, uniforms: Tensor, noise: Tensor) -> None:
        super().__init__(torch.zeros(len(start), dtype=torch.int64), noise.shape[-1], 1 << 20)
        self.start, self.uniforms = start, uniforms if uniforms.dim() == 3 else uniforms[..., None]
        self.numbers = noise

    def uniform(self, positions: Tensor, purpose: int, sibling: int = 0) -> Tensor:
        return self.uniforms[..., sibling].gather(1, positions - self.start[:, None])

    def exponential(self, positions: Tensor, purpose: int) -> Tensor:
        offset = (positions - self.start[:, None]).clamp(max=self.numbers.shape[1] - 1)
        return self.numbers.gather(1, offset[..., None].expand(-1, -1, self.numbers.shape[-1]))

    def noise(self, positions: Tensor, purpose: int) -> Tensor:
        return self.exponential(positions, purpose)
