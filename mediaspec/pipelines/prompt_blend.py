"""How two prompts mix in one frame (PromptBlend, arXiv:2412.17254): which step and layer, and by which arithmetic.

P prompts, N frames, S text positions, C width of the text features. Frame n mixes prompts i and i + 1 by a, from
`timeline.blend_schedule`. Cross-attention models mix the text features themselves; joint attention models keep one
text block per prompt and mix the attention masses (`mass_log_weights`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["PromptGate", "blend_prompts", "mass_blend", "mass_log_weights"]

TOLERANCE = 1e-9
"""Steps are compared as fractions; 3/10 must count as 0.3."""


@dataclass(frozen=True)
class PromptGate:
    """Where a transition frame takes the mixture; elsewhere it takes the earlier prompt.

    A layer mixes when the denoising step lies in `steps` or the layer lies at `depth` or later: the first shapes the
    object, the second changes what things are while the layout stays.

    Args:
        steps: first and last step as fractions of all steps, both included: step index / number of steps.
        depth: index of the first cross-attention, in the order of execution, that always mixes; "up" is the first
            one of the up blocks; None mixes by step alone.

    Raises:
        ValueError: fractions outside 0..1 or in the wrong order, or a negative depth.

    Example:
        >>> gate = PromptGate(steps=(0.1, 0.3), depth=7)
        >>> gate.is_open(0.5, depth=0, first=7), gate.is_open(0.5, depth=7, first=7), gate.is_open(0.2)
        (False, True, True)
    """

    steps: tuple[float, float] = (0.1, 0.3)
    depth: int | Literal["up"] | None = "up"

    def __post_init__(self) -> None:
        if len(self.steps) != 2 or not 0 <= self.steps[0] <= self.steps[1] <= 1:
            raise ValueError(f"steps={self.steps!r}; write two fractions of the denoising steps, e.g. (0.1, 0.3)")
        if self.depth not in ("up", None) and (isinstance(self.depth, bool) or not isinstance(self.depth, int)):
            raise ValueError(f"depth={self.depth!r}; write the index of a cross-attention, 'up', or None")
        if isinstance(self.depth, int) and self.depth < 0:
            raise ValueError(f"depth={self.depth}; cross-attentions count from 0")

    @classmethod
    def unet(cls) -> PromptGate:
        """Steps 5 to 15 of 50, and every layer from the first up block on."""
        return cls()

    @classmethod
    def transformer(cls) -> PromptGate:
        """For transformers, which have no decoder half: the first fifth of the steps is not mixed."""
        return cls(steps=(0.2, 1.0), depth=None)

    @classmethod
    def always(cls) -> PromptGate:
        """Mixes everywhere: plain interpolation."""
        return cls(steps=(0.0, 1.0), depth=None)

    def is_open(self, step_fraction: float, depth: int | None = None, first: int | None = None) -> bool:
        """Whether a layer mixes.

        Args:
            step_fraction: step index / number of steps.
            depth: index of the layer; None: the layer is not known, steps decide alone.
            first: the depth from which on layers always mix; None: `depth` of the gate where that is a number.
        """
        low, high = self.steps
        if low - TOLERANCE <= step_fraction <= high + TOLERANCE:
            return True
        if first is None and isinstance(self.depth, int):
            first = self.depth
        return self.depth is not None and depth is not None and first is not None and depth >= first


def blend_prompts(prompts: Tensor, index: Sequence[int] | Tensor, amount: Sequence[float] | Tensor) -> Tensor:
    """Text features per frame: (1 - a) P_i + a P_(i+1).

    Args:
        prompts: [P, S, C].
        index: N times i.
        amount: N times a in 0..1; where it is 0 the result is P_i bit for bit.

    Returns:
        [N, S, C] in the dtype of `prompts`.

    Example:
        >>> blend_prompts(torch.tensor([[[0.0]], [[4.0]]]), [0, 0, 1], [0.0, 0.25, 0.0]).flatten().tolist()
        [0.0, 1.0, 4.0]
    """
    where = torch.as_tensor(index, dtype=torch.long, device=prompts.device)
    # half precision has no lerp on every device, and a must keep its digits
    exact = prompts if prompts.dtype in (torch.float32, torch.float64) else prompts.float()
    a = torch.as_tensor(amount, dtype=torch.float64).to(prompts.device, exact.dtype)
    following = (where + 1).clamp(max=prompts.shape[0] - 1)
    return torch.lerp(exact[where], exact[following], a[:, None, None]).to(prompts.dtype)


def mass_log_weights(index: Sequence[int], amount: Sequence[float], num_prompts: int) -> Tensor:
    """Logit bias of text block p for video queries of frame n: log(1 - a), log a, or -inf.

    Args:
        index, amount: N times i and a.
        num_prompts: P.

    Returns:
        [N, P] float64.

    Example:
        >>> mass_log_weights([0], [0.5], 2).exp().tolist()
        [[0.5, 0.5]]
    """
    weights = torch.full((len(index), num_prompts), -math.inf, dtype=torch.float64)
    for n, (i, a) in enumerate(zip(index, amount, strict=True)):
        if a < 1:
            weights[n, i] = math.log1p(-a)
        if a > 0:
            weights[n, min(i + 1, num_prompts - 1)] = math.log(a)
    return weights


def mass_blend(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], amount: float
) -> tuple[Tensor, Tensor]:
    """Attention over two text blocks whose logits carry log(1 - a) and log a, as a mix of two plain attentions.

    The readable truth behind the joint attention route: the biased softmax over both blocks equals the two attentions
    mixed by their log-sum-exps.

    Args:
        query: [.., Q, D].
        keys, values: two tensors [.., S, D] each, one per prompt.
        amount: a in 0..1.

    Returns:
        (output [.., Q, D], share [.., Q] of the second block in the attention mass).
    """
    scale = query.shape[-1] ** -0.5
    logits = [scale * query @ key.transpose(-1, -2) for key in keys]
    bias = mass_log_weights([0], [amount], 2)[0].tolist()
    lse = [torch.logsumexp(logit, -1) + extra for logit, extra in zip(logits, bias)]
    share = torch.sigmoid(lse[1] - lse[0])
    outputs = [logit.softmax(-1) @ value for logit, value in zip(logits, values)]
    return torch.lerp(outputs[0], outputs[1], share[..., None]), share
