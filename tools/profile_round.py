"""Where the time of a decoding round goes: target and drafter forward passes against everything around them.

    python tools/profile_round.py --model DIR --rule cool_sd --delta 2 --json out/profile.json
    python tools/profile_round.py --dim 192 --layers 20 --heads 6 --drafter jacobi --ops

Without --model the networks have random weights of the sizes given: right for costs, meaningless for acceptance. Plain
and speculative runs alternate, every figure is the median over the repeats. Time is attributed exclusively, so random
numbers asked for while verifying count as rng and not as verify. Sections:

    target    the target's forward passes             draft net  the drafter's forward passes (network, output layer)
    rng       Philox numbers                          drafting   the rest of propose and observe: draws, bookkeeping
    verify    the rule, or the draw of a plain round  commit     tokens, cache lengths, the one host read of a round
    loop      what remains between two rounds
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mediaspec.core.engine import Engine, Round
from mediaspec.drafters import EagleDrafter, JacobiDrafter
from mediaspec.eval.speed import MachineWatch, provenance
from mediaspec.models.eagle import EagleHead, EagleHeadConfig
from mediaspec.models.llamagen import LlamaGenConfig, LlamaGenGPT
from mediaspec.rules import make_rule
from mediaspec.targets.llamagen import ClassCondition, LlamaGenTarget, TextCondition

FORWARD = ("target", "draft net")
SECTIONS = ("target", "draft net", "drafting", "verify", "rng", "commit", "loop")


class Stopwatch:
    """Exclusive seconds per section; a section inside another stops the outer one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def _switch(self) -> None:
        now = self.clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def time(self, owner: Any, method: str, name: str) -> None:
        """Times a method of one instance."""
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.section(name):
                return call(*args, **kwargs)

        setattr(owner, method, timed)


class TimedStep:
    """A prepared draft head whose calls are timed."""

    def __init__(self, step: Any, watch: Stopwatch) -> None:
        self._step, self._watch = step, watch

    def __call__(self, *args: Any) -> Tensor:
        with self._watch.section("draft net"):
            result: Tensor = self._step(*args)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


class TimedHead:
    """A draft head that prepares timed steps."""

    def __init__(self, head: EagleHead, watch: Stopwatch) -> None:
        self.config, self.read = head.config, head.read
        self._head, self._watch = head, watch

    def prepare(self, embeddings: Tensor, dtype: torch.dtype | None = None) -> TimedStep:
        return TimedStep(self._head.prepare(embeddings, dtype), self._watch)


def random_parts(options: argparse.Namespace) -> tuple[LlamaGenGPT, EagleHead]:
    """Networks of the given sizes with random fp16 weights."""
    size, heads, side = options.dim, options.heads, options.grid
    gpt = LlamaGenGPT(
        LlamaGenConfig(
            dim=size, n_layer=options.layers, n_head=heads, multiple_of=64, vocab_size=options.vocab,
            block_size=side**2, condition="text", cls_token_num=options.prefix, caption_dim=64,
        )
    )  # fmt: skip
    head = EagleHead(
        EagleHeadConfig(hidden_size=size, vocab_size=options.vocab, num_attention_heads=heads, grid=(side, side))
    )
    generator = torch.Generator().manual_seed(options.seed)
    with torch.no_grad():
        for parameter in [*gpt.parameters(), *head.parameters()]:
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_((noise / parameter.shape[-1] ** 0.5).half())
    return gpt.eval(), head.eval()


def saved_parts(folder: str) -> tuple[LlamaGenGPT, EagleHead | None]:
    """Transformer and, if there is one, EAGLE head of a pipeline folder."""
    root = Path(folder)
    gpt = LlamaGenGPT.from_pretrained(root / "transformer", dtype=torch.float32).eval()
    config = root / "drafter" / "config.json"
    if not config.exists() or "eagle" not in config.read_text(encoding="utf-8"):
        return gpt, None
    return gpt, EagleHead.from_pretrained(root / "drafter", dtype=torch.float32).eval()


def make_condition(gpt: LlamaGenGPT, batch: int, guided: bool) -> TextCondition | ClassCondition:
    """Arbitrary captions or classes: they cost what real ones cost."""
    if gpt.config.condition == "class":
        return ClassCondition.build(torch.arange(batch), guided)
    count, width = gpt.config.cls_token_num, gpt.config.caption_dim
    features = torch.randn(batch, count, width, generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(count) >= count // 2).expand(batch, -1)  # half of a caption's room is padding
    return TextCondition.build(features, mask, guided)


class Profile:
    """A target with a rule and a drafter, all timed by one stopwatch."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.watch = Stopwatch(time.thread_time if options.cpu_time else time.perf_counter)
        gpt, head = saved_parts(options.model) if options.model else random_parts(options)
        self.target = LlamaGenTarget(gpt, linear=options.linear, dtype=getattr(torch, options.dtype))
        if options.drafter == "eagle" and head is None:
            raise SystemExit(f"{options.model} holds no eagle head; write --drafter jacobi")
        drafter = JacobiDrafter(window=options.draft_tokens)
        if options.drafter == "eagle":
            assert head is not None
            drafter = EagleDrafter(TimedHead(head, self.watch))
        settings = {"delta": options.delta} if options.rule == "cool_sd" else {}
        rule = make_rule(options.rule, **settings)
        self.engine = Engine(self.target, rule, drafter)
        for owner, method, name in (
            (self.target, "score", "target"), (self.target, "head", "draft net"), (rule, "verify", "verify"),
            (drafter, "propose", "drafting"), (drafter, "observe", "drafting"),
            (self.engine, "_draw", "verify"), (self.engine, "_round", "commit"),
        ):  # fmt: skip
            self.watch.time(owner, method, name)
        self.guided = options.guidance != 1.0
        self.condition = make_condition(gpt, options.batch, self.guided)
        self.seeds = torch.arange(options.batch) + options.seed

    def run(self, drafts: int, ops: bool = False) -> tuple[dict[str, float], float]:
        """Some rounds; seconds per round and section, and tokens per call and row. Prints operators if asked."""
        marks: list[float] = []
        tokens: list[int] = []
        recorder = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) if ops else None

        def on_round(step: Round) -> bool:
            if step.index == 0:  # the prefill and the tables of random numbers are made once per run, not per round
                for purpose in range(3):
                    step.state.rng.noise(step.state.lengths[:, None], purpose)
                for method in ("noise", "uniform"):
                    self.watch.time(step.state.rng, method, "rng")
                if recorder is not None:
                    recorder.start()
                self.watch.seconds.clear()
            marks.append(self.watch.clock())
            tokens.append(sum(step.lengths))
            return len(marks) <= self.options.rounds

        scale = self.options.guidance if self.guided else None
        self.engine.decode(
            self.condition, self.seeds, guidance_scale=scale, num_draft_tokens=drafts, on_round=on_round
        )
        done = len(marks) - 1
        if recorder is not None:
            recorder.stop()
            averages = recorder.key_averages()
            calls = sum(event.count for event in averages) / done
            print(f"\n{'plain' if not drafts else f'K = {drafts}'}: {calls:.0f} operators per round")
            print(averages.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=44))
        seconds = {name: self.watch.seconds[name] / done for name in SECTIONS}
        seconds["loop"] = (marks[-1] - marks[0]) / done - sum(seconds.values())
        return seconds, (tokens[-1] - tokens[0]) / done / len(self.seeds)


def summary(runs: list[tuple[dict[str, float], float]]) -> dict[str, Any]:
    """Medians: milliseconds per section and round, shares, and the share that is no forward pass."""
    ms = {name: statistics.median(seconds[name] for seconds, _ in runs) * 1e3 for name in SECTIONS}
    total = sum(ms.values())
    return {
        "ms": ms,
        "total_ms": total,
        "share": {name: value / total for name, value in ms.items()},
        "overhead": 1 - sum(ms[name] for name in FORWARD) / total,
        "tokens_per_call": statistics.median(tokens for _, tokens in runs),
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'section':<16}" + "".join(f"{mode + ' ms':>18}{'share':>8}" for mode in results)]
    for name in SECTIONS:
        cells = "".join(f"{one['ms'][name]:>18.3f}{one['share'][name]:>8.1%}" for one in results.values())
        lines.append(f"{name:<16}{cells}")
    lines.append(f"{'round':<16}" + "".join(f"{one['total_ms']:>18.3f}{'':>8}" for one in results.values()))
    lines.append(f"{'overhead':<16}" + "".join(f"{'':>18}{one['overhead']:>8.1%}" for one in results.values()))
    calls = "".join(f"{one['tokens_per_call']:>18.2f}{'':>8}" for one in results.values())
    lines.append(f"{'tokens per call':<16}{calls}")
    return "\n".join(lines)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="pipeline folder; without it random weights of the sizes below")
    for name, value in (("dim", 192), ("layers", 20), ("heads", 6), ("vocab", 1024), ("grid", 16), ("prefix", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rule", default="cool_sd")
    parser.add_argument("--delta", type=float, default=2.0, help="of cool_sd")
    parser.add_argument("--drafter", choices=["eagle", "jacobi"], default="eagle")
    parser.add_argument("--draft-tokens", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--guidance", type=float, default=3.0, help="1 runs one row per image")
    parser.add_argument("--linear", default="auto", help="see mediaspec.models.fast_linear.KINDS")
    parser.add_argument("--dtype", default="float32", help="of the matrices")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the main thread's CPU time: for a busy machine, with --threads 1",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ops", action="store_true", help="also list operators (torch.profiler slows them down)")
    parser.add_argument("--json", type=Path, help="file to write")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = arguments(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    profile = Profile(options)
    modes = {"plain": 0, f"{options.rule} K={options.draft_tokens}": options.draft_tokens}
    runs: dict[str, list[tuple[dict[str, float], float]]] = {mode: [] for mode in modes}
    with MachineWatch() as machine:
        for repeat in range(options.repeats + 1):
            for mode, drafts in modes.items():
                result = profile.run(drafts)
                if repeat:  # the first run of each warms up
                    runs[mode].append(result)
    results = {mode: summary(several) for mode, several in runs.items()}
    print(f"{profile.target.describe()}; batch {options.batch}, {torch.get_num_threads()} threads")
    print(table(results))
    for warning in [] if options.cpu_time else machine.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    if options.ops:
        for drafts in modes.values():
            profile.run(drafts, ops=True)
    record = {
        **provenance("cpu", options.dtype, options.seed),
        "command": " ".join(["python", *sys.argv]),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "linear": profile.target.describe(),
        "machine_watch": machine.as_dict(),
        "results": results,
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


if __name__ == "__main__":
    main()
