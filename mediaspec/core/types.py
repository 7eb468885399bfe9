"""The values that travel through one decoding round, and the contracts between engine, target and drafter.

Letters used in every file of the core: B rows (one per image or sequence), G guidance branches (2 with classifier-free
guidance, else 1), R = B * G target rows with the branch varying fastest, K draft length, N scored positions or tree
nodes, V vocabulary, D hidden size, T tokens of a finished image, C prefix (condition) positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..kernels.sample import Warp
from .kv import shared_length

if TYPE_CHECKING:
    from .kv import KVStore
    from .rng import RowRng
    from .tree import TreeSpec

__all__ = ["DecodeState", "Draft", "Drafter", "Target", "TargetOutput", "Verdict", "Warp"]


@dataclass(frozen=True)
class Draft:
    """Tokens proposed for one round.

    Args:
        tokens: [B, k] int64 for a chain, 1 <= k <= K; [B, N] for a tree, nodes in level order.
        lengths: [B] int64, how many leading positions (chain) or levels (tree) of a row count.
        probs: float32 probabilities of exactly the law each token was drawn from.
            Chain: [B, K, V]. Tree: [B, P, V], one row per internal node (`TreeSpec.internal`), the law its
            children were drawn from without replacement. None: a point mass (deterministic proposal).
        tree: the topology, None for a chain.
    """

    tokens: Tensor
    lengths: Tensor
    probs: Tensor | None = None
    tree: TreeSpec | None = None


@dataclass(frozen=True)
class Verdict:
    """What one verification decided.

    Args:
        num_accepted: [B] int64 in [0, K]: accepted draft tokens (tree: accepted depth).
        next_token: [B] int64: the token emitted after them (resampled at the first rejection, else bonus).
        drift: [B, K] float32: closed-form TV(emitted law, target law) of every tested position, 0 where untested.
        path: [B, depth] int64 node rows (1-based; 0 is the root) of the accepted path, -1 beyond it; None for chains.
        choices: [B, K+1] int64: the target's own draw at every scored position under the shared noise (match mode).
        target_probs: [B, K+1, V] float32: the target's processed law at every scored position.
        hellinger: [B, K] float32: squared Hellinger distance of the emitted and the target law at tested positions,
            times prod sqrt(P/m) over the tokens emitted before it in this round.
        weight: [B] float32: log of prod sqrt(P/m) over all tokens emitted this round.
    """

    num_accepted: Tensor
    next_token: Tensor
    drift: Tensor
    path: Tensor | None = None
    choices: Tensor | None = None
    target_probs: Tensor | None = None
    hellinger: Tensor | None = None
    weight: Tensor | None = None


@dataclass(frozen=True)
class TargetOutput:
    """One target pass over N inputs.

    Args:
        logits: [R, N, V].
        hidden: [R, N, D], what `Target.head` reads: the last layer's output, before or behind the final norm.
        features: [R, N, F * D], the outputs of the F layers in `Target.feature_layers` side by side; after a prefill
            they are those of all C prefix positions, [R, C, F * D]. None where no layer was asked for.
    """

    logits: Tensor
    hidden: Tensor | None = None
    features: Tensor | None = None


@runtime_checkable
class Target(Protocol):
    """A model that scores many positions at once. Rows are R = B * G, guidance branch fastest.

    `score` writes keys and values for its N inputs behind `cache.lengths` and does not move the lengths: the engine
    commits afterwards. Input i of a row stands at sequence position `cache.lengths[row] + i` (chain) or
    `cache.lengths[row] + depth` (tree, with the root at depth 0 and attention restricted to ancestors).
    """

    vocab_size: int
    hidden_size: int
    num_tokens: int
    grid: tuple[int, int] | None
    feature_layers: tuple[int, ...]

    @property
    def device(self) -> torch.device: ...

    def new_cache(self, rows: int, extra: int) -> KVStore:
        """An empty cache for `rows` target rows with room for prefix + num_tokens + `extra` positions."""
        ...

    def prefill(self, condition: Any, cache: KVStore) -> TargetOutput:
        """Runs the condition and sets `cache.lengths`; returns the last prefix position's output ([R, 1, ...])."""
        ...

    def score(self, tokens: Tensor, cache: KVStore, tree: TreeSpec | None = None) -> TargetOutput: ...

    def embed(self, tokens: Tensor) -> Tensor:
        """[R, N] int64 -> [R, N, D] input embeddings."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """[R, N, D] last-layer output -> [R, N, V] logits (final norm included)."""
        ...


@dataclass
class DecodeState:
    """What the engine shows a drafter: the rows as committed so far. Drafters read it and never write it.

    Args:
        tokens: [B, T] int64 committed tokens, undefined beyond `lengths`.
        lengths: [B] int64 committed tokens per row; the next token stands at absolute position `lengths[b]`.
        branches: G.
        warp: how logits become the sampled law (the same for target and drafter).
        guidance: [B] float32 guidance scales, None when G = 1.
        rng: the rows' counter-based generator.
        draft_purpose: which noise the drafter draws with (`rng.DRAFT`, or `rng.TARGET` when the rule couples).
        target: the model being sped up.
        host_lengths: the same lengths on the host as of the last sync.
        forced: [B, K+1] int64 forced token per upcoming position or -1; None when nothing is forced.
        allowed: [V] bool, tokens a free position may take; None when all.
        condition: what the target's prefill was given (a drafter with a model of its own prefills from it).
        copies: [B] int64, the prompt of every row, None when row b has prompt b.
        cache: the target's keys and values as of the last commit, for drafters that attend to them; read only.
    """

    tokens: Tensor
    lengths: Tensor
    branches: int
    warp: Warp
    guidance: Tensor | None
    rng: RowRng
    draft_purpose: int
    target: Target
    host_lengths: list[int]
    forced: Tensor | None = None
    allowed: Tensor | None = None
    condition: Any = None
    copies: Tensor | None = None
    cache: KVStore | None = None

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def last_token(self) -> Tensor:
        """[B] int64, the newest committed token of every row."""
        newest = shared_length(self.host_lengths)
        if newest:
            return self.tokens[:, min(newest, self.tokens.shape[1]) - 1]
        index = (self.lengths - 1).clamp(min=0, max=self.tokens.shape[1] - 1)
        return self.tokens.gather(1, index[:, None])[:, 0]


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. `needs` names what it wants to observe: any of "hidden", "target_probs", "choices".

    A drafter that reads outputs of inner layers has an attribute `feature_layers`, a tuple of layer indices; the loop
    hands it to the target, which then fills `TargetOutput.features`.
    """

    @property
    def needs(self) -> frozenset[str]: ...

    def begin(self, state: DecodeState, output: TargetOutput, extra: int) -> None:
        """Starts a run after the prefill, whose `output` has hidden [R, 1, D]; one token is known (`lengths` is 1)."""
        ...

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        """At most `budget` tokens deep; `lengths` may be shorter per row. `budget` >= 1."""
        ...

    def observe(self, state: DecodeState, draft: Draft | None, verdict: Verdict, output: TargetOutput) -> None:
        """Called after every round with the state *before* its tokens are committed.

        Where a policy chooses, `draft` may be another drafter's, or None after a plain round.
        """
        ...

    def select(self, rows: Tensor) -> None:
        """Keeps (or repeats) the given rows, int64 indices into B: used when finished rows leave."""
        ...
