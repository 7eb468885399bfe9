"""Sink sets, and the learned sink logit that must be applied once."""

from __future__ import annotations

import torch
from torch import Tensor

from mediaspec.attention.sinks import apply_sink_logit, sink_metric, sink_set


def test_the_sink_set_is_found_where_it_is() -> None:
    means = torch.zeros(4, 4, 3000)
    means[0, 0, 700] = 0.9  # a quarter of the heads of a quarter of the layers
    means[0, 1, 800] = means[0, 1, 801] = 0.04  # below the threshold
    means[:, :, 2500] = 0.9  # recent, no sink
    assert sink_set(means, 3000) == [0, 1, 2, 3, 700]
    means[:, :, 10:20] = 0.08
    assert sink_set(means, 3000) == [10, 11, 12, 13, 14, 15, 16, 17]  # at most eight, the heaviest first
    assert sink_set(torch.zeros(1, 1, 3), 3) == [0, 1, 2]


def test_the_metric_counts_heads() -> None:
    scores = torch.zeros(2, 3, 5)
    scores[0, :, 0] = 0.5
    assert sink_metric(scores, 0.3).tolist() == [0.5, 0, 0, 0, 0]


def parts(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Output and row sums of a softmax over some keys."""
    return logits.softmax(-1) @ values, logits.logsumexp(-1)


def merge(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(one[1], two[1])
    return one[0] * (one[1] - lse).exp()[..., None] + two[0] * (two[1] - lse).exp()[..., None], lse


def test_a_learned_sink_is_applied_once_behind_the_merge() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, values = torch.randn(2, 3, 4, 20, generator=draw), torch.randn(2, 3, 20, 8, generator=draw)
    sinks = torch.tensor([0.5, 3.0, -2.0])
    column = sinks[:, None, None].expand(2, 3, 4, 1)
    direct = torch.cat([logits, column], -1).softmax(-1)[..., :-1] @ values
    one, two = parts(logits[..., :7], values[:, :, :7]), parts(logits[..., 7:], values[:, :, 7:])
    output, lse = apply_sink_logit(*merge(one, two), sinks)
    torch.testing.assert_close(output, direct)
    torch.testing.assert_close(lse, torch.cat([logits, column], -1).logsumexp(-1))
    twice, _ = merge(apply_sink_logit(*one, sinks), apply_sink_logit(*two, sinks))
    assert float((twice - direct).abs().max()) > 0.05
