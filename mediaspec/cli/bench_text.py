"""`mediaspec bench text`: decoding speed of language models against plain decoding and transformers' own ways."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import plain_errors

__all__ = ["text"]

DEFAULT = "default"
"""Stands for what the pipeline does when nothing is given."""
NO_POLICY = "none"


def text(
    model: Annotated[str, typer.Option(help="Folder or repository of a causal language model, or smollm2.")],
    tasks: Annotated[str, typer.Option(help="Of chat, copy, long.")] = "chat,copy,long",
    rules: Annotated[str, typer.Option(help="E.g. coupled,exact,cool_sd:delta=1.1. plain always runs.")] = "coupled",
    policies: Annotated[
        str, typer.Option(help="E.g. survival,ucb,fixed:num_draft_tokens=4; default: what calls get that name none.")
    ] = DEFAULT,
    drafters: Annotated[
        str,
        typer.Option(help="E.g. ngram,suffix,ngram+eagle3 (the policy chooses), a model's folder; default: as above."),
    ] = DEFAULT,
    attention: Annotated[
        str, typer.Option(help="Also under lossy attention, e.g. none,light_transfer:w_recent=508.")
    ] = NO_POLICY,
    peers: Annotated[
        str, typer.Option(help="hf_generate, hf_prompt_lookup, hf_assisted; none for no peer.")
    ] = "hf_generate,hf_prompt_lookup,hf_assisted",
    assistant: Annotated[
        str | None, typer.Option(help="Folder of hf_assisted's draft model; default: the model's first layers.")
    ] = None,
    assistant_layers: Annotated[int | None, typer.Option(help="How many of them; default: a sixth.")] = None,
    batch_size: Annotated[int, typer.Option(help="Texts per call. Assisted peers run at 1 only.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens per text at most.")] = 64,
    num_prompts: Annotated[int | None, typer.Option(help="Prompts per task at most; default: all.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all tokens.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all tokens.")] = 1.0,
    repeats: Annotated[int, typer.Option(help="Timed rounds over all prompts; a warm-up comes first.")] = 5,
    seed: Annotated[int, typer.Option(help="Prompt k gets seed + k.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto: cuda where there is one.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for bench_text.json and text_speed.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout is the JSON list.")] = False,
) -> None:
    """Time decoding configurations in turn, median over repeats, on texts written for this project.

    Nothing else should run meanwhile; what did is measured and reported.
    """
    with plain_errors():
        from ..eval.text_report import plot_text_speed, text_bench_table
        from ..eval.text_runners import Sampling

        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            if not os.access(out, os.W_OK):
                raise ValueError(f"{out} cannot be written to; choose another folder")
        if max_new_tokens < 2:
            raise ValueError(f"--max-new-tokens is {max_new_tokens}; the first comes out of the prompt, give >= 2")
        rows = measure(
            model, tasks, rules, policies, drafters, attention, peers,
            Sampling(max_new_tokens, temperature, top_k, top_p), batch_size=batch_size, num_prompts=num_prompts,
            repeats=repeats, seed=seed, dtype=dtype, device=device, assistant=assistant,
            assistant_layers=assistant_layers,
        )  # fmt: skip
        if out is not None:
            (out / "bench_text.json").write_text(json.dumps(rows, indent=1) + "\n")
            plot_text_speed(rows, out / "text_speed.png", f"{model}, batch {batch_size}")
        typer.echo(text_bench_table(rows))
        if as_json:
            typer.echo(json.dumps(rows))


def measure(
    model: str,
    tasks: str,
    rules: str,
    policies: str,
    drafters: str,
    attention: str,
    peers: str,
    sampling: Any,
    *,
    batch_size: int,
    num_prompts: int | None,
    repeats: int,
    seed: int,
    dtype: str,
    device: str,
    assistant: str | None,
    assistant_layers: int | None,
) -> list[dict[str, Any]]:
    """Rows of the table; arguments as on the command line."""
    from ..eval.rulespec import parse_rules
    from ..eval.speed import MachineWatch, provenance
    from ..eval.text_runners import text_runner
    from ..eval.text_speed import PLAIN, TextRun, interleave_texts, summarise_texts
    from ..eval.text_tasks import task_prompts
    from ..pipelines.text_generation import TextGenerationPipeline
    from .text import torch_dtype, usable_device

    if num_prompts is not None and num_prompts < 1:
        raise ValueError(f"--num-prompts is {num_prompts}; give at least 1, or leave it out for all")
    work = {task: task_prompts(task) for task in _words(tasks, "tasks")}
    for task in work:
        work[task] = work[task][:num_prompts]
    ours = _configurations(rules, policies, drafters)
    lossy = [spec for spec in parse_rules(attention) if spec.name != NO_POLICY]
    device = usable_device(device)
    pipe = TextGenerationPipeline.from_pretrained(model, dtype=torch_dtype(dtype), device=device)
    pipe.set_progress_bar_config(disable=True)
    _room(pipe, work, sampling.max_new_tokens)
    plain = {"rule": PLAIN, "policy": "none", "drafter": "none"}
    runners = [text_runner(pipe, PLAIN, plain, {"rule": PLAIN}, sampling)]
    runners += [text_runner(pipe, label, names, keywords, sampling) for label, names, keywords in ours]
    runners += [_under(one, pipe.model, spec) for spec in lossy for one in list(runners)]
    runners += _peer_runners(pipe, peers, sampling, batch_size, assistant, assistant_layers)
    rows: list[dict[str, Any]] = []
    record = {
        "batch_size": batch_size, "max_new_tokens": sampling.max_new_tokens, "temperature": sampling.temperature,
        "model": model, "provenance": {**provenance(device, pipe.model.dtype, seed), "model": model},
    }  # fmt: skip
    for task, prompts in work.items():
        batches = -(-len(prompts) // max(batch_size, 1))

        def show(repeat: int, batch: int, label: str, run: TextRun, task: str = task, batches: int = batches) -> None:
            typer.echo(
                f"{task}  repeat {repeat + 1}/{repeats}  {batch + 1}/{batches}  {label}  {run.seconds:.3f} s", err=True
            )

        with MachineWatch() as watch:
            runs = interleave_texts(runners, prompts, repeats=repeats, batch_size=batch_size, seed=seed, on_run=show)
        for sentence in watch.warnings():
            typer.echo(f"warning: {task}: {sentence}", err=True)
        for row in summarise_texts(runs, runners, task):
            exact = row["guarantee"] in ("exact-tokens", "exact-law") and sampling.temperature == 0
            if (exact or row["guarantee"] == "exact-tokens") and row["equal_to_plain"] < row["texts"]:
                typer.echo(
                    f"warning: {task}: {row['label']} promises plain's tokens and gave them in "
                    f"{row['equal_to_plain']} of {row['texts']} texts; in half precision near ties may flip, in "
                    f"float32 this is a fault",
                    err=True,
                )
            for key in ("policy", "drafter"):
                if row[key] == DEFAULT:
                    used = row["settings"].get(key, DEFAULT)
                    row[key] = used if isinstance(used, str) else "+".join(used)
            row.setdefault("attention", NO_POLICY)
            rows.append({**row, **record, "prompts": len(prompts), "machine_watch": watch.as_dict()})
    return rows


def _words(text: str, option: str) -> list[str]:
    """The words of a comma list, each once."""
    found = [word.strip() for word in text.split(",")]
    if not all(found) or len(set(found)) != len(found):
        raise ValueError(f"--{option} is {text!r}; write names with commas between them, each once")
    return found


def _configurations(rules: str, policies: str, drafters: str) -> list[tuple[str, dict[str, str], dict[str, Any]]]:
    """Every rule with every policy and drafter: label, names, keywords of the call."""
    from ..eval.rulespec import check_names, parse_rules
    from ..policies import available_policies, make_policy
    from ..rules import available_rules, make_rule

    rule_specs = [spec for spec in parse_rules(rules) if spec.name != "plain"]
    check_names(rule_specs, ["plain", *available_rules()])
    policy_specs = parse_rules(policies)
    for spec in policy_specs:
        if spec.name != DEFAULT and spec.name not in available_policies():
            make_policy(spec.name)  # raises, naming the nearest one
    out = []
    for rule in rule_specs:
        for policy in policy_specs:
            for drafter in _words(drafters, "drafters") if rule.drafter is None else [rule.drafter]:
                settings = rule.rule_settings()
                keywords: dict[str, Any] = {
                    "rule": make_rule(rule.name, **settings) if settings else rule.name, **rule.call_settings()
                }  # fmt: skip
                if policy.name != DEFAULT:
                    # by name what it learns stays with the model, as in every call; settings need an object
                    given = policy.settings
                    keywords["policy"] = make_policy(policy.name, **given) if given else policy.name
                if drafter != DEFAULT:
                    keywords["drafter"] = drafter.split("+") if "+" in drafter else drafter
                names = {"rule": rule.text, "policy": policy.text, "drafter": drafter}
                out.append(("/".join(names.values()), names, keywords))
    return out


def _under(runner: Any, model: Any, spec: Any) -> Any:
    """The runner under a lossy attention policy, which is enabled and taken off outside of what is timed."""
    from ..eval.text_speed import TextRun, TextRunner
    from ..integrations.enable import enable

    def run(prompts: Sequence[Any], seeds: Sequence[int]) -> TextRun:
        with enable(model, attention=spec.name, **spec.settings) as handle:
            done: TextRun = runner.run(prompts, seeds)
            share = handle.summary().get("kv_share")
        return replace(done, guarantee="lossy", settings={**done.settings, "attention": spec.text, "kv_share": share})

    return TextRunner(f"{runner.label}+{spec.text}", run, {**runner.names, "attention": spec.text})


def _peer_runners(
    pipe: Any, peers: str, sampling: Any, batch_size: int, assistant: str | None, layers: int | None
) -> list[Any]:
    """Runners of transformers' own ways; those that decode one text at a time only are left out of batches."""
    from ..eval.rulespec import check_names, parse_rules
    from ..eval.text_runners import PEERS, first_layers, own_modules, peer_runner

    if peers == "none":
        return []
    specs = parse_rules(peers)
    check_names(specs, PEERS)
    stock = own_modules(pipe.model)
    runners = []
    for spec in specs:
        if batch_size > 1 and spec.name != "hf_generate":
            typer.echo(f"{spec.text} is left out: transformers drafts for one text at a time only", err=True)
            continue
        helper: Any = None
        if spec.name == "hf_assisted" and assistant is not None:
            from transformers import AutoModelForCausalLM

            loaded: Any = AutoModelForCausalLM.from_pretrained(assistant, dtype=stock.dtype)
            helper = loaded.to(stock.device).eval()
        elif spec.name == "hf_assisted":
            total = stock.config.get_text_config(decoder=True).num_hidden_layers
            helper = first_layers(stock, max(1, total // 6) if layers is None else layers)
        runners.append(peer_runner(stock, pipe.tokenizer, spec.name, sampling, spec.settings, helper, spec.text))
    return runners


def _room(pipe: Any, work: Mapping[str, Sequence[Any]], max_new_tokens: int) -> None:
    """Refuses prompts that do not fit the model's positions, before anything is timed."""
    from ..eval.text_runners import encode

    most = getattr(pipe.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for task, prompts in work.items():
        longest = max(map(len, encode(pipe.tokenizer, prompts)))
        if most is not None and longest + max_new_tokens > most:
            raise ValueError(
                f"the longest prompt of {task} has {longest} tokens, {longest + max_new_tokens} with the new ones, "
                f"and the model knows {most} positions; leave {task} out of --tasks, or lower --num-prompts or "
                f"--max-new-tokens"
            )
