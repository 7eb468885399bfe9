"""Attention sinks: keys that most queries look at whatever they hold, and the learned sink logit (arXiv:2410.10781).

Letters: L layers, H query heads, B rows, n keys, w strip rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_sink_logit", "sink_metric", "sink_scores", "sink_set"]

DEFAULT_SINKS = 4  # first positions that always count: dropping them costs a language model up to 13 points
CAP = 8


def sink_scores(columns: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
    """alpha_k, the mean attention a key gets from the strip's queries that can see it; arXiv:2410.10781, section 3.

    Args:
        columns: [..., B, H, n] column sums of a strip.
        lengths: [B] keys per row; rows: [B] strip rows per row. With rows = lengths this is the paper's alpha_k.

    Returns:
        Like `columns`; 0 behind a row's length.
    """
    order = torch.arange(columns.shape[-1], device=columns.device)
    seen = torch.minimum(rows[:, None], lengths[:, None] - order)[:, None]
    return torch.where(seen > 0, columns / seen.clamp(min=1), 0.0)


def sink_metric(scores: Tensor, epsilon: float = 0.3) -> Tensor:
    """[n], share of heads (all leading dimensions) whose alpha_k exceeds `epsilon`; arXiv:2410.10781, eq. (2).

    Comparable only at equal length and epsilon: a longer text spreads the mass over more keys.
    """
    return (scores > epsilon).double().flatten(0, -2).mean(0)


def sink_set(
    means: Tensor,
    length: int,
    threshold: float = 0.05,
    margin: int = 1024,
    share: float = 0.25,
) -> list[int]:
    """Positions that act as sinks of a model: in 1/4 of the heads of 1/4 of the layers, and the first four.

    Args:
        means: [L, H, n] mean mass per key over the strip.
        length: keys that exist.
        threshold: mean mass above which a head votes for a key.
        margin: the newest keys are recent, not sinks.
        share: of heads and of layers that have to agree.

    Returns:
        At most 8 sorted positions; a found one beats a default one when they are too many.

    Example:
        >>> means = torch.zeros(2, 2, 40); means[:, :, 9] = 0.4
        >>> sink_set(means, 40, margin=10)
        [0, 1, 2, 3, 9]
    """
    last = max(length - margin, 0)
    votes = (means[:, :, :last] > threshold).double().mean(1) >= share
    found = votes.double().mean(0) >= share
    weight = torch.where(found, means[:, :, :last].double().mean((0, 1)), 0.0)
    ranked = torch.argsort(-weight, stable=True)[: int(found.sum())].tolist()
    defaults = [key for key in range(min(DEFAULT_SINKS, length)) if key not in ranked]
    return sorted((ranked + defaults)[:CAP])


def apply_sink_logit(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds a learned sink's term to a finished attention: o sigmoid(lse - c), logaddexp(lse, c).

    Apply it once, behind the merge of partial results; in every partial it would be counted as often as there are
    parts.

    Args:
        output: [B, H, w, D]; lse: [B, H, w] natural-log row sums without the sink; sinks: [H] logits c.

    Returns:
        The output and row sums of a softmax with one more column that has no value.
    """
    c = sinks.to(lse.dtype)[:, None]
    return output * torch.sigmoid(lse - c)[..., None].to(output.dtype), torch.logaddexp(lse, c)
