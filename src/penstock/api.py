"""Penstock from Python: train, resume, evaluate, generate, score and look at runs.

The same runs as those of the command line: every function makes a config, and hands it to the code
behind the command. Rows that are given become a file in the run folder. Nothing heavy is imported before
a function is called, because `import penstock` imports this file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.rollout.evaluation.evaluate import EvalResult
    from penstock.rollout.evaluation.generate import Sample
    from penstock.store.run_folder import RunFolder

Data: TypeAlias = "str | Path | Iterable[Mapping[str, Any] | str] | Any"
"""A file, folder, glob, hub name or built-in task; or rows: a list, a `datasets.Dataset`, a data frame."""
Reward: TypeAlias = "str | Callable[..., Any] | Mapping[str, Any] | Sequence[Any]"
"""A reward's name, a function, a dict (type, weight, options), or a list of these, which are summed."""
Settings: TypeAlias = Mapping[str, Any]
"""Keys of `penstock config` with their values: {"sampling.top_p": 0.9}."""


class Run:
    """One run: its metrics, samples, model and report, read from its folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._folder.path

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return self._folder.name

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self._folder.config()

    @property
    def metrics(self) -> list[dict[str, float]]:
        """A dict for each step, such as `{"step": 1, "reward/mean": 0.25, ...}`."""
        return _read_lines(self._folder.metrics)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """A dict for each evaluation of each task: task, step, accuracy, low, high, reward."""
        return _read_lines(self._folder.evaluations / "summary.jsonl")

    def samples(
        self,
        *,
        step: int | None = None,
        task: str | None = None,
        where: str | None = None,
        limit: int = 20,
    ) -> list[dict[str, Any]]:
        """Responses with their prompts, rewards and outcomes, trained ones first.

        `where` is an SQL condition on the journal's view `rollouts`, such as "reward < 0.5". `task`: a
        task, or eval/NAME.
        """
        from penstock.inspection.rollout_viewer import read_rollouts

        rollouts = read_rollouts(self._folder, where=where, step=step, task=task, limit=limit)
        return [rollout.plain() for rollout in rollouts]

    @property
    def model_path(self) -> Path:
        """The folder of the newest model, which transformers' `from_pretrained` loads."""
        from penstock.store.checkpoint import CheckpointStore

        path = CheckpointStore(self._folder.checkpoints).newest_model()
        if path is None:
            raise UserError(f"run {self.path}: got no checkpoint, allowed: a run that wrote one")
        return path

    def report(self, out: str | Path | None = None) -> Path:
        """Write the HTML report, by default into the run folder; return its path."""
        from penstock.inspection.report import write_report

        return write_report([self._folder], None if out is None else Path(out))

    def export(self, to: str | Path, *, adapter: bool = False) -> Path:
        """Write the newest model (adapter: only its adapters) and a model card to the new folder `to`."""
        from penstock.inspection.export import export_run

        return export_run(self._folder, Path(to), adapter=adapter)

    def __repr__(self) -> str:
        means = [row["reward/mean"] for row in self.metrics if row.get("reward/mean") is not None]
        reward = f", reward {means[0]:.3f} -> {means[-1]:.3f}" if means else ""
        return f"Run({str(self.path)!r}, {len(means)} steps{reward})"


def train(
    model: str | Path | None = None,
    data: Data | None = None,
    reward: Reward | None = None,
    *,
    steps: int | None = None,
    episodes: float | None = None,
    lr: float | None = None,
    algorithm: str | None = None,
    groups_per_step: int | None = None,
    num_generations: int | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    system_prompt: str | None = None,
    columns: Mapping[str, str] | None = None,
    data_options: Mapping[str, Any] | None = None,
    eval_data: Data | None = None,
    seed: int | None = None,
    name: str | None = None,
    config: str | Path | None = None,
    settings: Settings | None = None,
    trust: bool = False,
) -> Run:
    """Train a policy to the end and return the run; Ctrl-C saves a checkpoint and raises StopRequested.

    model: folder or hub name of a transformers causal LM, or "demo".
    data: the prompts (docs/data.md). reward: what a response is worth (docs/rewards.md); default: the
    answer in <answer> tags. eval_data: problems that are evaluated at the start and the end.
    steps or episodes: length of the run. columns, data_options: see docs/data.md.
    config: a TOML file to start from. settings: any other key of `penstock config`.
    trust: allow what a config of another user's run would execute or connect to.
    """
    task, judged = _task_names(data, config)
    named: dict[str, Any] = {
        "model.path": None if model is None else str(model),
        "train.steps": steps,
        "train.episodes": episodes,
        "train.lr": lr,
        "train.groups_per_step": groups_per_step,
        "algorithm.name": algorithm,
        "sampling.num_generations": num_generations,
        "sampling.max_tokens": max_tokens,
        "sampling.temperature": temperature,
        "seed": seed,
        "run.name": name,
    }
    rewards, objects = name_rewards(reward)
    named |= {
        f"{task}.rewards": rewards,
        f"{task}.columns": columns,
        f"{task}.data_options": data_options,
        f"{task}.system_prompt": system_prompt,
    }
    if eval_data is not None:
        named |= {f"{judged}.rewards": rewards, f"{judged}.columns": columns}
    with _inputs({task: data, judged: eval_data}, objects) as (sources, files):
        return _train(config, {**named, **sources, **(settings or {})}, files, trust)


def sft(
    model: str | Path | None = None,
    data: Data | None = None,
    *,
    steps: int | None = None,
    episodes: float | None = None,
    lr: float | None = None,
    groups_per_step: int | None = None,
    max_tokens: int | None = None,
    system_prompt: str | None = None,
    columns: Mapping[str, str] | None = None,
    eval_data: Data | None = None,
    reward: Reward | None = None,
    seed: int | None = None,
    name: str | None = None,
    config: str | Path | None = None,
    settings: Settings | None = None,
    trust: bool = False,
) -> Run:
    """Imitate the answers in the data and return the run (docs/teach.md).

    data: records with `messages` or with a prompt and a completion. groups_per_step: records of an update.
    eval_data, reward: problems that are sampled and scored at the start and the end. The rest as `train`.
    """
    task, judged = _task_names(data, config)
    named: dict[str, Any] = {
        "algorithm.name": "sft",
        "model.path": None if model is None else str(model),
        "train.steps": steps,
        "train.episodes": episodes,
        "train.lr": lr,
        "train.groups_per_step": groups_per_step,
        "sampling.max_tokens": max_tokens,
        "seed": seed,
        "run.name": name,
        f"{task}.columns": columns,
        f"{task}.system_prompt": system_prompt,
    }
    rewards, objects = name_rewards(reward)
    if eval_data is not None:
        named |= {f"{judged}.rewards": rewards}
    with _inputs({task: data, judged: eval_data}, objects) as (sources, files):
        return _train(config, {**named, **sources, **(settings or {})}, files, trust)


def _train(
    config: str | Path | None, settings: Settings, files: Sequence[Path], trusted: bool
) -> Run:
    from penstock.config.source import load_config
    from penstock.run import entry
    from penstock.store import trust

    loaded = load_config(config, _overrides(settings), bare=config is None).config
    trust.check_config(config, trust=trusted)
    return Run(entry.train(loaded, own_data=files))


def resume(
    run: Run | str | Path,
    *,
    reward: Reward | None = None,
    settings: Settings | None = None,
    accept_changes: bool = False,
    trust: bool = False,
) -> Run:
    """Continue a run to its end. A run that was given Python functions as rewards needs them again.

    accept_changes: continue also if the data or the tokenizer has other content than before.
    trust: allow what a run of another user would execute or connect to.
    """
    from penstock.run import entry

    folder = _folder(run)
    with _inputs({}, _objects_again(folder.config(), reward)):
        words = _overrides(settings or {})
        entry.resume(folder, words, accept_changes=accept_changes, trusted=trust)
    return Run(folder)


def open_run(run: str | Path) -> Run:
    """A run by its folder, or by its name in runs/; it may still be under way."""
    return Run(_folder(run))


def evaluate(
    model: Run | str | Path,
    data: Data | None = None,
    reward: Reward | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    data_options: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    num_generations: int | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    out: str | Path | None = None,
    settings: Settings | None = None,
    trust: bool = False,
) -> list[EvalResult]:
    """Evaluate a model, or the newest checkpoint of a run; return one result for each task.

    Without data: the evaluation tasks of the run, with its rewards. out: folder for the samples.
    trust: allow what a run of another user would execute or connect to.
    """
    from penstock.run.session import evaluate_model, outside_a_loop

    rewards, objects = name_rewards(reward)
    named: dict[str, Any] = {
        "eval.sampling.num_generations": num_generations,
        "eval.sampling.temperature": temperature,
        "eval.sampling.max_tokens": max_tokens,
    }
    if data is None and reward is not None:
        objects = _objects_again(_folder(model).config(), reward)
    with _inputs({"eval.tasks.heldout": data}, objects) as (sources, _):
        if data is not None:
            task: dict[str, Any] = {
                "data": sources["eval.tasks.heldout.data"],
                "rewards": rewards,
                "columns": columns,
                "data_options": data_options,
                "system_prompt": system_prompt,
            }
            chosen = {key: value for key, value in task.items() if value is not None}
            named["eval.tasks"] = {"heldout": chosen}
        words = _overrides({**named, **(settings or {})})
        folder = None if out is None else Path(out)
        return outside_a_loop(lambda: evaluate_model(_source(model), words, folder, trusted=trust))


def generate(
    model: Run | str | Path,
    prompts: str | Sequence[str],
    *,
    num_generations: int = 1,
    max_tokens: int | None = None,
    temperature: float | None = None,
    raw: bool = False,
    settings: Settings | None = None,
    trust: bool = False,
) -> list[Sample]:
    """Sample a model, or the newest checkpoint of a run; return each response with its log-probs.

    raw: send the prompts as they are, without the chat template.
    trust: allow what a run of another user would execute or connect to.
    """
    from penstock.rollout.evaluation.generate import generate_samples
    from penstock.run import preflight
    from penstock.run.session import model_config, outside_a_loop

    config = model_config(_source(model), _overrides(settings or {}), trusted=trust)
    named = {"max_tokens": max_tokens, "temperature": temperature}
    chosen = {key: value for key, value in named.items() if value is not None}
    sampling = type(config.sampling)(**{**config.sampling.model_dump(), **chosen})
    config = config.model_copy(update={"sampling": sampling})  # no task is trained: greedy is fine
    preflight.check_engine(config)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    return outside_a_loop(
        lambda: generate_samples(config, texts, num_generations=num_generations, raw=raw)
    )


def score(
    responses: Data | Run,
    reward: Reward = "boxed",
    *,
    options: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Run a reward over recorded responses; return a dict for each, with reward, parts and note.

    responses: rows with `response` and `gt_answer` or `test_cases`; a JSONL file; or a run.
    """
    from penstock.files import ScratchFolder, console
    from penstock.rollout.evaluation.score import score_file
    from penstock.run.session import outside_a_loop

    rewards, objects = name_rewards(reward)
    if not rewards or len(rewards) > 1:
        raise UserError(f"reward: got {len(rewards or [])} rewards, allowed: one")
    source = str(responses.path) if isinstance(responses, Run) else responses
    chosen = {**rewards[0].get("options", {}), **(options or {})}
    with ScratchFolder.new("score") as scratch, _inputs({"score": source}, objects) as (sources, _):
        path, kind, out = Path(sources["score.data"]), rewards[0]["type"], scratch / "scored.jsonl"
        quiet = console(quiet=True)
        outside_a_loop(lambda: score_file(path, kind, out, chosen, console=quiet))
        return _read_lines(out)


# -- rewards -----------------------------------------------------------------------------------


def name_rewards(reward: Reward | None) -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
    """The rewards as a config has them, and the Python objects that they name."""
    if reward is None:
        return None, {}
    rewards: list[dict[str, Any]] = []
    objects: dict[str, Any] = {}
    for entry in reward if isinstance(reward, list | tuple) else [reward]:
        table = dict(entry) if isinstance(entry, Mapping) else {"type": entry}
        target = table.get("type")
        if not isinstance(target, str):
            table["type"] = _importable(target) or _named(target, objects)
        rewards.append(table)
    return rewards, objects


def _importable(target: Any) -> str:
    """`module:name` if a new process can import the object; else the empty string."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if module in (None, "__main__") or not str(name).isidentifier():
        return ""
    imported = sys.modules.get(str(module))
    is_same = getattr(imported, name, None) is target
    return f"{module}:{name}" if is_same and getattr(imported, "__spec__", None) else ""


def _named(target: Any, objects: dict[str, Any]) -> str:
    """Add the object under a name of its own; return what a config calls it."""
    from penstock.config.plugins import PYTHON

    if not callable(target) and not hasattr(target, "score"):
        raise UserError(
            f"reward: got {target!r}, allowed: a name, a function, a dict with type, or a list of these"
        )
    base = str(getattr(target, "__name__", type(target).__name__))
    base = base if base.isidentifier() else "reward"
    name = next(
        n
        for n in (base, *(f"{base}_{i}" for i in range(2, 1000)))
        if objects.get(n, target) is target
    )
    objects[name] = target
    return f"{PYTHON}{name}"


def _objects_again(config: Config, reward: Reward | None) -> dict[str, Any]:
    """The objects that a run's config names, from the rewards that are given again."""
    from penstock.config.plugins import PYTHON

    tasks = (*config.tasks.values(), *config.eval.tasks.values())
    types = dict.fromkeys(entry.type for task in tasks for entry in task.rewards)
    wanted = [name.removeprefix(PYTHON) for name in types if name.startswith(PYTHON)]
    if reward is None:
        return {}
    _, objects = name_rewards(reward)
    targets = list(objects.values())
    if len(targets) != len(wanted):
        raise UserError(
            f"reward: got {len(targets)} Python functions, allowed: {len(wanted)}, as the run has "
            f"({', '.join(wanted) or 'its rewards have names, which a config can change'})"
        )
    return objects if objects.keys() == set(wanted) else dict(zip(wanted, targets, strict=True))


# -- data --------------------------------------------------------------------------------------


@contextmanager
def _inputs(
    sources: Mapping[str, Data | None], objects: Mapping[str, Any]
) -> Iterator[tuple[dict[str, str], list[Path]]]:
    """Give each source as the value of its `data` key, and the files that rows were written to.

    Within it a config may name the Python objects, and an error about rows names no scratch file.
    """
    from penstock.config import plugins
    from penstock.files import ScratchFolder

    with ScratchFolder.new("rows") as scratch, plugins.python_objects(objects):
        settings, files = dict[str, str](), list[Path]()
        for key, source in sources.items():
            if isinstance(source, str | Path):
                settings[f"{key}.data"] = str(source)
            elif source is not None:
                files.append(scratch / f"{key}.jsonl")
                settings[f"{key}.data"] = str(files[-1])
                _write_rows(files[-1], source)
        try:
            yield settings, files
        except UserError as error:
            text = str(error)
            for path in files:
                text = text.replace(f"data {path} line", "data from Python, row")
                text = text.replace(f"'{path}'", "rows from Python")
            raise UserError(text) if text != str(error) else error from None


def _write_rows(path: Path, source: Any) -> None:
    from penstock.data.source import plain

    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(_rows(source), start=1):
            record = {"prompt": row} if isinstance(row, str) else row
            if not isinstance(record, Mapping):
                raise UserError(
                    f"data: row {number}: got {type(row).__name__}, allowed: a dict or a string"
                )
            file.write(f"{json.dumps(plain(record))}\n")


def _rows(source: Any) -> Iterable[Any]:
    if hasattr(source, "iloc"):  # a data frame
        return cast(Iterable[Any], source.to_dict("records"))
    if isinstance(source, Mapping):
        if any(hasattr(value, "column_names") for value in source.values()):
            raise UserError(
                f"data: got the splits {', '.join(source)}, allowed: one of them, as in "
                f"data=dataset[{next(iter(source))!r}]"
            )
        sizes = {len(value) for value in source.values() if isinstance(value, Sequence)}
        if len(sizes) != 1 or any(isinstance(v, str) for v in source.values()):
            raise UserError("data: got a dict, allowed: a list of dicts, or columns of one length")
        return (dict(zip(source, row, strict=True)) for row in zip(*source.values(), strict=True))
    if not isinstance(source, Iterable) or isinstance(source, bytes):
        raise UserError(
            f"data: got {type(source).__name__}, allowed: a path or name, a list of dicts, a "
            "datasets.Dataset or a data frame"
        )
    return source


# -- settings and runs -------------------------------------------------------------------------


def _task_names(data: Data | None, config: str | Path | None) -> tuple[str, str]:
    """The keys of the training and of the evaluation task: the config's own, if it has one."""
    if config is None:
        if data is None:
            raise UserError(
                "data: got nothing, allowed: rows, a file, a folder, a hub name, a built-in task such "
                "as 'addition', or config=FILE"
            )
        return "tasks.train", "eval.tasks.heldout"
    from penstock.config.source import load_config

    loaded = load_config(config).config
    names, judged = list(loaded.tasks), list(loaded.eval.tasks) or ["heldout"]
    if data is not None and len(names) > 1:
        raise UserError(
            f"data: got data beside {config} with the tasks {', '.join(names)}, allowed: one task, "
            "or settings={'tasks.NAME.data': ...}"
        )
    return f"tasks.{names[0]}", f"eval.tasks.{judged[0]}"


def _overrides(settings: Settings) -> list[str]:
    from penstock.config.source import as_override

    return [as_override(key, value) for key, value in settings.items() if value is not None]


def _folder(run: Run | str | Path) -> RunFolder:
    from penstock.store.run_folder import find

    return run._folder if isinstance(run, Run) else find(run)


def _source(model: Run | str | Path) -> str:
    return str(model.path if isinstance(model, Run) else model)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    from penstock.inspection.track.logs import read_rows

    return read_rows(path)[0] if path.is_file() else []
