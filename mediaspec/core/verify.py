"""Verification of a draft by any acceptance rule, in plain torch through the rule's accepted mass.

Rules that are linear in P and Q are verified by the fused kernels (see `rules.base`); this is the general form for all
others and for the Hellinger ledger. Same uniforms, same noise, same conventions: a draft token x at position i is
accepted iff u_i Q_i(x) < a_i(x); the first rejection emits argmax(w / E) with w the residual weights and E ~ Exp(1);
when nothing is rejected w is the target's row behind the draft. No host sync.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.sample import probabilities
from ..kernels.verify_chain import Residual
from . import rng as purposes
from .law import emitted_law, one_step_drift, point_mass, residual_weights, squared_hellinger
from .rng import RowRng
from .types import Draft, Verdict, Warp

__all__ = ["MassRule", "Rule", "VerifyInputs", "verify_chain_by_mass", "verify_tree_by_mass"]


@dataclass(frozen=True)
class VerifyInputs:
    """Everything one verification reads.

    Args:
        target_logits: [B, G, N, V] raw logits of both guidance branches at the scored rows; N = K + 1 for a chain,
            nodes + 1 for a tree.
        draft: the proposal; its `lengths` say how much of each row counts.
        warp: how logits become the sampled law.
        guidance: [B] float32 guidance scales, None when G = 1.
        rng: the rows' generator.
        start: [B] int64 absolute position of the first drafted token.
        forced: [B, K+1] int64 forced token per position from `start` on, or -1; None when nothing is forced.
        allowed: [V] bool, tokens that may ever appear; None when all.
        need_choices: also return the target's own draw at every row (match mode).
        need_probs: also return the target's processed law at every row.
        host_start: `start` on the host, where it is known without a sync.
        ledger: "tv", "hellinger" or "none"; None: the rule's own.
    """

    target_logits: Tensor
    draft: Draft
    warp: Warp
    rng: RowRng
    start: Tensor
    guidance: Tensor | None = None
    forced: Tensor | None = None
    allowed: Tensor | None = None
    need_choices: bool = False
    need_probs: bool = False
    host_start: list[int] | None = None
    ledger: str | None = None


class Rule(Protocol):
    """What the engine asks of an acceptance rule."""

    coupled: bool
    ledger: str

    @property
    def guarantee(self) -> str: ...

    def verify(self, inputs: VerifyInputs) -> Verdict: ...


class MassRule(Protocol):
    """What this file asks of an acceptance rule."""

    residual: Residual

    def accepted_mass(self, p: Tensor, q: Tensor, first: int = 0) -> Tensor: ...


def verify_chain_by_mass(rule: MassRule, inputs: VerifyInputs) -> Verdict:
    """Verifies a chain draft.

    Args:
        rule: accepted mass [B, K, V] from P and Q, and the kind of residual.
        inputs: the draft must be a chain.

    Returns:
        Verdict; a row whose next token would come from an undefined law (NaN or +inf logits, no admissible token) has
        num_accepted 0 and next_token -1.
        With ledger "hellinger", `hellinger[b, i]` is H^2(m_i, P_i) times prod sqrt(P/m) over the tokens emitted before
        it in this round, and `weight[b]` the log of that product over all tokens of the round.
    """
    draft, rng = inputs.draft, inputs.rng
    tokens, lengths = draft.tokens, draft.lengths
    length = tokens.shape[1]
    p_all = _target_probs(inputs, inputs.forced)
    vocab = p_all.shape[-1]
    order = torch.arange(length, device=tokens.device)
    p = p_all[:, :length]
    q = draft.probs if draft.probs is not None else point_mass(tokens, vocab)
    a = rule.accepted_mass(p, q, 0)

    picked = tokens.clamp(min=0)[..., None]
    uniform = rng.uniforms_from(inputs.start, inputs.host_start, length, purposes.ACCEPT)
    accepted = uniform * q.gather(-1, picked)[..., 0] < a.gather(-1, picked)[..., 0]
    forced = inputs.forced[:, :length] >= 0 if inputs.forced is not None else torch.zeros_like(accepted)
    if inputs.forced is not None:
        accepted = torch.where(forced, inputs.forced[:, :length] == tokens, accepted)
    accepted = accepted & (order < lengths[:, None])
    num_accepted = accepted.long().cumprod(1).sum(1)

    tested = (order <= num_accepted[:, None]) & (order < lengths[:, None]) & ~forced
    drift = torch.where(tested, one_step_drift(p, a), 0.0).float()

    row = num_accepted[:, None, None].expand(-1, 1, vocab)
    p_next = p_all.gather(1, row)[:, 0]
    if length:
        inside = row.clamp(max=length - 1)
        weights = residual_weights(p_next, a.gather(1, inside)[:, 0], rule.residual)
        weights = torch.where((num_accepted < lengths)[:, None], weights, p_next)
    else:
        weights = p_next
    next_token = _draw(rng, inputs.start + num_accepted, weights)

    hellinger = weight = None
    if inputs.ledger == "hellinger":
        hellinger, weight = _hellinger(p, emitted_law(p, a, rule.residual), tokens, next_token, num_accepted, tested)
    broken = next_token < 0
    return Verdict(
        num_accepted=torch.where(broken, 0, num_accepted),
        next_token=next_token,
        drift=torch.where(broken[:, None], 0.0, drift),
        target_probs=p_all if inputs.need_probs else None,
        hellinger=hellinger,
        weight=weight,
    )


def verify_tree_by_mass(rule: MassRule, inputs: VerifyInputs) -> Verdict:
    """Verifies a tree draft, walking it by depth and sibling rank with masks.

    Children drawn without replacement are tried in draw order; each rejection moves P to its residual and removes the
    token from Q. Only the last sibling of a node is relaxed, the others get the exact rule: at equal node acceptance
    this has the lowest TV in 164 of 167 random two-child nodes, since extra acceptance at an early sibling is partly
    wasted on tokens a later one would have accepted. `draft.probs` None: every child is a point mass.

    Args:
        rule: accepted mass [B, 1, V] at a depth, and the kind of residual.
        inputs: the draft must be a tree; ledger "hellinger" is for chains.

    Returns:
        Verdict with `path` and, per depth, the drift summed over the tried siblings.
    """
    draft, rng = inputs.draft, inputs.rng
    assert draft.tree is not None, "verify_tree_by_mass needs a tree draft"
    if inputs.ledger == "hellinger":
        raise ValueError('ledger="hellinger" is defined for chains; with a draft tree use ledger="tv"')
    tables = draft.tree.tables(draft.tokens.device)
    tokens, limit = draft.tokens, draft.lengths
    batch, depth = tokens.shape[0], draft.tree.max_depth
    width = tables.children.shape[1]
    rows = torch.arange(batch, device=tokens.device)
    forced_rows = None if inputs.forced is None else inputs.forced[:, tables.depth]
    laws = _target_probs(inputs, forced_rows)
    vocab = laws.shape[-1]

    current = torch.zeros_like(limit)
    alive = torch.ones_like(limit, dtype=torch.bool)
    num_accepted = torch.zeros_like(limit)
    path = tokens.new_full((batch, depth), -1)
    drift = torch.zeros(batch, depth, device=tokens.device)
    weights = laws[:, 0]
    for level in range(depth):
        p = laws[rows, current]
        weights = torch.where(alive[:, None], p, weights)
        q = torch.zeros_like(p)
        if draft.probs is not None:
            q = draft.probs[rows, tables.internal[current].clamp(min=0)]
        free = torch.ones_like(alive) if inputs.forced is None else inputs.forced[:, level] < 0
        open_ = alive & (level < limit)
        took = torch.zeros_like(alive)
        following = current
        for rank in range(width):
            child = tables.children[current, rank]
            trying = open_ & ~took & (child > 0)
            token = tokens.gather(1, (child - 1).clamp(min=0)[:, None])[:, 0]
            hit = point_mass(token, vocab, p.dtype)
            if draft.probs is None:
                q = hit
            last = tables.children[current, rank + 1] <= 0 if rank + 1 < width else torch.ones_like(took)
            mass = (q * hit).sum(-1)
            trying = trying & (mass > 0)  # a child without draft mass was never drawn: it is passed over
            relaxed = rule.accepted_mass(p[:, None], q[:, None], level)[:, 0]
            a = torch.where(last[:, None], relaxed, torch.minimum(p, q))
            uniform = rng.uniform((inputs.start + level)[:, None], purposes.ACCEPT, sibling=rank)[:, 0]
            accepted = uniform * mass < (a * hit).sum(-1)
            accepted = trying & torch.where(free, accepted, (p * hit).sum(-1) > 0)  # forced: P is one-hot
            drift[:, level] += torch.where(trying & free, one_step_drift(p, a), 0.0)
            following = torch.where(accepted, child, following)
            took = took | accepted
            rejected = (trying & ~accepted)[:, None]
            residual = residual_weights(p, a, rule.residual)
            p = torch.where(rejected, residual / residual.sum(-1, keepdim=True), p)
            left = q * (1 - hit)
            q = torch.where(rejected, left / left.sum(-1, keepdim=True).clamp(min=1e-30), q)
        weights = torch.where((alive & ~took)[:, None], p, weights)
        path[:, level] = torch.where(took, following, -1)
        num_accepted = num_accepted + took
        current, alive = following, took
    weights = torch.where(alive[:, None], laws[rows, current], weights)
    next_token = _draw(rng, inputs.start + num_accepted, weights)
    broken = next_token < 0
    return Verdict(
        num_accepted=torch.where(broken, 0, num_accepted),
        next_token=next_token,
        drift=torch.where(broken[:, None], 0.0, drift),
        path=torch.where(broken[:, None], -1, path),
        target_probs=laws if inputs.need_probs else None,
    )


def _target_probs(inputs: VerifyInputs, forced: Tensor | None) -> Tensor:
    return probabilities(
        inputs.target_logits, inputs.warp, guidance=inputs.guidance, allowed=inputs.allowed, forced=forced
    )


def _draw(rng: RowRng, positions: Tensor, weights: Tensor) -> Tensor:
    """[B]: argmax(w / E), a draw from weights [B, V] with the noise of each row's position; -1 where they are NaN."""
    noise = rng.exponential(positions[:, None], purposes.TARGET)[:, 0]
    score, token = (weights / noise).max(-1)
    return torch.where(score == score, token, -1)


def _hellinger(
    p: Tensor, m: Tensor, tokens: Tensor, next_token: Tensor, num_accepted: Tensor, tested: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted squared distances [B, K] and the log weight of the round [B]; see `core.ledger`."""
    order = torch.arange(tokens.shape[1], device=tokens.device)
    emitted = torch.where(order == num_accepted[:, None], next_token[:, None], tokens).clamp(min=0)[..., None]
    ratio = p.gather(-1, emitted) / m.gather(-1, emitted).clamp(min=1e-30)
    log_root = torch.where(tested, 0.5 * ratio[..., 0].log(), 0.0)
    before = torch.nn.functional.pad(log_root.cumsum(1)[:, :-1], (1, 0))
    distance = torch.where(tested, before.exp() * squared_hellinger(p, m), 0.0)
    return distance.float(), log_root.sum(1).float()
