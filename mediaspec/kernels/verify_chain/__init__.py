"""Verifies a chain of drafted tokens against the target's logits: accept, resample or add a bonus token, and price it.

B rows, G guidance branches, K draft length, V vocabulary. Row i of the target scores the position of `tokens[:, i]`;
row K scores the bonus position. P_i is the target's processed law at row i, q_i the law token i was drawn from.

mode="ratio" (speculative sampling and its linear relaxations), position by position from the left:

    a_i = min(q_i, scale_i * P_i + offset_i * q_i)            accepted sub-law
    accept x_i  iff  u_i * q_i(x_i) < scale_i * P_i(x_i) + offset_i * q_i(x_i)            strict, u in [0, 1)
    first rejection n:   emit argmax(w / E),  w = [P_n - a_n]_+          residual "gstar", arXiv:2601.09212, theorem 2
                                              w = [c P_n - a_n]_+        residual "band", c with sum w = 1 - sum a_n
    nothing rejected:    emit argmax(P / E) from row `lengths`
    drift_i = sum [a_i - P_i]_+  = TV(emitted law, P_i) for every tested i

scale 1, offset 0 is lossless speculative sampling (arXiv:2302.01318, theorem 1); scale omega relaxes
(arXiv:2601.09212); scale w, offset 1 - w emits the mixture w P + (1 - w) q. `draft_probs=None` reads q_i as a point
mass on x_i.

mode="match" (shared noise): `choices_i = argmax(P_i / E_i)`; accept while x_i equals it; emit `choices_n`. The tokens
are those of plain sampling with the same seed, for any draft. Drift 0.

Forced positions (`forced[b, i] >= 0`) accept exactly the forced id, without a draw and with drift 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..backend import choose, launching_on
from ..sample import Warp, _check

__all__ = ["ChainVerdict", "Mode", "Residual", "verify_chain"]

Mode = Literal["ratio", "match"]
Residual = Literal["gstar", "band"]


@dataclass(frozen=True)
class ChainVerdict:
    """What `verify_chain` decided.

    Args:
        num_accepted: [B] int64 in [0, K].
        next_token: [B] int64, the token after the accepted ones; -1 where the law needed for it is undefined.
        drift: [B, K] float32, 0 at untested positions.
        choices: [B, K+1] int64 draws of every row under the shared noise; None unless asked for or mode "match".
        target_probs: [B, K+1, V] float32; None unless asked for.
    """

    num_accepted: Tensor
    next_token: Tensor
    drift: Tensor
    choices: Tensor | None = None
    target_probs: Tensor | None = None


def verify_chain(
    target_logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    warp: Warp,
    *,
    draft_probs: Tensor | None,
    seeds: Tensor,
    start: Tensor,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    residual: Residual = "gstar",
    guidance: Tensor | None = None,
    allowed: Tensor | None = None,
    forced: Tensor | None = None,
    noise: Tensor | None = None,
    uniforms: Tensor | None = None,
    mode: Mode = "ratio",
    need_choices: bool = False,
    need_probs: bool = False,
    impl: str | None = None,
) -> ChainVerdict:
    """Verifies one chain per row, without a host sync.

    Args:
        target_logits: [B, G, K+1, V] float32, bfloat16 or float16.
        tokens: [B, K] int64 drafted tokens, K >= 1. Entries at or behind `lengths` are ignored (any valid id).
        lengths: [B] int64 in [0, K]; 0 emits from row 0.
        warp, guidance, allowed: as in `kernels.sample.probabilities`.
        draft_probs: [B, K, V] float32 law each token was drawn from; None is a point mass. Unused in mode "match".
        seeds: [B] int64.
        start: [B] int64 absolute position of `tokens[:, 0]`. E of row i stands at position start + i, purpose TARGET;
            u_i likewise, purpose ACCEPT.
        scale: [K] or [B, K] float32, finite and >= 0; None is 1 everywhere (and without offset skips the drift, which
            is then 0).
        offset: [K] or [B, K] float32 in [0, 1]; None is 0.
        residual: "gstar" or "band".
        forced: [B, K+1] int64, -1 where free; column i belongs to row i.
        noise: [B, K+1, V] float32 exponentials precomputed; None computes what is needed.
        uniforms: [B, K] float32 precomputed; None computes them.
        mode: "ratio" or "match".
        need_choices, need_probs: fill those fields of the result.
        impl: see `mediaspec.kernels.backend`.

    Returns:
        ChainVerdict. A row whose next token would come from an undefined law (NaN or +inf logits, no admissible token)
        has next_token -1, num_accepted 0 and drift 0; faults behind the first rejection do not matter.

    Raises:
        ValueError: shapes do not fit, or an unknown mode or residual.

    Example:
        >>> import torch
        >>> from mediaspec.kernels.sample import Warp
        >>> logits = torch.tensor([[[[0.0, 9.0, 0.0], [9.0, 0.0, 0.0]]]])
        >>> verdict = verify_chain(logits, torch.tensor([[1]]), torch.tensor([1]), Warp(temperature=0.0),
        ...                        draft_probs=None, seeds=torch.tensor([7]), start=torch.tensor([3]))
        >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
        ([1], [0])
    """
    _check(target_logits, guidance, allowed, forced)
    batch, _, rows, vocab = target_logits.shape
    length = tokens.shape[-1]
    if tokens.shape != (batch, rows - 1) or length < 1:
        raise ValueError(
            f"tokens have shape {tuple(tokens.shape)} and target_logits {tuple(target_logits.shape)}; "
            "give [B, K] tokens with K >= 1 and [B, G, K+1, V] logits."
        )
    if draft_probs is not None and draft_probs.shape != (batch, length, vocab):
        raise ValueError(f"draft_probs has shape {tuple(draft_probs.shape)}; give {[batch, length, vocab]} or None.")
    for name, value in (("scale", scale), ("offset", offset)):
        if value is not None and value.shape not in ((length,), (batch, length)):
            raise ValueError(f"{name} has shape {tuple(value.shape)}; give {[length]}, {[batch, length]} or None.")
    if mode not in ("ratio", "match"):
        raise ValueError(f"mode={mode!r} is unknown; write 'ratio' or 'match'.")
    if residual not in ("gstar", "band"):
        raise ValueError(f"residual={residual!r} is unknown; write 'gstar' or 'band'.")
    arguments = (
        target_logits, tokens, lengths, warp, draft_probs, seeds, start, scale, offset, residual, guidance, allowed,
        forced, noise, uniforms, mode, need_choices, need_probs,
    )  # fmt: skip
    if choose("verify_chain", target_logits, impl) == "triton":
        from .triton import verify_chain as run

        with launching_on(target_logits):
            return run(*arguments)
    from . import reference

    return reference.verify_chain(*arguments)
