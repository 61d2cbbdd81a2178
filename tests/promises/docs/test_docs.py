"""README, CONTRIBUTING and docs/ are executed: commands run, configs load, Python runs, names exist.

Each page gets a folder of its own with tiny data, the demo policy as every model, and one recorded run
under every name that the page uses. Commands run inside this process, in the page's order, with TINY laid
over what they say. Conventions that pages follow:

- A block whose first line is a comment with a file name (`# my.toml`) is also written to that file.
- In a console block, the lines under `$ cat FILE` are written to FILE, and those under another
  command are compared with what it prints (seconds left out).
"""

from __future__ import annotations

import functools
import io
import json
import pkgutil
import re
import runpy
import shlex
import shutil
import sqlite3
import sys
import tomllib
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from penstock import cli
from penstock.config import Config, plugins
from penstock.config.demo import policy_path
from penstock.config.mistakes import valid_keys
from penstock.config.source import DEMO_CONFIG, load_config, validate
from penstock.convert.tables import WORDS
from penstock.engine.openai.engine import OpenAIOptions
from penstock.engine.transformers.options import TransformersOptions
from penstock.engine.vllm.options import VllmOptions
from penstock.errors import UserError
from penstock.reward import REWARDS
from penstock.reward.sandbox.settings import SandboxSettings
from penstock.run import preflight
from stages.command_line import commands, options
from stages.markdown_page import Block, Table, codes, read_page
from stages.tiny_run import SMALL_POLICY, SUMS

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "coming-from").glob("*.md")),
]
every_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)

NOT_RUN = {  # command -> why; the options are checked all the same
    "penstock convert trl grpo.yaml": "needs a file of TRL; docs/coming-from.md runs it with one",
    "penstock sandbox serve": "serves until it is stopped",
    "penstock dashboard": "serves until it is stopped",
    "penstock serve": "serves until it is stopped; tests/service asks it",
    "penstock audit runs/service": "needs a service; tests/service/test_client.py runs it on one",
    "penstock replay runs/service": "needs a service; tests/service/test_client.py runs it on one",
    "penstock scale": "needs a run that is under way",
    "vllm serve": "vLLM is not installed with the tests",
    "python": "benchmarks measure for minutes; their --help is run instead",
    "make": "installs packages or runs this test; the target is looked up instead",
    "uv pip install": "needs a network; `make test-wheel` installs with uv where it is there",
    "pip install": "needs a network; the extra is looked up instead",
    "ray start": "starts a cluster; test_recipes.py runs these commands",
    "sbatch": "needs SLURM; test_recipes.py runs the script",
    "docker": "needs Docker; test_dockerfile.py parses the file instead",
    "penstock --install-completion": "changes the shell of whoever runs the tests",
    ".ci/run": "runs this test",
    "penstock sft examples/warm_start/warm.toml": "test_examples.py trains it, for a step",
    "penstock train examples/warm_start/reinforce.toml": "test_examples.py trains it, for a step",
}
TINY = [
    "launch.kind=inline",
    "launch.num_producers=1",
    "launch.num_consumers=1",
    "launch.colocate=false",
    f"model.path={SMALL_POLICY}",
    "engine.name=transformers",
    "engine.max_slots=4",
    "sync.kind=auto",
    "sampling.num_generations=2",
    "sampling.max_tokens=6",
    "train.groups_per_step=2",
    "train.mini_batches=1",
    "train.parallel.tensor=1",
    "train.parallel.pipeline=1",
    "train.parallel.context=1",
    "eval.max_problems=2",
    "checkpoint.every_steps=1",
    "track.trackers=[]",
]
TINY_LINE = {
    "messages": [{"role": "user", "content": "12+34"}],
    "gt_answer": "46",
    "response": "46",
    "test_cases": {"inputs": ["3\n"], "outputs": ["6\n"]},
}
FOREIGN = {  # names in inline code that are not ours
    *("learning_rate", "epochs", "kl_coef"),  # TRL, verl
    *("RolloutState", "per_device_train_batch_size", "use_vllm"),  # XTuner, TRL
    *("train_files", "val_files", "train_batch_size", "actor_rollout_ref", "kl_loss_coef"),  # verl
    *("max_prompt_length", "max_response_length"),
    *("from_pretrained", "generate_batch", "my_module", "my_function", "my_reward", "my_rewards"),
    *("CUDA_VISIBLE_DEVICES", "user_version", "leg_counting"),
}


# ---------------------------------------------------------------- commands, TOML and Python blocks


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of two steps, with a checkpoint: what stands behind every runs/NAME."""
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        few = f"tasks.train.data={SUMS}"
        run_penstock(["train", *TINY, few, "train.steps=2", "run.name=recorded"])
    return folder / "runs" / "recorded"


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
@every_page
def test_every_block_works(
    path: Path, recorded_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in re.findall(r'token_variable = "(\w+)"', path.read_text("utf-8")):
        monkeypatch.setenv(name, "a token")  # a config names it, the user sets it
    page = read_page(path)
    prepare_folder(tmp_path, path.read_text("utf-8"), recorded_run)
    names: dict[str, Any] = {"__name__": "__docs__"}
    for block in page.blocks:
        try:
            run_block(block, names)
        except BaseException as error:
            error.add_note(f"in {path.relative_to(ROOT)}, the block at line {block.line}")
            raise


def prepare_folder(folder: Path, text: str, recorded_run: Path) -> None:
    for name in set(re.findall(r"runs/([A-Za-z]\w*)", text)):
        shutil.copytree(recorded_run, folder / "runs" / name)
    (folder / "path/to").mkdir(parents=True)
    (folder / "path/to/model").symlink_to(policy_path())
    for page in PAGES:  # a page may use a file that another one shows
        for name in set(re.findall(r"[\w/-]+\.jsonl", page.read_text("utf-8"))):
            if "runs/" not in name and "RUN" not in name:
                write(Path(name), "".join(f"{json.dumps(TINY_LINE)}\n" for _ in range(4)))
        for block in read_page(page).blocks:
            write_named(block)


def write(path: Path, text: str) -> None:
    if not path.is_absolute():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def write_named(block: Block) -> None:
    named = re.match(r"# ([\w-]+\.\w+)\b", block.text)
    if named and block.language in ("toml", "python"):
        write(Path(named[1]), block.text)


def run_block(block: Block, names: dict[str, Any]) -> None:
    write_named(block)
    if block.language == "python":
        exec(compile(block.text, f"line {block.line}", "exec"), names)
    elif block.language == "toml":
        load_as_config(block.text)
    elif block.language == "json":
        assert all(json.loads(line) for line in block.text.splitlines())
    else:
        assert block.language in ("", "sh", "console"), block.language
        run_commands(block)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_every_shipped_config_passes_the_checks_of_a_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = path.read_text("utf-8")
    for name in set(re.findall(r'"([\w/-]+\.jsonl)"', text)):
        write(Path(name), f"{json.dumps(TINY_LINE)}\n")
    load_as_config(text)


def load_as_config(text: str) -> None:
    """Check a config as `penstock train` does; a fragment is laid over the demo's config and a few sums."""
    tree = tomllib.loads(text)
    if not {"model", "tasks", "train"} <= tree.keys():
        demo = tomllib.loads(DEMO_CONFIG.read_text())
        for task in (demo["tasks"]["train"], demo["eval"]["tasks"]["heldout"]):
            task["data"] = str(SUMS)  # the demo's thousands would be read for every fragment
        tree = over(demo, tree)
    preflight.check(validate(tree))


def over(base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in tree.items():
        below = merged.get(key)
        both = isinstance(value, dict) and isinstance(below, dict)
        merged[key] = over(below, value) if both else value
    return merged


PROGRAMS = r"(?:penstock|python|sqlite3|make|uv|pip|cat|vllm|ray|git|curl|docker|\.ci/run)\b"
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*{PROGRAMS}")


def run_commands(block: Block) -> None:
    """Run each command of a block and compare what is shown below it in a console block."""
    command, shown = "", list[str]()
    for line in [*block.text.replace("\\\n", " ").splitlines(), "# end"]:
        is_command = line.startswith("$ ") or (
            block.language != "console" and COMMAND.match(line) is not None
        )
        if not is_command and line != "# end":
            shown.append(line)
            assert block.language != "sh", f"not a command: {line}"
            continue
        if command:
            run_command(command, shown if block.language == "console" else [])
        command, shown = line.removeprefix("$ "), []


def run_command(command: str, shown: list[str]) -> None:
    words = shlex.split(command.split(" | ")[0], comments=True)
    while re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    if words[0] == "cat":
        write(Path(words[1]), "\n".join(shown) + "\n")
        return
    check_words(words)
    if any(command_starts(words, skipped) for skipped in NOT_RUN):
        return
    if words[0] == "sqlite3":
        with closing(sqlite3.connect(words[1])) as database:
            database.execute(words[2]).fetchall()
        return
    assert words[0] == "penstock", f"{words[0]} is not run: give the reason in NOT_RUN"
    words = tiny(words[1:])
    if words[0] == "train" and not shown and not is_new(words):
        return
    printed = run_penstock(words)
    for line in shown:
        assert without_seconds(line) in without_seconds(printed), f"{line!r} is not in\n{printed}"


TRAINED: set[str] = set()  # the settings of every run that a page has asked for


def is_new(words: list[str]) -> bool:
    """Say whether no run had these settings: TINY makes one run of many ways to launch it."""
    target = next((word for word in words[1:] if word.endswith(".toml") and "=" not in word), None)
    settings = load_config(target, [word for word in words if "=" in word]).config
    asked = settings.model_dump_json()
    new = asked not in TRAINED
    TRAINED.add(asked)
    return new


def command_starts(words: list[str], start: str) -> bool:
    return words[: len(start.split())] == start.split()


def without_seconds(text: str) -> str:
    return re.sub(r"[\d.]+ s\b|(?<=idle )[\d.]+", "N", re.sub(r" +", " ", text)).strip()


def tiny(words: list[str]) -> list[str]:
    """Return the command with TINY laid over its settings."""
    command, *rest = words
    if command == "resume":
        return [*words, "train.steps=3"]
    if command == "simulate":
        return words if "--check" in words else [*words, "--steps", "2"]
    if command not in ("train", "eval", "generate", "check"):
        return words
    target = next((word for word in rest if "=" not in word and not word.startswith("-")), None)
    if target is not None and not target.endswith(".toml"):
        is_model = Path(target, "config.json").exists()
        return [*words, *(word for word in TINY if is_model and not word.startswith("model."))]
    config = load_config(target, [word for word in rest if "=" in word]).config  # as it is written
    steps = ["train.steps=1"] if config.train.episodes is None else []
    train = config.tasks.get("train")
    is_demo = train is not None and train.data == "addition"
    few = [f"tasks.train.data={SUMS}"] if is_demo else []  # not the demo's thousands
    return [*words, *TINY, *steps, *few]


def run_penstock(words: list[str]) -> str:
    """Run a command in this process; return what it printed. It must exit with 0."""
    printed, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(errors):
        patch.setattr("sys.argv", ["penstock", *words])
        with pytest.raises(SystemExit) as left:
            cli.main()
    shown = f"penstock {' '.join(words)}\n{printed.getvalue()}{errors.getvalue()}"
    assert not left.value.code, shown
    return printed.getvalue() + errors.getvalue()


# ------------------------------------------------------------------- options and keys of commands


@functools.cache
def penstock_commands() -> dict[str, set[str]]:
    return {words: options(command) for words, command in commands().items()}


@functools.cache
def help_of(script: str) -> str:
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr("sys.argv", [script, "--help"])
        patch.setattr("sys.path", [str(ROOT / "benchmarks"), *sys.path])
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / script), run_name="__main__")
    return printed.getvalue()


def check_words(words: list[str]) -> None:
    """Check that what a command names exists: the command, its options, its config keys."""
    program, *rest = words
    given = {word.split("=")[0] for word in rest if word.startswith("-")} - {"--help"}
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(rest) <= set(targets), f"no such target: {rest}"
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for extra in re.findall(r"penstock\[([\w-]+)\]", " ".join(rest)):
            assert extra in project["optional-dependencies"], extra
    elif program == "python" and not given:
        assert (ROOT / rest[0]).is_file(), rest[0]
    elif program == "python":
        unknown = given - set(re.findall(r"--[\w-]+", help_of(rest[0])))
        assert not unknown, f"{rest[0]} has no option {unknown}"
    elif program == "penstock":
        check_penstock_words(rest, given)


def check_penstock_words(words: list[str], given: set[str]) -> None:
    bare = [word for word in words if not word.startswith("-")]
    if not bare:
        return
    two = " ".join(bare[:2])
    command = two if bare[0] in ("sandbox", "agent") else bare[0]
    assert command in penstock_commands(), f"no command penstock {command}"
    unknown = given - penstock_commands()[command]
    assert not unknown, f"penstock {command} has no option {unknown}"
    if command not in ("score", "scale", "sandbox check", "sandbox serve"):
        check_settings(
            [word for word in bare if re.match(r"[\w.]+=", word) and word != "key=value"]
        )


def check_settings(settings: list[str]) -> None:
    """Check that the config takes these `key=value` together."""
    for setting in settings:
        check_key(setting.split("=")[0])
    load_config(None, [setting for setting in settings if not setting.endswith("=")])


# ------------------------------------------------------------------------- names in inline code


@every_page
def test_every_name_in_inline_code_exists(path: Path) -> None:
    faults, foreign = [], WORDS.get(path.stem, {}) if path.parent.name == "coming-from" else {}
    for code in read_page(path).inline:
        if code.text in foreign:
            continue  # a word of another system
        try:
            check_inline(code.text)
        except (AssertionError, UserError, ImportError, AttributeError, OSError) as error:
            faults.append(f"{path.name}:{code.line}: `{code.text}`: {str(error).splitlines()[0]}")
    assert not faults, "\n".join(faults)


SECTION = "|".join(Config.model_fields)
SETTING = re.compile(rf"((?:{SECTION})\.[\w.]+) ?= ?(\S.*)?")
KEY = re.compile(rf"\[?((?:{SECTION})(?:\.[\w*]+|\[\])+)\]?")
FILE = re.compile(r".*\.(?:py|md|toml|jsonl|json|db|html|png|pt)(?::\w+)?|.*/")


def check_inline(text: str) -> None:
    words = text.split()
    if re.fullmatch(rf"(?:\S*/)?{PROGRAMS}.*", text):
        check_words([words[0].split("/")[-1], *shlex.split(text)[1:]])
    elif words[0].startswith("--"):
        known = set().union(*penstock_commands().values())
        known |= {option for script in scripts() for option in script_options(script)}
        assert {word for word in words if word.startswith("--")} <= known, "no such option"
    elif all(SETTING.fullmatch(word) for word in words):
        check_settings(words)
    elif setting := SETTING.fullmatch(text):
        check_settings([f"{setting[1]}={setting[2]}"])
    elif (key := KEY.fullmatch(text)) and not FILE.fullmatch(text):
        check_key(key[1])
    elif re.fullmatch(r"penstock\.[\w.:]+", text):
        pkgutil.resolve_name(text)
    elif re.fullmatch(r"[\w/.]+/", text):
        places = (ROOT, ROOT / "src/penstock")
        assert text.startswith("RUN/") or any((place / text).is_dir() for place in places), text
    elif named := re.fullmatch(r"(tests/[\w/]+\.py)::(\w+)", text):
        assert f"def {named[2]}(" in (ROOT / named[1]).read_text(), "no such test"
    elif not FILE.fullmatch(text):
        check_identifiers(text)


def scripts() -> list[Path]:
    return [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("scripts/*.py")]


@functools.cache
def script_options(script: Path) -> set[str]:
    return set(re.findall(r'"(--[\w-]+)"', script.read_text()))


def check_key(key: str) -> None:
    """Check one dotted key of the config; `tasks.NAME` and `rewards[]` stand for any, `*` for all."""
    valid = set(valid_keys(Config))
    if key.endswith(".*"):
        assert any(name.startswith(key[:-1]) for name in valid), f"no key {key}"
        return
    parts = key.replace("[]", "[0]").split(".")
    named = 1 if parts[0] == "tasks" else 2
    if parts[:1] == ["tasks"] or parts[:2] == ["eval", "tasks"]:
        parts[named : named + 1] = ["NAME"] if len(parts) > named else []
        overlay = parts[named + 1 : named + 2]
        if overlay in (["columns"], ["data_options"]):  # tables of the user's names
            parts = parts[: named + 2]
        if overlay in (["sampling"], ["produce"]) and len(parts) > named + 2:
            parts = parts[named + 1 :]
    if parts[:2] == ["launch", "ray_options"]:
        parts[2:3] = ["NAME"] if len(parts) > 3 else []
    if parts[:2] == ["eval", "sampling"]:
        parts = parts[1:]
    if parts[:2] == ["track", "wandb"]:  # arguments of wandb.init
        parts = parts[:2]
    if "options" in parts[:-1]:
        at = parts.index("options")
        known = engine_options() if parts[0] == "engine" else reward_options(*REWARDS)
        assert parts[at + 1] in known, f"no option {parts[at + 1]}"
        parts = parts[: at + 1]
    assert ".".join(parts) in valid, f"no key {key}"


def engine_options() -> set[str]:
    return {
        *TransformersOptions.OPTION_NAMES,
        *VllmOptions.OPTION_NAMES,
        *OpenAIOptions.__dataclass_fields__,
    }


def reward_options(*names: str) -> set[str]:
    return {
        option
        for name in names
        for option in plugins.load("reward", name, REWARDS).Options.model_fields
    }


def check_identifiers(text: str) -> None:
    """Check that each CamelCase or snake_case word is one of the source's words."""
    for word in re.findall(r"[A-Za-z_]\w*", text):
        special = re.fullmatch(r"[A-Z][a-z]+\w*[A-Z]\w*|[A-Za-z]\w*_\w*[A-Za-z]\w*", word)
        assert not special or re.sub("_N$", "_", word) in source_words() | FOREIGN, (
            f"{word} is not in the source"
        )


@functools.cache
def source_words() -> set[str]:
    """Return every word of the package, its tests and benchmarks that is not in a comment."""
    found: set[str] = set()
    for folder in ("src", "tests", "benchmarks", "scripts"):
        for file in (ROOT / folder).rglob("*.py"):
            if file != Path(__file__):
                found |= words_of(file)
    return found


def words_of(file: Path) -> set[str]:
    return set(re.findall(r"\w+", re.sub(r"#.*", "", file.read_text("utf-8"))))


# ------------------------------------------------------------------------------ tables of options


def test_tables_of_keys_and_options_name_what_exists() -> None:
    leaves = {key.rsplit(".", 1)[-1] for key in valid_keys(Config)}
    checked = 0
    for path in PAGES:
        for table in read_page(path).tables:
            known = known_in(table, leaves)
            if known is not None:
                for row in table.rows:
                    for name in codes(row[0]):
                        last = name.removesuffix(".*").rsplit(".", 1)[-1]
                        assert last in known, f"{path.name}, {table.heading}: no {name}"
                        checked += 1
    assert checked > 50


def known_in(table: Table, leaves: set[str]) -> set[str] | None:
    """Return what the first column of this table may name; None: it names no settings."""
    first = table.header[0]
    if "sandbox" in first:
        return set(SandboxSettings.model_fields)
    if first == "option":
        rewards = [name for name in codes(table.heading) if name in REWARDS]
        assert rewards, f"{table.heading}: an option table stands below the reward's name"
        return reward_options(*rewards)
    return leaves if first == "key" else None


def test_every_option_of_a_reward_is_documented() -> None:
    text = "".join((ROOT / f"docs/{page}.md").read_text() for page in ("rewards", "model-rewards"))
    for name in reward_options(*REWARDS) | set(SandboxSettings.model_fields):
        assert re.search(rf"`{name}\b", text), name


def test_every_command_is_listed_in_the_page_of_commands() -> None:
    shown = "\n".join(block.text for block in read_page(ROOT / "docs" / "commands.md").blocks)
    for command in penstock_commands():
        assert f"penstock {command}" in shown, command
