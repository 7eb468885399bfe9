"""The decode loop: draft, one target pass over all drafts, verify, commit. There is no other one in this library.

Speculation off is the same loop with an empty draft. Rows advance at their own pace; the host reads one small tensor
per round (`Engine._sync`). Theory of the round: arXiv:2211.17192 (speculative sampling), arXiv:2601.09212 (relaxed).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.sample import sample
from . import rng as purposes
from .clock import Clock
from .ending import Ending, Ends
from .grammar import Grammar
from .greedy import GreedyRng
from .guidance import expand_index, expand_rows, split_branches
from .kv import KVStore, shared_length
from .ledger import Ledger
from .pilot import Pilot, Policy, drafter_name
from .record import Recorder
from .rng import RowRng
from .round import DecodingError, Process, Round
from .stats import DecodeResult, DecodeStats
from .tree import TreeSpec
from .types import DecodeState, Draft, Drafter, Target, TargetOutput, Verdict, Warp
from .verify import Rule, VerifyInputs

__all__ = ["DecodingError", "Engine", "Process", "Round"]


class Engine:
    """Runs a target with an acceptance rule and, if given, a drafter.

    Args:
        target: the model whose law counts.
        rule: decides which drafts stay; with no drafter only its guarantee is reported.
        drafter: proposes tokens; None decodes plainly; several by name are for a policy to choose among.
        grammar: forced tokens and the admissible ids; None for free image tokens.

    Raises:
        DecodingError: NaN or infinite logits, or no admissible token, naming rows and position.
        ValueError: arguments that do not fit each other.
    """

    def __init__(
        self,
        target: Target,
        rule: Rule,
        drafter: Drafter | Mapping[str, Drafter] | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self.target, self.rule, self.grammar = target, rule, grammar
        if drafter is None:
            self.drafters: dict[str, Drafter] = {}
        else:
            self.drafters = dict(drafter) if isinstance(drafter, Mapping) else {drafter_name(drafter): drafter}

    def decode(
        self,
        condition: Any,
        seeds: Tensor,
        *,
        warp: Warp | None = None,
        guidance_scale: float | Tensor | None = None,
        num_draft_tokens: int = 5,
        copies: Tensor | None = None,
        tree: TreeSpec | None = None,
        trace: bool = False,
        process: Process | None = None,
        ending: Ending | None = None,
        policy: Policy | None = None,
        policy_model: str = "default",
        on_round: Callable[[Round], bool | None] | None = None,
    ) -> DecodeResult:
        """Decodes a batch to the end.

        Args:
            condition: what the target's `prefill` takes, for P prompts times G branches.
            seeds: [B] int64, one per finished row.
            warp: temperature, top-k, top-p; default the plain softmax law.
            guidance_scale: CFG scale, a number or [B]; None decodes with one branch.
            num_draft_tokens: K; 0 switches speculation off.
            copies: [B] int64, the prompt of every row (fork after one prefill); None: row b has prompt b.
            tree: a draft tree; its depth replaces K.
            trace: record how every token came about.
            process: changes the target's logits by what was written before (penalties, masks); one branch only.
            ending: where rows stop before the horizon; None: nowhere.
            policy: chooses drafter, draft length and tree before every round, instead of `num_draft_tokens` and
                `tree`; policy_model: what its learned state belongs to.
            on_round: called after every round; returning False stops the run with what is committed.

        Returns:
            DecodeResult with tokens [B, T] int64.
        """
        loop = self.steps(
            condition,
            seeds,
            warp=warp,
            guidance_scale=guidance_scale,
            num_draft_tokens=num_draft_tokens,
            copies=copies,
            tree=tree,
            trace=trace,
            process=process,
            ending=ending,
            policy=policy,
            policy_model=policy_model,
        )
        go_on: bool | None = None
        with getattr(self.target, "attached", nullcontext)():
            while True:
                try:
                    step = loop.send(go_on)
                except StopIteration as stop:
                    result: DecodeResult = stop.value
                    return result
                go_on = on_round(step) if on_round is not None else True

    @torch.inference_mode()
    def steps(
        self,
        condition: Any,
        seeds: Tensor,
        *,
        warp: Warp | None = None,
        guidance_scale: float | Tensor | None = None,
        num_draft_tokens: int = 5,
        copies: Tensor | None = None,
        tree: TreeSpec | None = None,
        trace: bool = False,
        process: Process | None = None,
        ending: Ending | None = None,
        policy: Policy | None = None,
        policy_model: str = "default",
    ) -> Generator[Round, bool | None, DecodeResult]:
        """The loop as a generator of `Round`; sending False ends it early. Arguments as in `decode`.

        Returns:
            The `DecodeResult`, as the generator's return value.
        """
        target, device = self.target, self.target.device
        budget = self._budget(num_draft_tokens, tree)
        pilot = Pilot(self.drafters, budget, tree if budget else None, policy, policy_model)
        if seeds.dim() != 1 or not len(seeds) or seeds.dtype != torch.int64:
            raise ValueError(f"seeds are {seeds.dtype} of shape {list(seeds.shape)}; give int64 [B], one per row")
        batch, horizon = seeds.shape[0], target.num_tokens
        if copies is not None and copies.shape != seeds.shape:
            raise ValueError(
                f"copies have shape {list(copies.shape)} and seeds {list(seeds.shape)}; name one prompt per seed"
            )
        seeds, copies = seeds.to(device), None if copies is None else copies.to(device)
        guidance = None
        if guidance_scale is not None:
            guidance = torch.as_tensor(guidance_scale, dtype=torch.float32, device=device).expand(batch).contiguous()
        branches = 1 if guidance is None else 2
        if process is not None and guidance is not None:
            raise ValueError("process acts on one branch of logits; leave guidance_scale out")
        warp = warp if warp is not None else Warp()
        clock = Clock(device)
        recorder = Recorder(batch, horizon, pilot.depth, device, trace)
        ledger = Ledger(batch, device, getattr(self.rule, "ledger", "tv"))

        clock.phase("prefill")
        target.feature_layers = pilot.features
        cache, output = self._prefill(condition, copies, batch, branches, pilot.nodes + 1)
        ends = Ends(ending, batch, horizon, device)
        if warp.temperature == 0:
            rng: RowRng = GreedyRng(seeds, vocab_size=target.vocab_size, horizon=horizon)
        elif ending is None:
            rng = RowRng(seeds, vocab_size=target.vocab_size, horizon=horizon)
        else:  # a row may stop early, and the tables of a large vocabulary cost more than a text uses of them
            rng = RowRng(seeds, vocab_size=target.vocab_size, horizon=horizon, budget_bytes=0)
        coupled = bool(getattr(self.rule, "coupled", False))
        state = DecodeState(
            tokens=torch.zeros(batch, horizon + pilot.nodes + 1, dtype=torch.int64, device=device),
            lengths=torch.zeros(batch, dtype=torch.int64, device=device),
            branches=branches,
            warp=warp,
            guidance=guidance,
            rng=rng,
            draft_purpose=purposes.TARGET if coupled else purposes.DRAFT,
            target=target,
            host_lengths=[0] * batch,
            allowed=self.grammar.allowed(device) if self.grammar is not None else None,
            condition=condition,
            copies=copies,
            cache=cache,
        )
        active = list(range(batch))
        self._force(state, 0)
        first = self._draw(state, self._logits(state, output, None, process, active))
        recorder.prefill(state.forced)
        state.tokens[:, 0] = first
        state.lengths = state.lengths + ends.cut(state, torch.ones_like(state.lengths), 1, active)
        self._sync(state, cache, first, active, ends)
        if horizon > 1:
            clock.phase("draft")
            pilot.begin(state, output)
        clock.phase(None)
        index = 0
        go_on = yield self._report(index, active, recorder, state, None)
        while go_on is not False:
            if self._worth_compacting(state, ends):
                active = self._drop_finished(state, cache, pilot, recorder, ledger, active, ends)
                if not active:
                    break
            index += 1
            verdict = self._round(state, cache, pilot, clock, recorder, ledger, active, index, ends, process)
            go_on = yield self._report(index, active, recorder, state, verdict)
        recorder.store(state, active)
        ledger.store(active)
        return self._result(recorder, ledger, clock, pilot)

    def _round(
        self,
        state: DecodeState,
        cache: KVStore,
        pilot: Pilot,
        clock: Clock,
        recorder: Recorder,
        ledger: Ledger,
        active: list[int],
        index: int,
        ends: Ends,
        process: Process | None,
    ) -> Verdict:
        """One draft-score-verify-commit round for the live rows."""
        plan = pilot.plan(state, active, ends, max(cache.host_lengths))
        self._force(state, plan.budget)
        draft: Draft | None = None
        if plan.drafter is not None:
            clock.phase("draft")
            draft = plan.drafter.propose(state, plan.budget, plan.tree)
            draft = self._limit(state, pilot.cut(draft, plan.lengths), ends) if draft.tokens.shape[1] else None
        clock.phase("target")
        inputs = state.last_token[:, None]
        tree = None if draft is None else draft.tree
        if draft is not None:
            inputs = torch.cat([inputs, draft.tokens], 1)
        output = self.target.score(expand_rows(inputs, state.branches), cache, tree)
        clock.phase("verify")
        logits = self._logits(state, output, draft, process, active)
        if draft is None:
            none = torch.zeros_like(state.lengths)
            drawn = self._draw(state, logits)
            verdict = Verdict(none, drawn, state.tokens.new_zeros((state.rows, 0), dtype=torch.float32))
        else:
            verdict = self.rule.verify(self._inputs(state, draft, logits, plan.drafter))
        clock.phase("draft")
        pilot.observe(state, draft, verdict, output)
        clock.phase("commit")
        counts = ends.open(state, verdict.num_accepted + 1)
        self._write(state, draft, verdict)
        depth = 0 if draft is None else draft.tokens.shape[1] if tree is None else tree.max_depth
        counts = ends.cut(state, counts, depth + 1, active)
        recorder.add(state, draft, verdict, counts, index)
        if draft is not None:
            ledger.add(verdict)
        rows = expand_rows(counts[:, None], state.branches)[:, 0]
        if tree is None or verdict.path is None:
            cache.lengths = cache.lengths + rows
        else:
            root = torch.zeros_like(verdict.path[:, :1])
            path = torch.cat([root, verdict.path.clamp(min=0)], 1)
            cache.commit(path if state.branches == 1 else path.repeat_interleave(state.branches, 0), rows)
        state.lengths = state.lengths + counts
        grown, drafted, accepted = self._sync(state, cache, verdict.next_token, active, ends, draft, verdict)
        recorder.count(grown, drafted)
        pilot.learn(plan, accepted)
        clock.phase(None)
        return verdict

    def _prefill(
        self, condition: Any, copies: Tensor | None, batch: int, branches: int, extra: int
    ) -> tuple[KVStore, TargetOutput]:
        """One pass per prompt, then the rows fork."""
        prompts = batch if copies is None else int(self._host(copies.max())) + 1
        if condition is not None and len(condition) != prompts * branches:
            raise ValueError(
                f"the condition has {len(condition)} rows but {prompts} prompt(s) with {branches} guidance branch(es) "
                f"need {prompts * branches}; with a guidance scale every prompt needs its unconditional row as well"
            )
        cache = self.target.new_cache(prompts * branches, extra)
        output = self.target.prefill(condition, cache)
        if copies is not None:
            rows = expand_index(copies, branches)
            cache.select(rows)
            hidden, features = output.hidden, output.features
            output = TargetOutput(
                output.logits.index_select(0, rows),
                None if hidden is None else hidden.index_select(0, rows),
                None if features is None else features.index_select(0, rows),
            )
        return cache, output

    def _budget(self, num_draft_tokens: int, tree: TreeSpec | None) -> int:
        if num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens must be 0 (off) or positive, got {num_draft_tokens}")
        if not self.drafters or num_draft_tokens == 0:
            return 0
        return tree.max_depth if tree is not None else num_draft_tokens

    def _force(self, state: DecodeState, budget: int) -> None:
        if self.grammar is not None:
            order = torch.arange(budget + 1, device=state.lengths.device)
            state.forced = self.grammar.forced(state.lengths[:, None] + order)

    def _draw(self, state: DecodeState, logits: Tensor) -> Tensor:
        """The target's own draw at the next position from rows [B, G, 1, V]."""
        noise = state.rng.noise_from(state.lengths, state.host_lengths, 1, purposes.TARGET)
        forced = state.forced[:, :1] if state.forced is not None else None
        return sample(
            logits,
            state.warp,
            seeds=state.rng.seeds,
            positions=state.lengths[:, None],
            purpose=purposes.TARGET,
            guidance=state.guidance,
            allowed=state.allowed,
            forced=forced,
            noise=noise,
        ).tokens[:, 0]

    @staticmethod
    def _logits(
        state: DecodeState, output: TargetOutput, draft: Draft | None, process: Process | None, active: list[int]
    ) -> Tensor:
        """[B, G, N, V] as the law is made from them."""
        logits = split_branches(output.logits, state.branches)
        return logits if process is None else process(state, logits, draft, active)

    def _limit(self, state: DecodeState, draft: Draft, ends: Ends) -> Draft:
        """Cuts a draft at the end of its row (the last token is always the target's draw) and sets forced tokens."""
        if state.forced is None and max(state.host_lengths) + draft.tokens.shape[1] < min(ends.host):
            return draft
        lengths = torch.minimum(draft.lengths, ends.room(state.lengths))
        tokens = draft.tokens
        if state.forced is not None:
            depth = draft.tree.depth_tensor(tokens.device)[1:] - 1 if draft.tree is not None else None
            forced = state.forced[:, : tokens.shape[1]] if depth is None else state.forced[:, depth]
            tokens = torch.where(forced >= 0, forced, tokens)
        return replace(draft, tokens=tokens, lengths=lengths)

    @staticmethod
    def _inputs(state: DecodeState, draft: Draft, logits: Tensor, drafter: Drafter | None) -> VerifyInputs:
        needs = frozenset() if drafter is None else drafter.needs
        return VerifyInputs(
            target_logits=logits,
            draft=draft,
            warp=state.warp,
            guidance=state.guidance,
            rng=state.rng,
            start=state.lengths,
            forced=state.forced[:, : draft.tokens.shape[1] + 1] if state.forced is not None else None,
            allowed=state.allowed,
            need_choices="choices" in needs,
            need_probs="target_probs" in needs,
            host_start=state.host_lengths,
        )

    @staticmethod
    def _write(state: DecodeState, draft: Draft | None, verdict: Verdict) -> None:
        """Accepted tokens, then the emitted one; what stands behind it is overwritten by later rounds."""
        following, first = verdict.next_token[:, None], shared_length(state.host_lengths)
        tokens = following[:, :0] if draft is None else draft.tokens
        if verdict.path is not None:
            tokens = tokens.gather(1, (verdict.path - 1).clamp(min=0))
        count = tokens.shape[1]
        if first is not None:
            state.tokens[:, first : first + count] = tokens
            state.tokens[:, first : first + count + 1].scatter_(1, verdict.num_accepted[:, None], following)
            return
        emitted = torch.cat([tokens, following], 1).scatter_(1, verdict.num_accepted[:, None], following)
        where = state.lengths[:, None] + torch.arange(count + 1, device=emitted.device)
        state.tokens.scatter_(1, where, emitted)

    @staticmethod
    def _host(value: Tensor) -> Any:
        return value.tolist()

    def _sync(
        self,
        state: DecodeState,
        cache: KVStore,
        drawn: Tensor,
        active: list[int],
        ends: Ends,
        draft: Draft | None = None,
        verdict: Verdict | None = None,
    ) -> tuple[list[int], list[int], list[int]]:
        """The one host read of a round: how far every row moved, how much of its draft counted and was accepted."""
        columns = [state.lengths, drawn]
        if draft is not None and verdict is not None:
            columns += [draft.lengths, verdict.num_accepted]
        if ends.values is not None:
            columns.append(ends.values)
        host = self._host(torch.stack(columns))
        if ends.values is not None:
            ends.host = host.pop()
        lengths = host[0]
        grown = [now - before for now, before in zip(lengths, state.host_lengths, strict=True)]
        # a finished row is still scored behind its end until it leaves; what it would draw there is nothing
        bad = [row for row, (token, more) in enumerate(zip(host[1], grown, strict=True)) if token < 0 and more]
        if bad:
            raise DecodingError([active[row] for row in bad], min(lengths[row] - 1 for row in bad))
        if state.host_lengths[0] > 0:
            branches = state.branches
            cache.set_host_lengths([n + grown[row // branches] for row, n in enumerate(cache.host_lengths)])
        state.host_lengths = lengths
        nothing = [0] * len(lengths)
        return (grown, host[2], host[3]) if draft is not None else (grown, nothing, nothing)

    @staticmethod
    def _worth_compacting(state: DecodeState, ends: Ends) -> bool:
        """Finished rows leave once they are a quarter of the batch: moving the cache costs about one pass."""
        return 4 * sum(ends.finished(state.host_lengths)) >= len(state.host_lengths)

    def _drop_finished(
        self,
        state: DecodeState,
        cache: KVStore,
        pilot: Pilot,
        recorder: Recorder,
        ledger: Ledger,
        active: list[int],
        ends: Ends,
    ) -> list[int]:
        recorder.store(state, active)
        ledger.store(active)
        keep = [row for row, finished in enumerate(ends.finished(state.host_lengths)) if not finished]
        rows = torch.tensor(keep, dtype=torch.int64, device=state.lengths.device)
        if keep:
            branches = state.branches
            cache.select(expand_index(rows, branches), [row * branches + g for row in keep for g in range(branches)])
            pilot.select(rows)
        state.tokens = state.tokens.index_select(0, rows)
        state.lengths = state.lengths.index_select(0, rows)
        ends.select(keep, rows)
        state.host_lengths = [state.host_lengths[row] for row in keep]
        if state.copies is not None:
            state.copies = state.copies.index_select(0, rows)
        state.guidance = state.guidance.index_select(0, rows) if state.guidance is not None else None
        state.rng = state.rng.select(rows)
        recorder.select(rows)
        ledger.select(rows)
        return [active[row] for row in keep]

    @staticmethod
    def _report(
        index: int, active: list[int], recorder: Recorder, state: DecodeState, verdict: Verdict | None
    ) -> Round:
        lengths = list(recorder.final_lengths)
        for row, length in zip(active, state.host_lengths, strict=True):
            lengths[row] = min(length, recorder.horizon)
        return Round(index, list(active), lengths, state, verdict)

    def _result(self, recorder: Recorder, ledger: Ledger, clock: Clock, pilot: Pilot) -> DecodeResult:
        accepted, tested = recorder.accepted, recorder.tested
        lengths = recorder.final_lengths
        plain = not pilot.drafters or not any(tested)
        stats = DecodeStats(
            tokens=sum(lengths),
            target_calls=recorder.calls,
            row_calls=recorder.row_calls,
            accepted_per_position=accepted,
            tested_per_position=tested,
            drift=ledger.drift(),
            guarantee=getattr(self.target, "guarantee", None) or ("exact-tokens" if plain else self.rule.guarantee),
            hellinger_bound=ledger.hellinger_bound(),
            seconds=clock.seconds(),
            arms=pilot.used,
        )
        return DecodeResult(recorder.tokens, lengths, stats, recorder.trace())
