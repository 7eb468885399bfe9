"""From logits to a token: guidance, masks, temperature, top-k, top-p, softmax and one draw, in that order.

The drafter, plain decoding and the verifier all go through this one definition of the sampled law, so they cannot
differ in kind. B rows, G guidance branches (1, or 2 with branch 0 conditional), N positions, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from .. import philox
from ..backend import choose, launching_on

__all__ = ["Sampled", "Warp", "draw", "probabilities", "sample"]


@dataclass(frozen=True)
class Warp:
    """How logits become the sampled law.

    Args:
        temperature: 0, or at least 1e-6; 0 is greedy: all mass on the largest logit, ties to the lowest id.
        top_k: keep every token whose logit is >= the k-th largest (ties kept); 0, or k >= V, is off.
        top_p: in (0, 1]; keep the most likely tokens until their mass reaches top_p (ties kept); 1 is off.
        order: which truncation comes first. ("top_k", "top_p") is LlamaGen's, ("top_p", "top_k") LANTERN's.

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    order: tuple[str, str] = ("top_k", "top_p")

    def __post_init__(self) -> None:
        # below 1e-6 the quotient of an ordinary logit may overflow, and the law is greedy already
        if not (math.isfinite(self.temperature) and (self.temperature == 0 or self.temperature >= 1e-6)):
            raise ValueError(
                f"temperature={self.temperature!r} is not allowed: write 0 or a finite number >= 1e-6 "
                "(0 is greedy, 1 leaves the law as it is)."
            )
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k={self.top_k!r} is not allowed: write an integer >= 0 (0 switches top-k off).")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r} is not allowed: write a number in (0, 1] (1 switches top-p off).")
        if tuple(sorted(self.order)) != ("top_k", "top_p"):
            raise ValueError(f"order={self.order!r} is not allowed: write ('top_k', 'top_p') or ('top_p', 'top_k').")
        object.__setattr__(self, "order", tuple(self.order))


@dataclass(frozen=True)
class Sampled:
    """What `sample` drew.

    Args:
        tokens: [B, N] int64, or [B, N, width] in draw order when width > 1; -1 where the law is undefined
            (NaN or +inf logits, or no admissible token).
        probs: [B, N, V] float32 law the tokens were drawn from; None unless asked for.
    """

    tokens: Tensor
    probs: Tensor | None = None


def probabilities(
    logits: Tensor,
    warp: Warp,
    guidance: Tensor | None = None,
    allowed: Tensor | None = None,
    forced: Tensor | None = None,
    *,
    impl: str | None = None,
) -> Tensor:
    """The processed law of every position.

    Args:
        logits: [B, G, N, V] float32, bfloat16 or float16. G = 2: branch 0 conditional c, branch 1 unconditional u.
        warp: temperature and truncations.
        guidance: [B] float32 scales s of u + s * (c - u); needed with G = 2, refused with G = 1. Logits that both
            branches set to -inf give NaN here: exclude tokens through `allowed`.
        allowed: [V] bool, tokens that may appear.
        forced: [B, N] int64, a token id that takes all mass (whatever the logits and `allowed` say), -1 for none.
        impl: see `mediaspec.kernels.backend`.

    Returns:
        [B, N, V] float32; all NaN in a row with NaN or +inf logits or with no admissible token.

    Raises:
        ValueError: shapes or guidance do not fit together.
    """
    _check(logits, guidance, allowed, forced)
    if choose("sample.probabilities", logits, impl) == "triton":
        from .triton import probabilities as run

        with launching_on(logits):
            return run(logits, warp, guidance, allowed, forced)
    from . import reference

    return reference.probabilities(logits, warp, guidance, allowed, forced)


def sample(
    logits: Tensor,
    warp: Warp,
    *,
    seeds: Tensor,
    positions: Tensor | None,
    purpose: int,
    guidance: Tensor | None = None,
    allowed: Tensor | None = None,
    forced: Tensor | None = None,
    noise: Tensor | None = None,
    width: int = 1,
    need_probs: bool = False,
    mark_undefined: bool = True,
    impl: str | None = None,
) -> Sampled:
    """Draws argmax(p / E) with E ~ Exp(1) from the counter-based generator, which is a draw from p.

    Args:
        logits, warp, guidance, allowed, forced: as in `probabilities`.
        seeds: [B] int64.
        positions: [B, N] int64 absolute positions of the drawn tokens; may be None where `noise` is given.
        purpose: `philox.TARGET` or `philox.DRAFT`.
        noise: [B, N, V] float32, the same exponentials precomputed; None computes them.
        width: w > 1 returns the w best in order, which is w draws without replacement. With fewer than w admissible
            tokens the rest are tokens of zero mass.
        need_probs: also return the law.
        mark_undefined: False gives some valid id instead of -1 where the law is undefined, and saves three operations.
        impl: see `mediaspec.kernels.backend`.

    Raises:
        ValueError: shapes do not fit, or width is not in [1, V].
    """
    _check(logits, guidance, allowed, forced)
    if positions is None and noise is None:
        raise ValueError("positions=None needs the precomputed noise; give positions [B, N] int64.")
    if not 1 <= width <= logits.shape[-1]:
        raise ValueError(
            f"width={width} is not allowed: write a number from 1 to the vocabulary size {logits.shape[-1]}."
        )
    arguments = (logits, warp, seeds, positions, purpose, guidance, allowed, forced, noise, width, need_probs,
                 mark_undefined)  # fmt: skip
    if choose("sample", logits, impl) == "triton":
        from .triton import sample as run

        with launching_on(logits):
            return run(*arguments)
    from . import reference

    return reference.sample(*arguments)


def draw(weights: Tensor, *, seeds: Tensor, positions: Tensor, purpose: int, noise: Tensor | None = None) -> Tensor:
    """Draws argmax(w / E) from weights that are processed already.

    Args:
        weights: [B, N, V] float32 >= 0, not necessarily of sum 1.
        seeds, positions, purpose, noise: as in `sample`.

    Returns:
        [B, N] int64, -1 where the weights are NaN.
    """
    from . import reference

    if noise is None:
        noise = philox.exponential(seeds, positions, weights.shape[-1], purpose)
    return reference.draw(weights, noise)


def _check(logits: Tensor, guidance: Tensor | None, allowed: Tensor | None, forced: Tensor | None) -> None:
    if logits.dim() != 4 or logits.shape[1] not in (1, 2):
        raise ValueError(f"logits have shape {tuple(logits.shape)}; give [B, G, N, V] with G = 1 or 2.")
    if (logits.shape[1] == 2) != (guidance is not None):
        raise ValueError(
            f"logits have {logits.shape[1]} guidance branch(es) and guidance is "
            f"{'None' if guidance is None else 'given'}; "
            "give a [B] scale with two branches and None with one."
        )
    if allowed is not None and allowed.shape != logits.shape[-1:]:
        raise ValueError(f"allowed has shape {tuple(allowed.shape)}; give [{logits.shape[-1]}] bool.")
    if forced is not None and forced.shape != (logits.shape[0], logits.shape[2]):
        raise ValueError(
            f"forced has shape {tuple(forced.shape)}; give {[logits.shape[0], logits.shape[2]]} int64, -1 where free."
        )
