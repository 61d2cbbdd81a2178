"""Cheap checks of a config, before anything heavy is imported.

Names exist, options are known, packages are installed, data files are well-formed, the model folder is a
model. Each failure is a UserError of one line. What needs the model or the tokenizer is checked when
they are loaded.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import re
from collections.abc import Iterable
from pathlib import Path

from penstock import reward
from penstock.config import Config, SamplingConfig, TaskDataConfig
from penstock.config.demo import text_settings
from penstock.config.plugins import check_name, load
from penstock.config.secrets import from_environment
from penstock.config.server_url import server_url
from penstock.data import validate_source
from penstock.data.chat import ask_hub, load_tokenizer
from penstock.data.dataset import FEEDBACK, HINT, first_prompts, gives_own_reward, teacher_template
from penstock.data.source import hub_name
from penstock.engine import ENGINES
from penstock.errors import RewardError, UserError
from penstock.files import say
from penstock.inspection.track import TRACKERS
from penstock.model.parallel_plan import check_parallel
from penstock.reward import VerifiableReward
from penstock.reward.user import UserFunction
from penstock.rollout.agent.build import check_agent
from penstock.rollout.evaluation.score import answered
from penstock.rollout.strategy import load_strategy
from penstock.run.fit import PROCESS
from penstock.run.stop_rules import check_scores
from penstock.store.space import available_mib
from penstock.training import algo
from penstock.training.algo.method import check_algorithm
from penstock.types import Prompt
from penstock.weights import SYNC_KINDS, sync_kind
from penstock.workers import LAUNCHERS

_TRIED_PROMPTS, _TRIAL_S = 3, 20.0  # with which a user's reward is tried
# model types with convolutions, state spaces or linear attention, which the engine transformers cannot sample
_WITH_STATE = """
bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h
olmo_hybrid qwen3_5 qwen3_5_moe qwen3_next recurrent_gemma rwkv xlstm zamba2 zaya
"""
WITH_STATE = frozenset(_WITH_STATE.split())
_OPTIONAL = ("vllm", "wandb", "ray")  # packages, and the extras that install them


def check(config: Config) -> None:
    """Raise a UserError for the first thing in the config that cannot work here."""
    check_engine(config)
    for place in range(len(config.launch.producer_kinds)):
        key = f"launch.producer_kinds[{place}].engine.name"
        check_name(key, config.engine_of_kind(place).name, ENGINES)
    check_launch(config)
    check_name("algorithm.name", config.algorithm.name, algo.ALGORITHMS)
    for name in config.tasks:
        used = config.task_algorithm(name).name
        check_name(f"tasks.{name}.algorithm.name", used, algo.ALGORITHMS)
    for tracker in config.track.trackers:
        check_name("track.trackers", tracker, TRACKERS)
    for name in (*(engine.name for engine in config.engine_kinds()), *config.track.trackers):
        _check_installed(name)
    check_algorithm(config)
    if config.model.tokenizer:
        check_model(config.model.tokenizer, "model.tokenizer")
    if config.train.reference:
        check_model(config.train.reference, "train.reference")
    for name, teacher in config.teachers.items():
        if teacher.is_loaded:
            _check_vocabulary(config, name)
        elif teacher.base_url:
            server_url(f"teachers.{name}.base_url", teacher.base_url)
            from_environment(f"teachers.{name}.api_key_variable", teacher.api_key_variable)
    check_parallel(config)
    if config.train.steps is None and config.train.episodes is None:
        raise UserError("train.steps: got nothing, allowed: train.steps or train.episodes")
    for name, task in config.tasks.items():
        produce = config.task_produce(name)
        load_strategy(produce.strategy)
        if produce.is_valid_sample:
            load("produce.is_valid_sample", produce.is_valid_sample, {})
        if produce.should_continue:
            rule = load("produce.should_continue", produce.should_continue, {})
            if inspect.iscoroutinefunction(rule):  # its answer would be true, always
                raise UserError(
                    f"produce.should_continue: got {produce.should_continue!r}, which is async, "
                    "allowed: a function that answers at once"
                )
        if task.rewards and not any(reward.weight for reward in task.rewards):
            raise UserError(
                f"tasks.{name}.rewards: got weight 0 for every reward, allowed: at least one other weight (a reward "
                "of weight 0 is only shown)"
            )
        check_agent(f"tasks.{name}", task, config.task_sampling(name))
        _check_group_size(f"tasks.{name}", task, config.task_sampling(name))
        if task.agent_actors and config.launch.kind != "ray":
            raise UserError(
                f"tasks.{name}.agent_actors: got {task.agent_actors} with launch.kind = "
                f"{config.launch.kind!r}, allowed: 0, or launch.kind = 'ray'"
            )
    check_tasks("tasks", config.tasks.items())
    check_for_evaluation(config)
    check_scores(config)


def check_for_evaluation(config: Config) -> None:
    """Raise a UserError for the first evaluation task that cannot work."""
    check_tasks("eval.tasks", config.eval.tasks.items())
    for name, task in config.eval.tasks.items():
        sampling = config.eval_sampling(name)
        check_agent(f"eval.tasks.{name}", task, sampling)
        _check_group_size(f"eval.tasks.{name}", task, sampling)
        if sampling.num_generations > 1 and sampling.temperature == 0:
            raise UserError(
                f"eval.tasks.{name}: num_generations got {sampling.num_generations} with temperature 0 "
                "(greedy: all samples of a problem are equal), allowed: 1, or a temperature above 0"
            )


def _check_group_size(where: str, task: TaskDataConfig, sampling: SamplingConfig) -> None:
    """Refuse a reward that compares responses where each prompt has too few of them."""
    parts = reward.build_reward(task.rewards, max_tokens=1).parts if task.rewards else ()
    for part in parts:
        if sampling.num_generations < part.reward.fewest:
            raise UserError(
                f"{where}: num_generations got {sampling.num_generations} with the reward {part.name}, which compares "
                f"responses, allowed: {part.reward.fewest} or more"
            )


def check_engine(config: Config) -> None:
    """Raise a UserError unless the engine is known and installed and the model path is a model."""
    check_name("engine.name", config.engine.name, ENGINES)
    _check_installed(config.engine.name)
    check_model(config.model.path, "model.path")
    kind = text_settings(config.model.path).get("model_type", "").removesuffix("_text")
    own = any(engine.name == "transformers" for engine in config.engine_kinds())
    if own and kind in WITH_STATE:
        raise UserError(
            f"engine.name: got 'transformers' with model.path = {config.model.path!r} (type {kind}), whose layers keep "
            "more than keys and values, allowed: 'vllm' or 'openai'; the trainer runs this model, one sequence per pass"
        )


def check_launch(config: Config) -> None:
    """Raise a UserError unless [launch] can work here."""
    check_name("launch.kind", config.launch.kind, LAUNCHERS)
    _check_installed(config.launch.kind)
    if config.launch.kind in SYNC_KINDS:
        sync_kind(config)
    _check_processes(config)


def check_tasks(key: str, tasks: Iterable[tuple[str, TaskDataConfig]]) -> None:
    """Raise a UserError for the first task whose rewards or data cannot work."""
    for name, task in tasks:
        where = f"{key}.{name}"
        readers = reward.fields_read(task.rewards)
        for field in HINT.findall(teacher_template(task)):
            if field not in ("prompt", FEEDBACK):
                readers["gt_answer" if field == "answer" else field] = "teacher_template"
        if hub := hub_name(task.data):
            ask_hub(hub, f"{where}.data", "dataset")
        try:
            validate_source(name, task, readers=readers)
        except UserError as error:
            text = str(error)
            raise UserError(text if text.startswith(where) else f"{where}: {text}") from None


def try_rewards(config: Config) -> None:
    """Call the user's functions that are rewards once; raise a UserError for one that fails on any response.

    Without a trial a mistake shows when the workers have started and 32 groups have failed.
    """
    for name, task in config.tasks.items():
        functions = [entry for entry in task.rewards if entry.type not in reward.REWARDS]
        if functions and not gives_own_reward(task):
            prompts, is_chat = first_prompts(task, _TRIED_PROMPTS, config.seed)
            judge = reward.build_reward(functions, max_tokens=1, is_chat=is_chat)
            parts = [part for part in judge.parts if isinstance(part.reward, UserFunction)]
            if parts and prompts:
                asyncio.run(_try_reward(f"tasks.{name}", VerifiableReward(parts), prompts))


async def _try_reward(where: str, judge: VerifiableReward, prompts: list[Prompt]) -> None:
    """Score a made-up response to each prompt until one is scored."""
    fault, size = None, 2 if judge.needs_group else 1
    for prompt in prompts:
        answer = prompt.gt_answer or "1"
        text = f"<think>{answer}</think><answer>{answer}</answer> \\boxed{{{answer}}}"
        rollout = answered(prompt.prompt_id, prompt, text, 0)
        fault = None
        try:
            async with asyncio.timeout(_TRIAL_S):
                await judge.score_group([rollout] * size, [prompt] * size)
            break
        except TimeoutError:
            break  # slow, but not wrong
        except RewardError as error:
            fault = error
    await judge.close()
    if fault is None:
        return
    if not isinstance(fault.__cause__, ValueError | LookupError):
        raise UserError(f"{where}.rewards: a made-up response cannot be scored: {fault}")
    say(  # it may be a matter of the response's form
        f"warning: {where}.rewards: no made-up response could be scored: {fault}; a response whose reward raises is "
        "made again, and ends the run if that happens often: a bad response is worth a number",
        error=True,
    )


def check_model(path: str, key: str) -> None:
    """Raise a UserError unless `path` is a model folder or looks like a hub name."""
    folder = Path(path)
    if path == "demo":
        return
    if folder.exists():
        if not (folder / "config.json").is_file() and key != "model.tokenizer":
            lone = ""
            if (folder / "adapter_config.json").is_file():
                lone = ", adapters without their model (peft's merge_and_unload puts them into it)"
            raise UserError(
                f"{key}: got {path!r}{lone}, allowed: a model folder (one with config.json), a checkpoint, or a run "
                "that has one"
            )
    elif not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path):
        raise UserError(
            f"{key}: got {path!r}, allowed: a folder that exists, or a hub name owner/name"
        )


def _check_vocabulary(config: Config, name: str) -> None:
    """Refuse a teacher whose tokens are not the policy's: their probabilities cannot be compared."""
    path = config.teachers[name].path
    check_model(path, f"teachers.{name}.path")
    ask_hub(path, f"teachers.{name}.path")
    places, trusts = (
        (config.model.tokenizer or config.model.path, path),
        config.model.trust_remote_code,
    )
    own, other = (load_tokenizer(p, trust_remote_code=trusts).get_vocab() for p in places)
    if own != other:
        raise UserError(
            f"teachers.{name}.path: got {path!r} with another vocabulary ({len(other):,} tokens, the policy has "
            f"{len(own):,}), allowed: a model with the policy's tokenizer"
        )


def _check_installed(name: str) -> None:
    if name in _OPTIONAL and importlib.util.find_spec(name) is None:
        raise UserError(f"{name}: not installed; install it with: pip install 'penstock[{name}]'")


def _check_processes(config: Config) -> None:
    """Refuse more workers than the memory of this machine holds, whatever their model."""
    left = available_mib()
    if config.launch.kind != "local" or left is None:
        return
    least = PROCESS / 2**20
    most = int(left // least) - config.launch.num_consumers
    if config.launch.num_producers > max(1, most):
        raise UserError(
            f"launch.num_producers: got {config.launch.num_producers}, allowed: at most {max(1, most)} here: "
            f"each engine is a process, of at least {least:.0f} MiB of the {left:,.0f} that are available"
        )
