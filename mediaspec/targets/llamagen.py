"""LlamaGen image transformers as targets: conditions, prefill, scoring of chains and trees, decoding to pixels.

P prompts, G guidance branches, R = P * G rows with the branch fastest (row 2p conditional, 2p + 1 unconditional),
C condition positions, E width of the text features, N positions in one pass, V vocabulary, T tokens per image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.kv import KVStore
from ..core.tree import TreeSpec
from ..core.types import TargetOutput
from ..models.llamagen.gpt import LlamaGenGPT
from ..models.llamagen.step import LlamaGenStep, weights_version
from ..models.llamagen.vq import LlamaGenVQ

__all__ = ["ClassCondition", "LlamaGenTarget", "TextCondition"]


@dataclass(frozen=True)
class TextCondition:
    """Captions of R target rows.

    Args:
        features: [R, C, E] text features, padded on the left.
        mask: [R, C] bool, False at padding; None where nothing is padded.
        drop: [R] bool, rows that run on the learned unconditional features (they keep their mask, as the published
            models were trained and are sampled); None where no row does.
    """

    features: Tensor
    mask: Tensor | None = None
    drop: Tensor | None = None

    def __len__(self) -> int:
        return self.features.shape[0]

    @classmethod
    def build(
        cls,
        features: Tensor,
        mask: Tensor | None,
        guided: bool,
        negative_features: Tensor | None = None,
        negative_mask: Tensor | None = None,
        negative_given: Tensor | None = None,
    ) -> TextCondition:
        """Rows of P captions, in pairs where guidance is on.

        Args:
            features: [P, C, E]; mask: [P, C] bool or None.
            guided: whether every prompt gets its unconditional row.
            negative_features: [P, C, E] features of negative prompts; None takes the learned unconditional ones.
            negative_mask: [P, C] bool, False at padding of the negative prompts.
            negative_given: [P] bool, which prompts have a negative one; None means all of `negative_features`.

        Raises:
            ValueError: shapes differ, or a negative prompt without guidance.
        """
        if not guided:
            if negative_features is not None:
                raise ValueError("a negative prompt acts through guidance; set a guidance_scale other than 1")
            return cls(features, mask)
        if negative_features is not None and negative_features.shape != features.shape:
            raise ValueError(
                f"negative features have shape {list(negative_features.shape)}, prompts {list(features.shape)}; "
                f"encode both to the same number of positions"
            )
        prompts = features.shape[0]
        if negative_features is None:
            dropped = torch.ones(prompts, dtype=torch.bool, device=features.device)
            negative_features, negative_mask = features, mask
        else:
            everyone = torch.zeros(prompts, dtype=torch.bool, device=features.device)
            dropped = everyone if negative_given is None else ~negative_given.to(features.device)
            if mask is not None or negative_mask is not None:
                full = torch.ones(features.shape[:2], dtype=torch.bool, device=features.device)
                mask = full if mask is None else mask
                negative_mask = full if negative_mask is None else negative_mask
                negative_mask = torch.where(dropped[:, None], mask, negative_mask)
        drop = torch.stack([torch.zeros_like(dropped), dropped], 1).flatten()
        rows = torch.stack([features, negative_features], 1).flatten(0, 1)
        pairs = None
        if mask is not None and negative_mask is not None:
            pairs = torch.stack([mask.bool(), negative_mask.bool()], 1).flatten(0, 1)
        return cls(rows, pairs, drop)


@dataclass(frozen=True)
class ClassCondition:
    """Class numbers of R target rows; the model's number of classes stands for "no class".

    Args:
        labels: [R] int64.
        drop: [R] bool, rows that run without their class; None where no row does.
    """

    labels: Tensor
    drop: Tensor | None = None

    def __len__(self) -> int:
        return self.labels.shape[0]

    @classmethod
    def build(cls, labels: Tensor, guided: bool) -> ClassCondition:
        """Rows of P class numbers [P], in pairs where guidance is on."""
        if not guided:
            return cls(labels)
        rows = labels.repeat_interleave(2)
        return cls(rows, torch.arange(len(rows), device=labels.device) % 2 == 1)


class LlamaGenTarget:
    """A `LlamaGenGPT`, and if given its tokenizer, behind the `Target` contract.

    The weights are prepared for inference at first use and again at a prefill that finds them changed or moved.

    Args:
        gpt: the transformer; stays the owner of the weights.
        vq: its tokenizer, for `decode`; None where pixels are made elsewhere.
        codebook: [V or more, E] code vectors for rules that compare codes; None takes those of `vq`.
        linear: how matrices are kept, one of `mediaspec.models.fast_linear.KINDS`.
        dtype: what they are kept in, e.g. torch.bfloat16 for speed on the CPU; None is the model's. With float32,
            plain and speculative decoding agree to the rounding of float32.

    Raises:
        ValueError: the tokenizer has fewer codes than the vocabulary, weights are NaN, or `linear` cannot run.

    Example:
        >>> from mediaspec.models.llamagen import LlamaGenConfig, LlamaGenGPT
        >>> gpt = LlamaGenGPT(LlamaGenConfig(dim=32, n_layer=1, n_head=2, vocab_size=8, block_size=4))
        >>> target = LlamaGenTarget(gpt)
        >>> cache = target.new_cache(rows=2, extra=0)
        >>> target.prefill(ClassCondition.build(torch.tensor([3]), guided=True), cache).logits.shape
        torch.Size([2, 1, 8])
    """

    def __init__(
        self,
        gpt: LlamaGenGPT,
        vq: LlamaGenVQ | None = None,
        *,
        codebook: Tensor | None = None,
        linear: str = "auto",
        dtype: torch.dtype | None = None,
    ) -> None:
        config = gpt.config
        if codebook is None and vq is not None:
            codebook = vq.quantize.codebook().detach()
        if codebook is not None and codebook.shape[0] < config.vocab_size:
            raise ValueError(
                f"the tokenizer has {codebook.shape[0]} codes but the transformer predicts {config.vocab_size} "
                f"tokens: they were not trained together; load both from the same folder"
            )
        self.gpt, self.vq = gpt, vq
        self.codebook = None if codebook is None else codebook[: config.vocab_size]
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.dim
        self.num_tokens: int = config.block_size
        self.grid: tuple[int, int] | None = (config.grid, config.grid)
        self.feature_layers: tuple[int, ...] = ()
        self.prefix: int = config.cls_token_num
        self.linear, self.dtype = linear, dtype
        self._version: tuple[object, ...] = ()
        self._step: LlamaGenStep | None = None
        self._refresh()

    @property
    def device(self) -> torch.device:
        return self.gpt.tok_embeddings.weight.device

    @property
    def step(self) -> LlamaGenStep:
        """The prepared network."""
        return self._step if self._step is not None else self._refresh()

    def new_cache(self, rows: int, extra: int) -> KVStore:
        config = self.gpt.config
        capacity = -(-(self.prefix + self.num_tokens + extra) // 8) * 8
        return KVStore(config.n_layer, rows, config.kv_heads, config.head_dim, capacity, self.gpt.dtype, self.device)

    @torch.inference_mode()
    def prefill(self, condition: TextCondition | ClassCondition, cache: KVStore) -> TargetOutput:
        """Runs the condition positions of all rows.

        Args:
            condition: R rows, on the model's device.
            cache: an empty one with R rows; padded positions are hidden in it for good.

        Raises:
            ValueError: the wrong kind of condition, or rows that do not match the cache.
        """
        step = self._refresh()
        embedded, mask = self._embed_condition(condition)
        if embedded.shape[0] != cache.rows:
            raise ValueError(f"the condition has {embedded.shape[0]} rows, the cache {cache.rows}; make both equal")
        # reading the mask costs a host sync, so only the CPU looks whether anything is padded at all
        padded = mask is not None and (mask.device.type != "cpu" or not bool(mask.all()))
        if mask is not None and padded:
            cache.hide(~mask.bool())
        slots = cache.plan(self.prefix)
        if padded and slots.mask is not None:
            slots.mask.diagonal(dim1=-2, dim2=-1).zero_()  # a padded position sees itself, or its softmax is 0 / 0
        hidden = step(embedded, cache, slots)[:, -1:]
        cache.advance(torch.full_like(cache.lengths, self.prefix), [self.prefix] * cache.rows)
        return TargetOutput(step.head(hidden), hidden)

    @torch.inference_mode()
    def score(self, tokens: Tensor, cache: KVStore, tree: TreeSpec | None = None) -> TargetOutput:
        """Logits [R, N, V] float32 and hidden states [R, N, D] behind N tokens per row (a tree: root and nodes).

        Args:
            tokens: [R, N] int64 image tokens.
            cache: keys and values go behind its lengths, which do not move.
            tree: its topology; None for a chain.
        """
        step = self.step
        hidden = step(step.embed(tokens), cache, cache.plan(tokens.shape[1], tree))
        return TargetOutput(step.head(hidden), hidden)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        return self.step.embed(tokens)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        return self.step.head(hidden)

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        """[B, T] int64 tokens -> [B, 3, H, W] float32 pixels in [-1, 1], one image at a time so that none depends on
        its neighbours.

        Raises:
            ValueError: this target has no tokenizer.
        """
        if self.vq is None:
            raise ValueError("this target has no tokenizer; make it with LlamaGenTarget(gpt, vq) to decode pixels")
        vq = self.vq
        return torch.cat([vq.decode_code(row[None], self.grid) for row in tokens]).clamp(-1.0, 1.0)

    def describe(self) -> str:
        """How the weights are kept, for `mediaspec doctor`."""
        return self.step.describe()

    def _refresh(self) -> LlamaGenStep:
        """Prepares the weights unless the prepared ones are still those of the model."""
        version = weights_version(self.gpt)
        if self._step is None or version != self._version:
            self._step, self._version = LlamaGenStep(self.gpt, self.dtype, self.linear), version
        return self._step

    def _embed_condition(self, condition: TextCondition | ClassCondition) -> tuple[Tensor, Tensor | None]:
        """[R, C, D] embeddings and [R, C] validity."""
        wanted = self.gpt.config.condition
        if isinstance(condition, TextCondition) and wanted == "text":
            features, mask, drop = condition.features, condition.mask, condition.drop
            embed = self.gpt.embed_condition
            if features.device.type != "cpu":
                return embed(features, mask, drop), mask
            # row by row: the CPU's matrix product rounds by the number of rows, and a batch must equal single runs
            one = [slice(row, row + 1) for row in range(len(condition))]
            parts = [
                embed(features[at], None if mask is None else mask[at], None if drop is None else drop[at])
                for at in one
            ]
            return torch.cat(parts), mask
        if isinstance(condition, ClassCondition) and wanted == "class":
            return self.gpt.embed_condition(condition.labels, None, condition.drop), None
        raise ValueError(
            f"this model is {wanted}-conditional and got a {type(condition).__name__}; "
            f"pass a {'TextCondition' if wanted == 'text' else 'ClassCondition'}"
        )
