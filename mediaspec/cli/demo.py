"""`mediaspec demo`: the embedded model draws a few pictures plainly and speculatively, and says what was gained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .errors import plain_errors

__all__ = ["demo"]

PROMPTS = (
    "a red apple",
    "a cat",
    "a car",
    "a strawberry",
    "a tree",
    "a sunflower",
    "a purple heart",
    "a pine tree on a red background",
)


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the pictures.")] = Path("out"),
    rule: Annotated[str, typer.Option(help="Acceptance rule that is compared with plain decoding.")] = "cool_sd",
    delta: Annotated[
        float | None, typer.Option(help="Strength of a rule that has one (cool_sd: 1.1); more drifts more.")
    ] = None,
    drafter: Annotated[str, typer.Option(help="jacobi (no draft model) or eagle (the trained head).")] = "jacobi",
    seed: Annotated[int, typer.Option(help="Seed of the first picture; the others follow.")] = 7,
) -> None:
    """Draw eight captions with the embedded model `emoji-64`, plainly and with speculation, one picture at a time."""
    with plain_errors("The demo writes only into --out; choose a folder you may write to."):
        run(out, rule, delta, drafter, seed)


def run(out: Path, rule_name: str, delta: float | None, drafter: str, seed: int) -> None:
    """Draws, prints a line per picture and the totals, and writes pictures and sheets into `out`."""
    import os

    import torch

    from .. import AutoPipeline
    from ..eval.sheet import contact_sheet
    from ..rules import make_rule

    settings = {} if delta is None else {"delta": delta}
    rule = make_rule(rule_name, **settings)
    out.mkdir(parents=True, exist_ok=True)
    pipe = AutoPipeline.from_pretrained("emoji-64")
    if rule_name == "cool_sd":
        rule = make_rule(rule_name, length=pipe.config["num_draft_tokens"], **settings)
    pipe.set_progress_bar_config(disable=True)
    threads = torch.get_num_threads()
    strength = rule.config["delta"] if rule_name == "cool_sd" else delta
    shown = rule_name if strength is None else f"{rule_name} delta {strength}"
    typer.echo(f"emoji-64 on {pipe.transformer.device} with {threads} thread(s); {shown}, {drafter}, against plain\n")
    pipe(PROMPTS[0], seeds=seed, rule=rule, drafter=drafter)  # the first call packs the weights
    pipe(PROMPTS[0], seeds=seed, rule="plain")
    typer.echo(f"{'caption':46} {'plain':>8} {'fast':>8} {'ratio':>6} {'tokens/call':>12} {'drift <=':>9}")
    plain_seconds = fast_seconds = 0.0
    tokens = calls = 0
    worst = 0.0
    plain_pictures, fast_pictures = [], []
    for number, prompt in enumerate(PROMPTS):
        plain = pipe(prompt, seeds=seed + number, rule="plain")
        fast = pipe(prompt, seeds=seed + number, rule=rule, drafter=drafter)
        fast.images[0].save(out / f"{number:02d}-{prompt.replace(',', '').replace(' ', '-')}.png")
        plain_pictures.append(plain.images[0])
        fast_pictures.append(fast.images[0])
        before, after = plain.stats["seconds"]["total"], fast.stats["seconds"]["total"]
        drift = fast.stats["drift"]["max"]
        plain_seconds, fast_seconds, worst = plain_seconds + before, fast_seconds + after, max(worst, drift)
        tokens, calls = tokens + fast.stats["tokens"], calls + fast.stats["target_calls"]
        typer.echo(
            f"{prompt:46} {before:7.2f}s {after:7.2f}s {before / after:5.2f}x "
            f"{fast.stats['tokens_per_call']:12.2f} {drift:9.4g}"
        )
    captions = [*PROMPTS, *PROMPTS]
    sheet = contact_sheet([*fast_pictures, *plain_pictures], captions, columns=len(PROMPTS))
    sheet.save(out / "sheet.png")
    typer.echo(
        f"\n{rule_name}: {plain_seconds / fast_seconds:.2f}x faster than plain decoding of the same model, "
        f"{tokens / calls:.2f} tokens per target call ({tokens} tokens, {calls} calls).\n"
        f"Guarantee: {fast.stats['guarantee']}. The distance of a picture's law from the model's own law, in total "
        f"variation, is at most the drift above ({worst:.4g} at worst; a bound above 1 says nothing).\n"
        f"Pictures: {out}{os.sep}*.png; {out / 'sheet.png'} shows them above their plain counterparts."
    )
