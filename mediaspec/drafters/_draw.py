"""What drafters with a model share: one draw from draft logits, and how far a draft may reach."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.rng import TARGET
from ..core.types import DecodeState, Draft
from ..kernels.sample import Sampled, sample

__all__ = ["Numbers", "draft_lengths", "draft_steps", "joined_chain", "per_branch"]


def draft_steps(state: DecodeState, budget: int) -> int:
    """Draft positions worth computing: the last token of an image is always the target's own draw."""
    room = state.target.num_tokens - 1 - min(state.host_lengths)
    return max(1, min(budget, room))


def draft_lengths(state: DecodeState, budget: int) -> Tensor:
    """[B] int64: how much of a draft of `budget` positions fits before each row's last token."""
    if max(state.host_lengths) + budget < state.target.num_tokens:
        return torch.full_like(state.lengths, budget)
    return (state.target.num_tokens - 1 - state.lengths).clamp(min=0, max=budget)


class Numbers:
    """Positions and noise of all draft depths of one round, gathered at once: per depth only views are left to make.

    Args:
        state: the rows at the start of the round.
        depth: how many draft positions there are.
    """

    def __init__(self, state: DecodeState, depth: int) -> None:
        self.noise = state.rng.noise_from(state.lengths, state.host_lengths, depth, state.draft_purpose)
        self.positions: Tensor | None = None
        if self.noise is None:
            self.positions = state.lengths[:, None] + torch.arange(depth, device=state.lengths.device)
        self.forced = state.forced

    def draw(
        self, state: DecodeState, logits: Tensor, depth: int, width: int = 1, need_probs: bool = False
    ) -> Sampled:
        """Draws the draft tokens at `depth` (0 is the next token) from the law the target would use on these logits.

        Args:
            logits: [B, G, N, V]; the N rows are nodes of one depth, so they share a position and its noise.
            width: children per node, drawn without replacement.
            need_probs: return the law even where the rule couples and only compares tokens.

        Returns:
            tokens [B, N] or [B, N, width]; `probs` [B, N, V], else None where the rule couples.
        """
        count, here = logits.shape[2], slice(depth, depth + 1)
        positions = self.positions[:, here] if self.positions is not None else None
        noise = self.noise[:, here] if self.noise is not None else None
        forced = self.forced[:, here] if self.forced is not None else None
        if count > 1:
            positions = positions.expand(-1, count) if positions is not None else None
            noise = noise.expand(-1, count, -1) if noise is not None else None
            forced = forced.expand(-1, count) if forced is not None else None
        # verification refuses a draft without a defined law (overflow in a half-precision head), so any id will do
        return sample(
            logits,
            state.warp,
            seeds=state.rng.seeds,
            positions=positions,
            purpose=state.draft_purpose,
            guidance=state.guidance if logits.shape[1] == 2 else None,
            allowed=state.allowed,
            forced=forced,
            noise=noise,
            width=width,
            need_probs=need_probs or state.draft_purpose != TARGET,
            mark_undefined=False,
        )


def joined_chain(state: DecodeState, drawn: list[Sampled]) -> Draft:
    """Joins the draws of a chain to a `Draft`; near the end of an image `lengths` cuts rows short."""
    tokens = torch.cat([one.tokens for one in drawn], 1)
    laws = [one.probs for one in drawn if one.probs is not None] if state.draft_purpose != TARGET else []
    return Draft(tokens, draft_lengths(state, len(drawn)), torch.cat(laws, 1) if laws else None)


def per_branch(values: Tensor, branches: int) -> Tensor:
    """[B] -> [B * branches], every branch of a row with its row's value."""
    return values if branches == 1 else values.repeat_interleave(branches)
