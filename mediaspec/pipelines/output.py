"""What the image pipelines return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffusers.utils import BaseOutput

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image
    from torch import Tensor

    from ..core.stats import Trace

__all__ = ["ImagePipelineOutput"]


@dataclass
class ImagePipelineOutput(BaseOutput):
    """Pictures, and how they came about.

    Args:
        images: in the order prompt 0 image 0, prompt 0 image 1, ...; by `output_type`: "pil" a list of pictures, "np"
            [B, H, W, 3] float32 in [0, 1], "pt" [B, 3, H, W] float32 in [0, 1], "tokens" [B, T] int64 (-1 where an
            interrupted run committed none).
        trace: per token how it was made, [B, T] each; only with `return_trace=True`, else absent.
        stats: JSON-ready dict: `tokens, target_calls, rounds, tokens_per_call, accepted_per_position,
            tested_per_position, drift {mean, max, per_image}, guarantee, hellinger_bound,
            tokens_per_image, calls_per_image, seconds {total, encode,
            prefill, draft, target, verify, commit, decode}, settings, seeds, versions, interrupted`. In a tuple it is
            the last entry.
    """

    images: list[PIL.Image.Image] | np.ndarray | Tensor
    trace: Trace | None = None
    stats: dict[str, Any] | None = None
