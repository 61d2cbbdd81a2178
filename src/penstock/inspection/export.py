"""`penstock export`: a run's newest model, or its adapters alone, as a folder of its own with a model card.

The card is made from the journal: data with its hashes, settings, curves, the audit's verdict and the digest of
the weights. It names no path of this machine, no token and no server. The folder is complete or absent.
"""

from __future__ import annotations

import html
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.config import Config
from penstock.config.plugins import model_folder
from penstock.data.source import HUB
from penstock.errors import PenstockError, RunError, UserError
from penstock.files import count, say, visible, whole_folder
from penstock.inspection.audit import take_audit
from penstock.inspection.record import RunRecord, read_run, take_figures
from penstock.inspection.track.console import draw_curves
from penstock.rollout.evaluation.evaluate import best_step, read_scores
from penstock.store.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from penstock.store.run_folder import RunFolder

CARD, CURVES = "README.md", "curves.svg"
_SETTINGS_FILES = ("config.json", "generation_config.json")  # of a model


def export_run(
    folder: RunFolder, to: Path, *, adapter: bool = False, step: str | None = None
) -> Path:
    """Write a model of a run and its card to the new folder `to`; return that folder.

    `adapter`: only the low-rank adapters, as peft loads them, and the tokenizer. `step`: see `choose_checkpoint`.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"to: got {to}, which exists already, allowed: a new folder")
    checkpoint = choose_checkpoint(folder, step)
    record = read_run(folder)
    try:
        with whole_folder(to) as draft:
            _copy_model(folder, checkpoint, draft, adapter=adapter)
            (draft / CURVES).write_text(_curves(record), encoding="utf-8")
            card = model_card(folder, record, checkpoint, adapter=adapter)
            (draft / CARD).write_text(card, encoding="utf-8")
    except OSError as error:
        raise RunError(f"export: {to} cannot be written: {error}") from error
    return to


def choose_checkpoint(folder: RunFolder, step: str | None = None) -> Checkpoint:
    """The newest valid checkpoint of a run, that of a step, or the one with the best held-out score, `best`."""
    store = CheckpointStore(folder.checkpoints)
    if step is None:
        newest = store.newest()
        if newest is None:
            raise UserError(
                f"run {folder.path}: got no valid checkpoint, allowed: a run that wrote one"
            )
        return newest
    steps = store.steps()
    chosen = int(step) if step.isdigit() else None
    if step == "best":
        # the best held-out score among the steps that are kept
        scores = read_scores(folder.evaluations)
        measure = folder.config().checkpoint.keep_best or next(iter(scores), "")
        by_step = scores.get(measure, {})
        chosen, best = best_step(by_step, steps), best_step(by_step, by_step)
        if chosen is None or best is None:
            evaluated = ", ".join(map(str, by_step)) or "none"
            kept = ", ".join(map(str, sorted(steps))) or "none"
            raise UserError(
                f"--step: got best, allowed: a run with a step that is evaluated by {measure or 'an [eval.tasks.NAME]'} "
                f"({evaluated}) and kept ({kept})"
            )
        better = ""
        if by_step[best] > by_step[chosen]:
            better = (
                f"; step {best} had {by_step[best]:.3f} and was not kept: set checkpoint.keep_best"
            )
        say(f"step {chosen} has the best {measure}, {by_step[chosen]:.3f}{better}", error=True)
    if chosen not in steps or chosen is None:
        there = ", ".join(map(str, sorted(steps))) or "none, the run wrote no checkpoint"
        raise UserError(f"--step: got {step}, allowed: best, or a step that is kept ({there})")
    return read_checkpoint(folder.checkpoints / f"step-{chosen}")


def _copy_model(folder: RunFolder, checkpoint: Checkpoint, target: Path, *, adapter: bool) -> None:
    model = model_folder(checkpoint.path)
    weights = (".safetensors", ".safetensors.index.json")
    for file in sorted(model.rglob("*")):  # a tokenizer has a folder for further chat templates
        if file.is_symlink():
            raise UserError(f"export: {file} is a link, allowed: the files of the checkpoint")
        place = target / file.relative_to(model)
        if file.is_dir():
            place.mkdir(exist_ok=True)
            continue
        is_model = file.name.endswith(weights) or file.name in _SETTINGS_FILES
        if not adapter or not is_model:
            shutil.copyfile(file, place)
    if adapter:
        from penstock.training.snapshot import write_adapters

        write_adapters(checkpoint.path, folder.config().model, target)


def push_to_hub(folder: Path, name: str, *, public: bool = False) -> str:
    """Upload an exported folder as the model `owner/name` of the Hugging Face hub; return its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder)
    except (OSError, ValueError) as error:  # its errors of a connection and of a name are these
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunError(
            f"push: {name} was not uploaded: {reason}; the folder {folder} is complete"
        ) from error
    return str(address)


# -- the card ----------------------------------------------------------------------------------


def model_card(
    folder: RunFolder, record: RunRecord, checkpoint: Checkpoint, *, adapter: bool
) -> str:
    """The card: what was trained, from what, with which settings, and how far it can be trusted."""
    config = folder.config()
    base = _cell(_public(config.model.path))
    what = "adapters" if adapter else "model"
    if config.train.ema_decay:
        what = f"running average (train.ema_decay {config.train.ema_decay:g}) of the {what}"
    sections = [
        _front_matter(config, adapter=adapter),
        f"# {_cell(folder.name)}\n\nThe {what} after step {checkpoint.step} of a reinforcement-learning run: {base}, "
        f"trained with {_cell(config.algorithm.name.rpartition(':')[2])} by Penstock {__version__}.",
        _results(_up_to(record, checkpoint.step)),
        f"![Reward and held-out accuracy]({CURVES})",
        _data(folder, config),
        _settings(config),
        _trust(folder, checkpoint),
    ]
    return "\n\n".join(sections) + "\n"


def _public(path: str) -> str:
    """A name that says nothing of this machine: of a path only its last part."""
    return path.removeprefix(HUB) if not os.path.isabs(path) else Path(path).name


def _front_matter(config: Config, *, adapter: bool) -> str:
    tags = ["penstock", "reinforcement-learning", config.algorithm.name.rpartition(":")[2]]
    known: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "tags": tags}
    if "/" in config.model.path and not os.path.isabs(config.model.path):
        known["base_model"] = config.model.path
    hub = [task.data.removeprefix(HUB) for task in config.tasks.values() if HUB in task.data]
    if hub:
        known["datasets"] = hub
    lines = [f"{key}: {json.dumps(value)}" for key, value in known.items()]  # JSON is YAML, too
    return "\n".join(["---", *lines, "---"])


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    """Text of a run as text: no markup, no control codes, one line."""
    return " ".join(html.escape(visible(text), quote=False).replace("|", "/").split())


def _up_to(record: RunRecord, step: int) -> RunRecord:
    """The record without what came after a step, whose model does not know of it."""
    count = sum(number <= step for number in record.steps)
    evaluations = {
        task: kept
        for task, rows in record.evaluations.items()
        if (kept := [row for row in rows if row["step"] <= step])
    }
    curves = {name: values[:count] for name, values in record.curves.items()}
    return replace(record, steps=record.steps[:count], curves=curves, evaluations=evaluations)


def _results(record: RunRecord) -> str:
    figures, rows = take_figures(record), list[list[str]]()
    for task, evaluations in record.evaluations.items():
        last, change = evaluations[-1], figures.held_out[task]
        interval = "" if last["low"] is None else f" ({last['low']:.3f} to {last['high']:.3f})"
        name = f"{figures.measures[task]}, {task}"
        rows.append([name, f"{change.first:.3f}", f"{change.last:.3f}{interval}"])
    if (reward := figures.reward) is not None:
        rows.append(["reward, training", f"{reward.first:.3f}", f"{reward.last:.3f}"])
    return "## Results\n\n" + _table(["", "before", "after (95 % interval)"], rows)


def _curves(record: RunRecord) -> str:
    rewards = zip(record.steps, record.curves.get("reward/mean", ()), strict=False)
    curves = {"reward": [(step, value) for step, value in rewards if value is not None]}
    for task, measure in take_figures(record).measures.items():
        curves[task] = [(row["step"], row[measure]) for row in record.evaluations[task]]
    return draw_curves(curves, max([*record.steps, 1]))


def _data(folder: RunFolder, config: Config) -> str:
    facts, rows = folder.record(), list[list[str]]()
    tasks = {f"tasks.{name}": task.rewards for name, task in config.tasks.items()}
    tasks |= {f"eval.tasks.{name}": task.rewards for name, task in config.eval.tasks.items()}
    for key, rewards in tasks.items():
        fact = json.loads(facts.get(f"{key}.data", "{}"))
        names = ", ".join(_public(reward.type) for reward in rewards)
        count, digest = str(fact.get("prompts", "")), str(fact.get("sha256", ""))[:16]
        rows.append([key, _public(str(fact.get("source", ""))), count, digest, names])
    return "## Data\n\n" + _table(["task", "data", "prompts", "sha256", "rewards"], rows)


def _settings(config: Config) -> str:
    train, sampling = config.train, config.sampling
    known = {
        "train.steps": train.steps,
        "train.episodes": train.episodes,
        "train.lr": train.lr,
        "train.groups_per_step": train.groups_per_step,
        "sampling.num_generations": sampling.num_generations,
        "sampling.temperature": sampling.temperature,
        "sampling.max_tokens": sampling.max_tokens,
        "produce.strategy": config.produce.strategy.rpartition(":")[2],
        "produce.max_staleness": config.produce.max_staleness,
        "algorithm.kl_beta": config.algorithm.kl_beta,
        "model.lora.rank": config.model.lora.rank or None,
        "seed": config.seed,
    }
    rows = [[f"`{key}`", str(value)] for key, value in known.items() if value is not None]
    return "## Settings\n\n" + _table(["key", "value"], rows)


def _trust(folder: RunFolder, checkpoint: Checkpoint) -> str:
    lines = [f"- Digest of the weights after step {checkpoint.step}: `{checkpoint.digest}`."]
    try:
        audit = take_audit(folder)
    except PenstockError as error:
        lines.append(f"- The journal could not be audited: {_cell(str(error))}.")
        return "\n".join(["## Audit", "", *lines])
    for name, task in audit.tasks.items():
        dropped = sum(task.dropped.values())
        lines.append(
            f"- {_cell(name)}: {task.drawn} groups drawn = {task.trained} trained + {task.buffered} buffered "
            f"+ {task.in_flight} in flight + {dropped} dropped."
        )
    verdict = "every law holds" if audit.balanced else count(len(audit.faults), "fault")
    lines += [
        f"- Largest staleness of a trained group: {audit.max_staleness_trained}, "
        f"allowed: {audit.max_staleness_allowed}.",
        f"- `penstock audit`: {verdict}.",
        *(f"  - {_cell(fault)}" for fault in audit.faults[:5]),
    ]
    return "\n".join(["## Audit", "", *lines])
