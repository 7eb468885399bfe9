"""Speed as a ratio: every rule timed in one process, round-robin within each repeat, median over the repeats.

Machines drift (clocks, caches, neighbours) by more than the differences of interest, so rules are never timed one
after the other. Repeat r gives the same prompts and seeds to every rule; a rule's ratio of that repeat is plain's
seconds over its own, and the figure reported is the median of those ratios. A warm-up pass of every rule comes first.
Whatever else used the processors meanwhile is measured too and reported beside the figures.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["MachineWatch", "Run", "Runner", "interleave", "provenance", "quartiles", "summarise"]

FOREIGN_LIMIT = 0.10
"""Share of one core used by others above which OpenMP regions stall and ratios stop meaning anything."""


@dataclass(frozen=True)
class Run:
    """One timed call.

    Args:
        seconds: wall time of the whole call, prompt to pictures.
        tokens: committed tokens of all pictures.
        target_calls: target passes (each serves the batch).
        tokens_per_call: committed tokens per target pass and picture.
        drift: mean accumulated TV bound per picture.
        guarantee: of the rule.
        split: seconds per phase, as the pipeline reports them.
        settings: as resolved by the pipeline.
    """

    seconds: float
    tokens: int
    target_calls: int
    tokens_per_call: float
    drift: float
    guarantee: str
    split: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Runner:
    """Something to time: `run(prompts, seeds)` makes one picture per prompt."""

    label: str
    run: Callable[[Sequence[str], Sequence[int]], Run]


def interleave(
    runners: Sequence[Runner],
    prompts: Sequence[str],
    *,
    repeats: int = 5,
    batch_size: int = 1,
    seed: int = 0,
    on_run: Callable[[int, str, Run], None] | None = None,
) -> dict[str, list[Run]]:
    """Times all runners in turn.

    Args:
        runners: with distinct labels.
        prompts: taken in order, `batch_size` per repeat, starting over at the end.
        repeats: timed rounds; one more round is run first and thrown away.
        batch_size: pictures per call.
        seed: picture k of repeat r gets seed + r * batch_size + k.
        on_run: told about every timed run.

    Returns:
        label -> one `Run` per repeat.

    Raises:
        ValueError: no prompts, repeats or batch_size below 1, or a label used twice.
    """
    if repeats < 1 or batch_size < 1 or not prompts:
        raise ValueError(
            f"repeats is {repeats}, batch_size {batch_size}, with {len(prompts)} prompts; give at least 1 of each"
        )
    labels = [runner.label for runner in runners]
    if len(set(labels)) != len(labels):
        raise ValueError(f"labels {labels} are not distinct; list each rule once")
    runs: dict[str, list[Run]] = {label: [] for label in labels}
    for repeat in range(-1, repeats):
        first = max(repeat, 0) * batch_size
        batch = [prompts[(first + k) % len(prompts)] for k in range(batch_size)]
        seeds = [seed + first + k for k in range(batch_size)]
        # The order rotates, so that no rule always runs on the heels of the same other one.
        shift = max(repeat, 0) % len(runners)
        for runner in [*runners[shift:], *runners[:shift]]:
            run = runner.run(batch, seeds)
            if repeat >= 0:
                runs[runner.label].append(run)
                if on_run is not None:
                    on_run(repeat, runner.label, run)
    return runs


def summarise(runs: Mapping[str, Sequence[Run]], baseline: str = "plain") -> list[dict[str, Any]]:
    """Rows of the speed table, in the order of `runs`.

    Args:
        runs: from `interleave`.
        baseline: label whose seconds are the numerator of the ratios.

    Returns:
        per rule: rule, ratio_to_plain (median) and its quartiles, tokens_per_call, drift, seconds (median) and its
        interquartile range, tokens_per_second, target_calls (per call of the pipeline, mean), guarantee, seconds_split
        (medians), overhead_share (of the decode loop, outside target and drafter), repeats, settings.

    Raises:
        ValueError: the baseline was not run.
    """
    if baseline not in runs:
        raise ValueError(f"ratios need the rule {baseline!r}, and only {', '.join(runs)} were run; add it to --rules")
    rows = []
    for label, own in runs.items():
        ratios = [base.seconds / run.seconds for base, run in zip(runs[baseline], own, strict=True)]
        seconds = [run.seconds for run in own]
        phases = sorted({phase for run in own for phase in run.split})
        rows.append(
            {
                "rule": label,
                "ratio_to_plain": round(statistics.median(ratios), 4),
                "ratio_quartiles": [round(q, 4) for q in quartiles(ratios)],
                "tokens_per_call": round(statistics.fmean(run.tokens_per_call for run in own), 4),
                "drift": round(statistics.fmean(run.drift for run in own), 6),
                "seconds": round(statistics.median(seconds), 5),
                "seconds_iqr": round(quartiles(seconds)[1] - quartiles(seconds)[0], 5),
                "tokens_per_second": round(statistics.median(run.tokens / run.seconds for run in own), 2),
                "target_calls": round(statistics.fmean(run.target_calls for run in own), 2),
                "guarantee": own[0].guarantee,
                "seconds_split": {
                    p: round(statistics.median(run.split.get(p, 0.0) for run in own), 5) for p in phases
                },
                "overhead_share": _overhead(own),
                "repeats": len(own),
                "settings": dict(own[0].settings),
            }
        )
    return rows


def _overhead(runs: Sequence[Run]) -> float | None:
    """Median share of verify and commit in draft + target + verify + commit; None where phases are not reported."""
    loop = [{name: run.split.get(name, 0.0) for name in ("draft", "target", "verify", "commit")} for run in runs]
    shares = [(one["verify"] + one["commit"]) / sum(one.values()) for one in loop if sum(one.values()) > 0]
    return round(statistics.median(shares), 4) if shares else None


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile; one value is both."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


class MachineWatch:
    """Measures what the processors did besides this process between entering and leaving.

    Attributes after the block: `foreign` (cores' worth of CPU time used by others), `steal` (cores' worth taken by the
    hypervisor), `load_before` (1-minute load average at the start); None where the system does not tell.
    """

    def __init__(self) -> None:
        self.foreign: float | None = None
        self.steal: float | None = None
        self.load_before: float | None = None

    def __enter__(self) -> MachineWatch:
        self.load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        self._start = (time.perf_counter(), _own_cpu(), _machine_cpu())
        return self

    def __exit__(self, *exc: object) -> None:
        wall, own, before = self._start
        wall, own, after = time.perf_counter() - wall, _own_cpu() - own, _machine_cpu()
        if before is not None and after is not None and wall > 0.05:
            self.steal = max(0.0, (after[1] - before[1]) / wall)
            self.foreign = max(0.0, (after[0] - before[0] - own) / wall)

    def warnings(self) -> list[str]:
        """Sentences for the user, none on a quiet machine."""
        out = []
        if self.foreign is not None and self.foreign > FOREIGN_LIMIT:
            out.append(
                f"other processes used {self.foreign:.2f} cores during the timing; ratios are unreliable, stop them "
                "and measure again"
            )
        if self.steal is not None and self.steal > FOREIGN_LIMIT:
            out.append(f"the hypervisor took {self.steal:.2f} cores during the timing; ratios are unreliable")
        if self.foreign is None and self.load_before is not None and self.load_before > 0.5:
            out.append(f"the load average was {self.load_before:.2f} before the timing; measure on an idle machine")
        return out

    def as_dict(self) -> dict[str, Any]:
        """For the JSON record."""
        return {
            "foreign_cores": None if self.foreign is None else round(self.foreign, 3),
            "steal_cores": None if self.steal is None else round(self.steal, 3),
            "load_before": None if self.load_before is None else round(self.load_before, 2),
            "quiet": not self.warnings(),
        }


def _own_cpu() -> float:
    """CPU seconds of this process and of its finished children."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def _machine_cpu() -> tuple[float, float] | None:
    """(busy, stolen) CPU seconds of the whole machine since boot; None where /proc/stat is not there."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, soft, steal = (int(w) / os.sysconf("SC_CLK_TCK") for w in words[1:9])
    return user + nice + system + irq + soft, steal


def provenance(device: torch.device | str, dtype: torch.dtype | str, seed: int) -> dict[str, Any]:
    """What must stand beside a measured number: versions, machine, threads, seed and, in a checkout, the git
    revision."""
    versions = {"python": platform.python_version()}
    for package in ("mediaspec", "torch", "transformers", "diffusers", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    if "mediaspec" not in versions:
        from .._version import __version__

        versions["mediaspec"] = __version__
    device = torch.device(device)
    return {
        "versions": versions,
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "seed": seed,
        "git": _git_revision(),
        "command": " ".join(["mediaspec", *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _processor() -> str:
    try:
        names = [
            l.split(":", 1)[1].strip()
            for l in Path("/proc/cpuinfo").read_text().splitlines()
            if l.startswith("model name")
        ]
        return f"{names[0]}, {os.cpu_count()} cores" if names else f"{platform.machine()}, {os.cpu_count()} cores"
    except OSError:
        return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _git_revision() -> str | None:
    """Revision of the checkout this package lies in, with "+" where tracked files differ; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
