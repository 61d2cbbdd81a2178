"""Penstock from Python: train, resume, evaluate, generate, score and look at runs.

The same runs as those of the command line: every function makes a config, and hands it to the code
behind the command. Rows that are given become a file in the run folder. Nothing heavy is imported before
a function is called, because `import penstock` imports this file.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from penstock.errors import PenstockError, UserError

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.rollout.evaluation.evaluate import EvalResult
    from penstock.run.generate import Sample
    from penstock.store.run_folder import RunFolder

Data: TypeAlias = "str | Path | Iterable[Mapping[str, Any] | str] | Any"
"""A file, folder, glob, hub name or built-in task; or rows: a list, a `datasets.Dataset`, a data frame."""
Reward: TypeAlias = "str | Callable[..., Any] | Mapping[str, Any] | Sequence[Any]"
"""A reward's name, a function, a dict (type, weight, options), or a list of these, which are summed."""
Settings: TypeAlias = Mapping[str, Any]
"""Keys of `penstock config` with their values: {"sampling.top_p": 0.9}."""


P = ParamSpec("P")
T = TypeVar("T")


def _entrance(function: Callable[P, T]) -> Callable[P, T]:
    """A function for users: it names the nearest parameter, and its errors have no inner traceback.

    The whole traceback of a run is in RUN/logs/traceback.txt.
    """
    parameters = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value in kwargs.items():
            if name not in parameters:
                from penstock.config import Config
                from penstock.config.mistakes import nearest_parameter

                hint = nearest_parameter(name, value, parameters, Config)
                raise UserError(
                    f"{function.__name__}: got {name}={value!r}, allowed: its parameters{hint}"
                )
        try:
            return function(*args, **kwargs)
        except PenstockError as error:
            raise error.with_traceback(None) from None

    return call


class Run:
    """One run: its metrics, samples, model and report, read from its folder."""

    def __init__(self, folder: RunFolder, objects: Mapping[str, Any] | None = None) -> None:
        """objects: the Python functions that the run was given, by the names in its config."""
        self._folder, self._objects = folder, dict(objects or {})

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
        from penstock.inspection.track.logs import read_metrics

        return list(read_metrics(self._folder.metrics).values())

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """A dict for each evaluation of each task: task, step, accuracy, low, high, reward."""
        from penstock.rollout.evaluation.evaluate import read_summaries

        return read_summaries(self._folder.evaluations)

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

    def findings(self) -> list[dict[str, Any]]:
        """What is wrong with the run, and what to change: name, what, since, evidence, advice, change."""
        from dataclasses import asdict

        from penstock.inspection.findings import find
        from penstock.inspection.findings.observed import read_observed

        return [asdict(finding) for finding in find(read_observed(self._folder))]

    def audit(self, *, deep: bool = False) -> dict[str, Any]:
        """What `penstock audit --json` prints: counts by task, `balanced`, faults and warnings."""
        from penstock.inspection.audit import take_audit

        return take_audit(self._folder, deep=deep).as_json()

    def to_pandas(self) -> Any:
        """The metrics as a data frame of pandas, a row for each step."""
        try:
            import pandas
        except ImportError:
            raise UserError("to_pandas: pandas is not installed; pip install pandas") from None
        frame = pandas.DataFrame(self.metrics)
        return frame.set_index("step") if "step" in frame else frame

    def report(self, out: str | Path | None = None) -> Path:
        """Write the HTML report, by default into the run folder; return its path."""
        from penstock.inspection.report import write_report

        return write_report([self._folder], None if out is None else Path(out))

    def export(
        self, to: str | Path, *, adapter: bool = False, step: int | str | None = None
    ) -> Path:
        """Write a model (adapter: only its adapters) and a model card to the new folder `to`.

        step: of a checkpoint that is kept, or "best" by its evaluation; by default the newest.
        """
        from penstock.inspection.export import export_run

        chosen = None if step is None else str(step)
        return export_run(self._folder, Path(to), adapter=adapter, step=chosen)

    def _repr_html_(self) -> str:
        """The run as a small table, which a notebook shows."""
        from penstock.inspection.record import html_table, read_line

        return html_table(read_line(self._folder), self.findings(), self.path)

    def __repr__(self) -> str:
        steps = self.metrics
        means = [row["reward/mean"] for row in steps if row.get("reward/mean") is not None]
        reward = f", reward {means[0]:.3f} -> {means[-1]:.3f}" if means else ""
        return f"Run({str(self.path)!r}, {len(steps)} step{'s' * (len(steps) != 1)}{reward})"


@_entrance
def train(
    model: Run | str | Path | None = None,
    data: Data | None = None,
    reward: Reward | None = None,
    *,
    agent: str | Callable[..., Any] | None = None,
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
    early_stop: str | Sequence[str] | None = None,
    keep_best: str | None = None,
    on_step: Callable[[dict[str, float]], object] | None = None,
    seed: int | None = None,
    name: str | None = None,
    config: str | Path | None = None,
    settings: Settings | None = None,
    trust: bool = False,
) -> Run:
    """Train a policy to the end and return the run; Ctrl-C saves a checkpoint and raises StopRequested.

    model: folder or hub name of a transformers causal LM, a run (its newest checkpoint), or "demo".
    data: the prompts (docs/data.md). reward: what a response is worth (docs/rewards.md); default: the
    answer in <answer> tags. eval_data: problems that are evaluated at the start and the end.
    agent: an async function of (task, model) that makes a rollout (docs/agents.md), or its name.
    steps or episodes: length of the run. columns, data_options: see docs/data.md.
    early_stop: rules such as "heldout/accuracy >= 0.95" (train.stop_when). keep_best: a score such as
    "heldout/accuracy", whose best checkpoint is kept. on_step: is called with the metrics of each step.
    config: a TOML file to start from. settings: any other key of `penstock config`.
    trust: allow what a config of another user's run would execute or connect to.
    """
    named: dict[str, Any] = {
        "model.path": None if model is None else _source(model),
        "train.steps": steps,
        "train.episodes": episodes,
        "train.lr": lr,
        "train.groups_per_step": groups_per_step,
        "algorithm.name": algorithm,
        "sampling.num_generations": num_generations,
        "sampling.max_tokens": max_tokens,
        "sampling.temperature": temperature,
        "train.stop_when": [early_stop] if isinstance(early_stop, str) else early_stop,
        "checkpoint.keep_best": keep_best,
        "seed": seed,
        "run.name": name,
    }
    rewards, objects = name_rewards(reward)
    shared = {"rewards": rewards, "agent": _name_agent(agent, objects), "columns": columns}
    objects |= _callback(on_step)
    of_task = {**shared, "data_options": data_options, "system_prompt": system_prompt}
    tables = (data, of_task), (eval_data, shared)
    return _train(config, named, *tables, settings=settings, objects=objects, trusted=trust)


@_entrance
def sft(
    model: Run | str | Path | None = None,
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
    named: dict[str, Any] = {
        "algorithm.name": "sft",
        "model.path": None if model is None else _source(model),
        "train.steps": steps,
        "train.episodes": episodes,
        "train.lr": lr,
        "train.groups_per_step": groups_per_step,
        "sampling.max_tokens": max_tokens,
        "seed": seed,
        "run.name": name,
    }
    rewards, objects = name_rewards(reward)
    of_task = {"columns": columns, "system_prompt": system_prompt}
    tables = (data, of_task), (eval_data, {"rewards": rewards})
    return _train(config, named, *tables, settings=settings, objects=objects, trusted=trust)


def _train(
    config: str | Path | None,
    named: dict[str, Any],
    trained: tuple[Data | None, Settings],
    evaluated: tuple[Data | None, Settings],
    *,
    settings: Settings | None,
    objects: Mapping[str, Any],
    trusted: bool,
) -> Run:
    """Train with these settings, and with those of the two tasks beside their data, where they have any."""
    from penstock.run import entry
    from penstock.store.trust import load_trusted

    task, judged = _task_names(trained[0], config)
    named |= {f"{task}.{key}": value for key, value in trained[1].items()}
    if evaluated[0] is not None:
        named |= {f"{judged}.{key}": value for key, value in evaluated[1].items()}
    with _inputs({task: trained[0], judged: evaluated[0]}, objects) as (sources, files):
        words = _overrides({**named, **sources, **(settings or {})})
        loaded = load_trusted(config, words, trust=trusted, bare=config is None)
        return Run(entry.train(loaded, own_data=files), objects)


@_entrance
def resume(
    run: Run | str | Path,
    *,
    reward: Reward | None = None,
    agent: Callable[..., Any] | None = None,
    on_step: Callable[[dict[str, float]], object] | None = None,
    settings: Settings | None = None,
    accept_changes: bool = False,
    trust: bool = False,
) -> Run:
    """Continue a run to its end. A run that another program gave Python functions needs them again.

    accept_changes: continue also if the data or the tokenizer has other content than before.
    trust: allow what a run of another user would execute or connect to.
    """
    from penstock.run import entry

    folder = _folder(run)
    objects = _known_objects(run) | _objects_again(folder.config(), reward, agent)
    objects |= _callback(on_step)
    with _inputs({}, objects):
        words = _overrides(settings or {})
        entry.resume(folder, words, accept_changes=accept_changes, trusted=trust)
    return Run(folder, objects)


@_entrance
def open_run(run: str | Path) -> Run:
    """A run by its folder, or by its name in runs/; it may still be under way."""
    return Run(_folder(run))


@_entrance
def evaluate(
    model: Run | str | Path,
    data: Data | None = None,
    reward: Reward | None = None,
    *,
    agent: Callable[..., Any] | None = None,
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

    Without data: the evaluation tasks of the run, with its rewards and agents. out: folder for the samples.
    trust: allow what a run of another user would execute or connect to.
    """
    from penstock.run.session import evaluate_model, outside_a_loop

    rewards, objects = name_rewards(reward)
    named: dict[str, Any] = {
        "eval.sampling.num_generations": num_generations,
        "eval.sampling.temperature": temperature,
        "eval.sampling.max_tokens": max_tokens,
    }
    agent_name = _name_agent(agent, objects)
    if data is None and (reward is not None or agent is not None):
        objects = _objects_again(_folder(model).config(), reward, agent)
    objects = _known_objects(model) | objects
    with _inputs({"eval.tasks.heldout": data}, objects) as (sources, _):
        if data is not None:
            task: dict[str, Any] = {
                "data": sources["eval.tasks.heldout.data"],
                "rewards": rewards,
                "agent": agent_name,
                "columns": columns,
                "data_options": data_options,
                "system_prompt": system_prompt,
            }
            chosen = {key: value for key, value in task.items() if value is not None}
            named["eval.tasks"] = {"heldout": chosen}
        words = _overrides({**named, **(settings or {})})
        folder = None if out is None else Path(out)
        return outside_a_loop(lambda: evaluate_model(_source(model), words, folder, trusted=trust))


@_entrance
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
    from penstock.run.generate import generate_samples
    from penstock.run.session import model_config, outside_a_loop

    named = {"sampling.max_tokens": max_tokens, "sampling.temperature": temperature}
    overrides = [*_overrides(settings or {}), *_overrides(named)]
    config = model_config(_source(model), overrides, trusted=trust)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    return outside_a_loop(
        lambda: generate_samples(config, texts, num_generations=num_generations, raw=raw)
    )


@_entrance
def score(
    responses: Data | Run,
    reward: Reward = "boxed",
    *,
    options: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Run a reward over recorded responses; return a dict for each, with reward, parts and note.

    responses: rows with `response`, and `gt_answer` or `test_cases` if the reward needs them; a JSONL
    file; or a run.
    """
    from penstock.files import ScratchFolder, console, read_rows
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
        return read_rows(out)[0]


# -- rewards -----------------------------------------------------------------------------------


def name_rewards(reward: Reward | None) -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
    """The rewards as a config has them, and the Python objects that they name."""
    if reward is None:
        return None, {}
    from penstock.config import plugins

    rewards: list[dict[str, Any]] = []
    objects: dict[str, Any] = {}
    for entry in reward if isinstance(reward, list | tuple) else [reward]:
        table = dict(entry) if isinstance(entry, Mapping) else {"type": entry}
        target = table.get("type")
        if not isinstance(target, str):
            table["type"] = plugins.importable(target) or plugins.name_object(target, objects)
        rewards.append(table)
    return rewards, objects


def _name_agent(agent: str | Callable[..., Any] | None, objects: dict[str, Any]) -> str | None:
    """The agent as a config has it; a function that no process can import is added to the objects."""
    if agent is None or isinstance(agent, str):
        return agent
    if not callable(agent):
        raise UserError(f"agent: got {agent!r}, allowed: a function of (task, model), or its name")
    from penstock.config import plugins

    return plugins.importable(agent) or plugins.name_object(agent, objects)


def _known_objects(run: Run | str | Path) -> dict[str, Any]:
    """The Python functions that this program has given the run."""
    return run._objects if isinstance(run, Run) else {}


def _callback(on_step: Callable[[dict[str, float]], object] | None) -> dict[str, Any]:
    """The function that gets each step's metrics, as one of the program's objects."""
    if on_step is None:
        return {}
    if not callable(on_step):
        raise UserError(f"on_step: got {on_step!r}, allowed: a function of the metrics of a step")
    from penstock.inspection.track.logs import StepCallback

    return {StepCallback.NAME: on_step}


def _objects_again(
    config: Config, reward: Reward | None, agent: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """The objects that a run's config names, from the rewards and the agent that are given again."""
    from penstock.config.plugins import PYTHON

    tasks = (*config.tasks.values(), *config.eval.tasks.values())
    if agent is not None:
        names = {task.agent.removeprefix(PYTHON) for task in tasks if task.agent.startswith(PYTHON)}
        return dict.fromkeys(names, agent) | _objects_again(config, reward)
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
    from penstock.data.source import write_rows
    from penstock.files import ScratchFolder

    with ScratchFolder.new("rows") as scratch, plugins.python_objects(objects):
        settings, files = dict[str, str](), list[Path]()
        for key, source in sources.items():
            if isinstance(source, str | Path):
                settings[f"{key}.data"] = str(source)
            elif source is not None:
                files.append(scratch / f"{key}.jsonl")
                settings[f"{key}.data"] = str(files[-1])
                write_rows(files[-1], source)
        try:
            yield settings, files
        except UserError as error:
            text = str(error)
            for path in files:
                text = text.replace(f"data {path} line", "data from Python, row")
                text = text.replace(f"'{path}'", "rows from Python")
            raise UserError(text) if text != str(error) else error from None


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
