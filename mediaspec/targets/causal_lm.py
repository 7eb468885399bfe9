"""Any decoder-only transformers model as a target, driven through its public seams only.

The model runs its own layers, norms, rotations and experts; attention is replaced through `AttentionInterface`, keys
and values go to a `KVStore` through the cache interface, and positions are given. Sliding-window layers see their
window; their slots are kept, so that rolling back needs no copy. Nothing of a class is patched, and an instance is as
it was as soon as a call returns.

Letters: R rows (one per sequence), C prompt positions, N positions in one pass, V vocabulary, D hidden size.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.register import policy_of
from ..attention.restriction import Restriction
from ..attention.streaming import StreamingStore
from ..core.kv import KVStore
from ..core.prompt import TokenPrompt
from ..core.tree import TreeSpec
from ..core.types import TargetOutput
from ..models.decoder_step import DecoderStep
from ..models.linears import PreparedLinears
from .kv_attention import NAME, KVPass
from .layer_sight import layers_in_sight
from .lending import Loan
from .restricted import RestrictedKeys, RestrictedPass
from .streaming_pass import StreamingPass

__all__ = ["CausalLMTarget"]

LAYERS = {"full_attention", "sliding_attention"}
CHUNK = 512  # prompt positions per pass: bounds the mask and the scores of a long prompt


class CausalLMTarget:
    """A transformers causal language model behind the `Target` contract. One object serves one length of run.

    Args:
        model: the model, in evaluation mode; stays the owner of the weights.
        num_tokens: T, new tokens per row at most.
        vocab_size: V of the logits; None is the model's own. A draft model with a differently padded head takes the
            target's: surplus logits are cut, missing ones can never be drawn.
        fast: on the CPU, score few positions with matrices prepared once per model, which takes as much memory again
            as the weights, or half of it: Llama-like decoders without their modules (`models.decoder_step`), others
            with their products exchanged (`models.linears`).

    Raises:
        ValueError: the model is no decoder, does not go through `AttentionInterface`, or has layers without keys and
            values per position (linear attention, chunked attention, shared or latent caches).

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> target = CausalLMTarget(LlamaForCausalLM(config).eval(), num_tokens=4)
        >>> cache = target.new_cache(rows=1, extra=0)
        >>> target.prefill(TokenPrompt.from_padded(torch.tensor([[1, 2]])), cache).logits.shape
        torch.Size([1, 1, 9])
    """

    grid: tuple[int, int] | None = None

    def __init__(
        self, model: PreTrainedModel, num_tokens: int, *, vocab_size: int | None = None, fast: bool = True
    ) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        _check(model, self.config)
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        head = cast(nn.Linear, model.get_output_embeddings())
        self._embedding = cast(nn.Embedding, model.get_input_embeddings())
        self._known = self._embedding.weight.shape[0]
        self.vocab_size: int = head.weight.shape[0] if vocab_size is None else vocab_size
        self.hidden_size: int = head.weight.shape[1]
        self.num_tokens = num_tokens
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps = "logits_to_keep" in parameters
        self._unmasked = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
        self._attached = 0
        self._seen: Tensor | None = None
        self._restricted: RestrictedKeys | None = None
        self.feature_layers: tuple[int, ...] = ()
        self._fast = fast
        self._loan = Loan.of(model)
        self._step: DecoderStep | None = None
        self._linears = PreparedLinears.of(model) if fast else None

    @property
    def device(self) -> torch.device:
        return self._embedding.weight.device

    @property
    def guarantee(self) -> str | None:
        """"lossy" where an attention policy is enabled on the model; None: what the acceptance rule guarantees."""
        policy = policy_of(self.model)
        return None if policy is None else policy.guarantee

    def new_cache(self, rows: int, extra: int) -> KVStore:
        """A store that grows at the prefill, which knows how long the prompts are."""
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, rows, heads, size, self.num_tokens + extra, self.model.dtype, self.device)
        policy = policy_of(self.model)
        if policy is None:
            return KVStore(*shape)
        sliding = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
        kinds = getattr(config, "layer_types", None) or [sliding] * config.num_hidden_layers
        windows = [layer for layer, kind in enumerate(kinds) if kind != "full_attention"]
        return policy.new_store(*shape, windows=windows, slack=extra)

    @torch.inference_mode()
    def prefill(self, condition: TokenPrompt, cache: KVStore) -> TargetOutput:
        """Runs the prompts of all rows, `CHUNK` positions at a time, or as the cache of an attention policy wants it.

        Args:
            condition: R prompts on the model's device.
            cache: an empty one with R rows; it grows by the longest prompt.

        Raises:
            ValueError: no `TokenPrompt`, or as many rows as the cache does not have.
        """
        if not isinstance(condition, TokenPrompt):
            raise ValueError(
                f"a language model is prefilled with a TokenPrompt and got a {type(condition).__name__}; write "
                f"TokenPrompt.from_padded(input_ids, attention_mask)"
            )
        if len(condition) != cache.rows:
            raise ValueError(f"the prompt has {len(condition)} rows, the cache {cache.rows}; make both equal")
        total = condition.ids.shape[1]
        self._check_length(total)
        cache.reserve(cache.capacity + total)
        streaming = cache if isinstance(cache, StreamingStore) else None
        chunk = CHUNK if streaming is None else streaming.begin(condition, CHUNK)
        last = [length - 1 for length in condition.host_lengths]
        logits: Tensor | None = None
        hidden: Tensor | None = None
        features: list[Tensor] = []
        deciding = streaming is not None and streaming.filling
        with self.attached(), layers_in_sight(self.model, cache) if deciding else nullcontext():
            for start in range(0, total, chunk):
                ids = condition.ids[:, start : start + chunk]
                count = ids.shape[1]
                ends = [place - start if start <= place < start + count else 0 for place in last]
                output = self._pass(ids, cache, None, ends)
                inside = torch.tensor([start <= place < start + count for place in last], device=ids.device)
                here = inside[:, None, None]
                logits = output.logits if logits is None else torch.where(here, output.logits, logits)
                if output.hidden is not None:
                    hidden = output.hidden if hidden is None else torch.where(here, output.hidden, hidden)
                if output.features is not None:
                    features.append(output.features)
                cache.advance(torch.full_like(cache.lengths, count), [count] * cache.rows)
        assert logits is not None
        if streaming is not None:
            streaming.finish()
        cache.rollback(condition.lengths, list(condition.host_lengths))
        return TargetOutput(logits, hidden, torch.cat(features, 1) if features else None)

    @torch.inference_mode()
    def score(self, tokens: Tensor, cache: KVStore, tree: TreeSpec | None = None) -> TargetOutput:
        """Logits [R, N, V] and hidden states [R, N, D] behind N tokens per row (a tree: root and nodes).

        Hidden states are those the output matrix reads, behind the final norm.

        Args:
            tokens: [R, N] int64.
            cache: keys and values go behind its lengths, which do not move.
            tree: its topology; None for a chain.
        """
        with self.attached():
            return self._pass(tokens, cache, tree, None)

    @contextmanager
    def restricted(self, cache: KVStore, restriction: Restriction) -> Iterator[None]:
        """While open, passes over `cache` read the committed keys that `restriction` names and all later ones.

        A drafter opens it around the draft passes of one round (`attention.restriction`).

        Raises:
            ValueError: the cache does not keep all keys.
        """
        before, self._restricted = self._restricted, RestrictedKeys(cache, restriction)
        try:
            yield
        finally:
            self._restricted = before

    @torch.inference_mode()
    def retrace(self, tokens: Tensor, cache: KVStore) -> None:
        """Runs the last N committed tokens [R, N] of every row again, writing nothing: for what `cache.watch` sees.

        `cache.sight` is the layer at work meanwhile.

        What is computed for rows with fewer than N tokens means nothing; one row at least must have as many.
        """
        lengths, host = cache.lengths, list(cache.host_lengths)
        count = tokens.shape[1]
        cache.rollback((lengths - count).clamp(min=0), [max(length - count, 0) for length in host])
        try:
            with self.attached(), layers_in_sight(self.model, cache):
                self._pass(tokens, cache, None, [0] * len(tokens), write=False)
        finally:
            cache.rollback(lengths, host)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._embedding(self._own(tokens))
        return embedded

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """[R, N, D] states behind the final norm -> [R, N, V] logits."""
        logits = self.model.get_output_embeddings()(hidden)
        scale = getattr(self.config, "logits_scaling", None)
        logits = logits if scale is None else logits / scale
        factor = getattr(self.config, "logit_scale", None)
        logits = logits if factor is None else logits * factor
        cap = getattr(self.config, "final_logit_softcapping", None)
        return self._sized(logits if cap is None else cap * torch.tanh(logits / cap))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Lets the model attend through the store while open; every call opens it by itself, a loop may hold it."""
        with ExitStack() as stack:
            if self._attached == 0:
                with self._loan.lock:
                    self._step = DecoderStep.of(self.model) if self._fast else None
                    stack.enter_context(self._loan.lent())
                    if self._step is None and self._linears is not None:
                        stack.enter_context(self._linears.in_place())
            self._attached += 1
            try:
                yield
            finally:
                self._attached -= 1

    def _check_length(self, prompt: int) -> None:
        """Refuses texts longer than a table of learned positions; says where rotations go beyond their training."""
        most, longest = getattr(self.config, "max_position_embeddings", None), prompt + self.num_tokens
        if most is None or longest <= most:
            return
        what = f"{prompt} prompt and {self.num_tokens} new tokens are {longest} positions, {most} were trained"
        learned = any(hasattr(self.model.base_model, name) for name in ("wpe", "embed_positions"))
        if learned:
            raise ValueError(f"{what} in {type(self.model).__name__}; shorten the prompt or max_new_tokens")
        warnings.warn(f"{what}; what lies behind them is often nonsense", stacklevel=3)

    def _note(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._seen = arguments[0]

    def _own(self, tokens: Tensor) -> Tensor:
        """Ids beyond the model's embeddings (a target with a larger vocabulary) as some id of its own."""
        return tokens if self.vocab_size <= self._known else tokens.clamp(max=self._known - 1)

    def _sized(self, logits: Tensor) -> Tensor:
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[..., : self.vocab_size] if missing < 0 else logits

    def _pass(
        self, tokens: Tensor, cache: KVStore, tree: TreeSpec | None, ends: list[int] | None, write: bool = True
    ) -> TargetOutput:
        """One forward pass; `ends` picks one position per row, None returns all; `write=False` leaves the store."""
        slots = cache.plan(tokens.shape[1], tree)
        keys = torch.arange(slots.live, device=tokens.device)[None]
        if tree is not None:
            offset = keys - cache.lengths[:, None]
            depth = tree.depth_tensor(tokens.device)
            within = depth[offset.clamp(0, tokens.shape[1] - 1)]
            keys = torch.where(offset >= 0, cache.lengths[:, None] + within, keys)
        restricted = None
        if self._restricted is not None and self._restricted.store is cache:
            restricted = RestrictedPass(self._restricted, slots)
        kind = StreamingPass if isinstance(cache, StreamingStore) else KVPass
        kv_pass = kind(cache, slots, keys, restricted, write)
        arguments: dict[str, Any] = {self._cache_name: kv_pass, "kv_pass": kv_pass}
        wanted: list[int] = [] if ends is None else sorted(set(ends))
        if ends is not None and self._keeps:
            arguments["logits_to_keep"] = torch.tensor(wanted, device=tokens.device)
        if ends is None and self._step is not None and self._step.serves(*tokens.shape):
            ids, places = self._own(tokens), slots.positions.expand_as(tokens)
            step = self._step(ids, places, kv_pass.store_and_attend, self.feature_layers)
            return TargetOutput(self._sized(step[0]), step[1], step[2])
        heard: list[_Ear] = []
        with self._loan.lock:
            note = self.model.get_output_embeddings().register_forward_pre_hook(self._note)
            try:
                if self.feature_layers:
                    layers = self._layers()
                    heard += (_Ear(layers[index]) for index in self.feature_layers)
                output = self.model(
                    input_ids=self._own(tokens),
                    attention_mask=self._unmasked,  # four dimensions: the model builds no mask of its own
                    position_ids=slots.positions.expand_as(tokens),
                    use_cache=True,
                    return_dict=True,
                    **arguments,
                )
            finally:
                for ear in (note, *heard):
                    ear.remove()
        logits, hidden = output.logits, self._seen
        self._seen = None
        features = torch.cat([ear.output for ear in heard], -1) if heard else None
        if ends is not None:
            columns = [wanted.index(end) for end in ends] if self._keeps else ends
            at = torch.tensor(columns, device=tokens.device)[:, None, None]
            logits = logits.gather(1, at.expand(-1, 1, logits.shape[2]))
            hidden = None if hidden is None else hidden.gather(1, at.expand(-1, 1, hidden.shape[2]))
        return TargetOutput(self._sized(logits), hidden, features)

    def _layers(self) -> nn.ModuleList:
        """The decoder layers.

        Raises:
            ValueError: a feature layer that the model does not have, or layers that are not where they usually are.
        """
        layers = getattr(self.model.base_model, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ValueError(f"{type(self.model).__name__} keeps its layers in no list `layers`; use another drafter")
        if max(self.feature_layers) >= len(layers):
            name = type(self.model).__name__
            raise ValueError(f"layers {self.feature_layers} were asked for, {name} has {len(layers)}")
        return layers


class _Ear:
    """Keeps the `output` [R, N, D] of one layer's call until it is removed."""

    def __init__(self, layer: nn.Module) -> None:
        self.output = torch.empty(0)
        self._hook = layer.register_forward_hook(self._hear)

    def _hear(self, module: nn.Module, given: Any, output: Any) -> None:
        self.output = output if isinstance(output, Tensor) else output[0]

    def remove(self) -> None:
        self._hook.remove()


def _check(model: PreTrainedModel, config: Any) -> None:
    """Refuses models whose layers this target cannot keep in a `KVStore`."""
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise ValueError(
            f"{name} is no decoder-only model with a language modeling head; load an AutoModelForCausalLM"
        )
    with Loan.of(model).lent():
        ours = config._attn_implementation == NAME
    if not ours:
        raise ValueError(
            f"{name} does not call its attention through transformers' AttentionInterface, so its keys cannot be "
            f"kept; use plain generate() or a newer transformers in which the model was moved to that interface"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - LAYERS
    unusual = [getattr(config, key, None) for key in ("num_kv_shared_layers", "kv_lora_rank")]
    if kinds or any(unusual):
        why = f"layers of type {', '.join(sorted(kinds))}" if kinds else "shared or latent keys"
        raise ValueError(
            f"{name} has {why}; supported are {' and '.join(sorted(LAYERS))} layers with own keys and values per head"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    rope_kinds = {str(part.get("rope_type")) for part in parts}
    if rope_kinds & {"dynamic", "longrope"}:
        raise ValueError(
            f"{name} rotates by the length of the current call (rope_type {', '.join(sorted(rope_kinds))}), so one "
            f"pass over several tokens differs from several passes; set another rope_type such as 'yarn' or 'linear'"
        )
