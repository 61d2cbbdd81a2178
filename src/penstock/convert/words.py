"""Reads the settings of a command line (a shell script) or of a YAML, JSON or Python file as words and values.

Words lose their leading dashes, and dashes inside them become underscores: `--top-p 0.9`, `top_p: 0.9`
and `top_p=0.9` are one word. Nothing is executed: a shell variable is replaced if the script assigns it
plainly, and a Python file is read from its syntax tree. In a config of XTuner a word is a class and its field,
such as SampleParams.max_tokens; words of the evaluation begin with `eval:`. A script with a GRPOTrainer of TRL
has the words of TRL's command line.
"""

from __future__ import annotations

import ast
import json
import operator
import os
import re
import shlex
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from penstock.config.changes import flat
from penstock.errors import UserError

_ASSIGNED = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_LONGEST = 10_000  # characters of a variable: a text that doubles itself must end
_OF_COMMAND = re.compile(r"^\s*(?:export\s+)?[A-Za-z_]\w*=[\"']?\$\(")  # NAME=$(...)
_VARIABLE = re.compile(
    r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?-([^${}]*))?\})"
)  # ${NAME:-DEFAULT}
_SUM = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")  # $((NAME * 2))


def read_words(path: Path, system: str) -> dict[str, Any]:
    """The words of a file and their values, in the file's order; a flag without a value is True."""
    try:
        with (
            tokenize.open(path) if path.suffix == ".py" else path.open(encoding="utf-8-sig") as file
        ):
            text = file.read()
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(
            f"convert: got {str(path)!r}, allowed: a text file that can be read ({reason})"
        ) from None
    if path.suffix == ".py":
        words = _of_python(text, path, system)
    elif path.suffix in (".yaml", ".yml", ".json"):
        import yaml  # type: ignore[import-untyped, unused-ignore]

        try:
            tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        except (ValueError, yaml.YAMLError) as error:
            line = " ".join(str(error).split())
            raise UserError(f"convert: {path} is no {path.suffix[1:]} file: {line}") from None
        if not isinstance(tree, dict):
            raise UserError(f"convert: got {path} without names, allowed: a table of settings")
        words = {_plain(word): value for word, value in flat(tree).items()}
    else:
        words = _of_command(text)
    if not words:
        raise UserError(
            f"convert: got {path} without a setting, allowed: a command with `--word value` or "
            "`word=value`, or a .yaml or .json file"
        )
    home = {"HOME": str(Path.home())}
    return {word: _filled(v, home) if type(v) is str else v for word, v in words.items()}


def _of_command(text: str) -> dict[str, Any]:
    variables = {"HOME": str(Path.home())}
    words: dict[str, Any] = {}
    unread = ""
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        unread += _SUM.sub(lambda match: _summed(match, variables), line) + "\n"
        if _OF_COMMAND.match(unread):
            unread = ""
            continue
        try:
            tokens = shlex.split(unread, comments=True)
        except ValueError:  # a text that goes on in the next line
            continue
        unread = ""
        if tokens and all(_ASSIGNED.match(token) for token in tokens if token != "export"):
            for token in tokens:
                if match := _ASSIGNED.match(token):
                    variables[match[1]] = _filled(match[2], variables)
            continue
        parts = list[str]()
        for token in tokens:  # one that is a variable alone may stand for several
            filled = _filled(token, variables)
            is_several = filled != token and _VARIABLE.fullmatch(token)
            parts += filled.split() if is_several else [filled]
        words |= _of_tokens(parts)
    if unread:
        first = unread.strip().splitlines()[0]
        raise UserError(f"convert: cannot read the line {first[:80]!r}: No closing quotation")
    return words


def _filled(text: str, variables: dict[str, str]) -> str:
    """The text with the values of its variables, and the defaults of those that are not known."""

    def value(match: re.Match[str]) -> str:
        default = match[0] if match[3] is None else match[3]
        known = variables.get(match[1] or match[2], default)
        return known if len(known) < _LONGEST else match[0]

    for _ in range(3):  # a default may have variables with defaults
        text = _VARIABLE.sub(value, text)
    return text


def _summed(match: re.Match[str], variables: dict[str, str]) -> str:
    """The whole number that the shell computes; the text itself if a name in it has no number."""
    numbers = {name: int(text) for name, text in variables.items() if text.isdecimal()}
    try:
        tree = ast.parse(_filled(match[1], variables).strip(), mode="eval")
    except SyntaxError:
        return match[0].replace(" ", "")
    value = _value(tree.body, numbers)
    return str(int(value)) if isinstance(value, int | float) else match[0].replace(" ", "")


def _of_tokens(tokens: list[str]) -> dict[str, Any]:
    """The words behind the program; of those of its launcher only the number of processes."""
    begin = _program(tokens)
    launcher, words = _settings(tokens[:begin]), _settings(tokens[begin:])
    if words and begin and "zero_bubble" in tokens[begin - 1]:  # ColossalAI's other example
        words = {"zero_bubble": True, **words}
    count = launcher.get("num_processes", launcher.get("nproc_per_node"))
    if count is not None and words:
        words = {"num_processes": str(count).split()[0], **words}
    return words


def _program(tokens: list[str]) -> int:
    """The index behind the program's name; the end of the tokens if they run none of ours."""
    for index, token in enumerate(tokens):
        before = tokens[index - 1] if index else ""
        if token.endswith(".py") or before == "-m" or (token == "grpo" and before.endswith("trl")):
            return index + 1
    is_setting = bool(tokens) and ("=" in tokens[0] or tokens[0].startswith("-"))
    return 0 if is_setting else len(tokens)


def _settings(tokens: list[str]) -> dict[str, Any]:
    words: dict[str, Any] = {}
    flag = ""
    for token in tokens:
        name, equals, value = token.partition("=")
        is_flag = re.match(r"--?[A-Za-z]", token) is not None
        is_dotted = equals and re.match(r"^[+~]{0,2}[A-Za-z_]\w*(\.\w+)+$", name) is not None
        if token.startswith("$") or "[@]" in token:  # what the script was given, or computes
            if flag and "@" not in token:
                words[flag], flag = Unread(token), ""
        elif (is_flag and equals) or is_dotted or (equals and not flag):
            words[_plain(name)], flag = Unread(value) if "$" in value else value, ""
        elif is_flag:
            flag = _plain(token)
            words[flag] = True
        elif flag:
            earlier = words[flag]
            words[flag] = token if earlier is True else f"{earlier} {token}"  # several values
    return words


def _plain(word: str) -> str:
    return word.lstrip("-+~").replace("-", "_")


# ---- the Python configs of XTuner

OF_EVALUATION = "eval:"  # begins the words of the evaluation
_TASKS = "AgentLoopManagerConfig.tasks"
_TRAINERS = ("RLColocateTrainerConfig", "RLDisaggregatedTrainerConfig")
# Several of these may be there: words name the field that holds them.
_INSIDE = ("CPUResourcesConfig", "AcceleratorResourcesConfig", "RolloutImportanceSampling")
_FAMILIES = ("JudgerConfig", "AgentLoopConfig", "TaskSpecConfig", "AgentLoopManagerConfig")
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_KINDS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "Path": str}


@dataclass(slots=True, frozen=True)
class Unread:
    """An expression whose value only its code could tell."""

    source: str

    def __str__(self) -> str:
        return self.source

    __repr__ = __str__


class FromEnvironment(str):
    """The text of an environment variable; `source` is shown in its place where no setting takes it."""

    source: str = ""


@dataclass(slots=True)
class Part:
    """A call of a config class with named fields."""

    name: str
    fields: dict[str, Any]


def _of_python(text: str, path: Path, system: str) -> dict[str, Any]:
    """The words of a script that calls TRL, or of XTuner's `trainer = RLColocateTrainerConfig(...)`."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"convert: {path} is no Python file: {error}") from None
    if words := _of_trl(tree, path):
        return words
    if system == "trl":
        raise UserError(
            f"convert: got {path} without a call of GRPOTrainer or GRPOConfig, allowed: one"
        )
    names: dict[str, Any] = {}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[target]) if _assign(target, statement.value, names):
                pass
            case _:
                _forget(statement, names)
    trainer = names.get("trainer")
    if not isinstance(trainer, Part) or trainer.name not in _TRAINERS:
        allowed = f"trainer = {' or '.join(f'{name}(...)' for name in _TRAINERS)}"
        parts = ", ".join(value.name for value in names.values() if isinstance(value, Part))
        if parts:
            allowed += f" that holds {parts}; add it at the end of the file"
        raise UserError(f"convert: got {path} without a trainer, allowed: {allowed}")
    return {"Trainer": trainer.name, **dict(_words_of(trainer, "", ""))}


# ---- scripts that call TRL


def _of_trl(tree: ast.Module, path: Path) -> dict[str, Any]:
    """The words of TRL's command line for GRPOTrainer(model, reward_funcs, args=GRPOConfig(...), ...).

    Without a trainer: those of the last GRPOConfig. Empty: the script has neither.
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    trainers = {"GRPOTrainer"} | {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith("GRPOTrainer") for base in node.bases)
    }
    made = [call for call in calls if _class_of(call) in trainers]
    configs = [call for call in calls if _class_of(call) == "GRPOConfig"]
    if not made and not configs:
        return {}
    names = _names_of(tree, path)
    if made:
        given = dict(zip(("model", "reward_funcs", "args"), made[-1].args, strict=False))
        given |= {word.arg: word.value for word in made[-1].keywords if word.arg}
        fields = {name: _value(node, names) for name, node in given.items()}
    else:
        named = [p for p in names.values() if isinstance(p, Part) and p.name == "GRPOConfig"]
        fields = {"args": named[-1] if named else _value(configs[-1], names)}
    words = {_TRL_FIELDS.get(name, name): value for name, value in fields.items()}
    for name in ("args", "peft_config", "train_dataset"):
        part = words.pop(name, None)
        if isinstance(part, Part):
            part = _with_file(part)
            words |= {_TRL_PARTS[name].get(field, field): v for field, v in part.fields.items()}
        elif part is not None:
            words[name] = part
    return {**words, "script": str(path)}


def _with_file(dataset: Part) -> Part:
    """load_dataset("json", data_files=FILE) as a dataset of that file, which has no splits."""
    fields = dataset.fields
    if fields.get("path") not in _FILE_FORMATS or not isinstance(fields.get("data_files"), str):
        return dataset
    kept = {name: value for name, value in fields.items() if name not in ("data_files", "split")}
    return Part(dataset.name, {**kept, "path": fields["data_files"]})


def _class_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _names_of(tree: ast.Module, path: Path) -> dict[str, Any]:
    """The names of a script, also those in its functions; one that a branch may change is unread."""
    names: dict[str, Any] = {}

    def read(statements: list[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    names[name] = f"{path}:{name}"
                    read(statement.body)
                case ast.ImportFrom(module=str(module)):
                    names.update(
                        {a.asname or a.name: f"{module}:{a.name}" for a in statement.names}
                    )
                case ast.Assign(targets=[target]) | ast.AnnAssign(target=target) if (
                    statement.value is not None and _assign(target, statement.value, names)
                ):
                    pass
                case ast.With() | ast.AsyncWith() | ast.ClassDef() | ast.Try():
                    read(statement.body)
                case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                    read(statement.body)
                case ast.If() | ast.For() | ast.While():
                    read([*statement.body, *statement.orelse])  # functions of a branch
                    _forget(statement, names)
                case _:
                    _forget(statement, names)

    read(tree.body)
    return names


def _assign(target: ast.expr, value: ast.expr, names: dict[str, Any]) -> bool:
    """Give a name, or a field of a config class, its value; False for any other target."""
    match target:
        case ast.Name(id=name):
            names[name] = _value(value, names)
            return True
        case ast.Attribute(value=ast.Name(id=name), attr=field) if isinstance(
            part := names.get(name), Part
        ):
            names[name] = Part(part.name, {**part.fields, field: _value(value, names)})
            return True
    return False


_FILE_FORMATS = ("json", "csv", "parquet")
_TRL_FIELDS = {"model": "model_name_or_path"}
_TRL_PARTS = {  # parameter of GRPOTrainer: names of its fields on the command line
    "args": dict[str, str](),
    "peft_config": {"r": "lora_r", "target_modules": "lora_target_modules"},
    "train_dataset": {
        "path": "dataset_name",
        "name": "dataset_config",
        "split": "dataset_train_split",
        "changes": "train_dataset",
    },
}


def _forget(statement: ast.stmt, names: dict[str, Any]) -> None:
    """Mark every name that a statement may change, or a part of which it may change, as unread."""
    unread = Unread(ast.unparse(statement).splitlines()[0])
    for node in ast.walk(statement):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            is_changed = not isinstance(node.ctx, ast.Load)
            target: ast.expr = node
            field = ""
            while isinstance(target, ast.Attribute | ast.Subscript):
                field = target.attr if isinstance(target, ast.Attribute) else ""
                target = target.value
            if is_changed and isinstance(target, ast.Name):
                part = names.get(target.id)
                if isinstance(part, Part) and field:
                    names[target.id] = Part(part.name, {**part.fields, field: unread})
                else:
                    names[target.id] = unread


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """The value of a literal, a name, arithmetic with numbers, a variable or a config class."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return names.get(node.id, Unread(node.id))
        case ast.List() | ast.Tuple():
            return [_value(element, names) for element in node.elts]
        case ast.Dict() if all(isinstance(key, ast.Constant) for key in node.keys):
            keys = [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]
            return dict(zip(keys, (_value(value, names) for value in node.values), strict=True))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _computed(ast.BinOp(ast.Constant(0), ast.Sub(), operand), names)
        case ast.BinOp():
            return _computed(node, names)
        case ast.Compare(ops=[ast.Eq()], comparators=[other]):
            sides = _value(node.left, names), _value(other, names)
            is_known = not any(isinstance(side, Unread) for side in sides)
            return sides[0] == sides[1] if is_known else Unread(ast.unparse(node))
        case ast.Subscript() if ast.unparse(node.value) == "os.environ":
            return _variable(node, _value(node.slice, names), None)
        case ast.Call():
            return _called(node, names)
        case ast.Subscript(slice=ast.Constant(value=str(split))) if _is_dataset(
            dataset := _value(node.value, names)
        ):
            return Part("load_dataset", {**dataset.fields, "split": split})
    return Unread(ast.unparse(node))


def _is_dataset(value: Any) -> TypeGuard[Part]:
    return isinstance(value, Part) and value.name == "load_dataset"


def _computed(node: ast.BinOp, names: dict[str, Any]) -> Any:
    """A sum, difference, product or quotient of numbers: it cannot grow without bound."""
    sides = [_value(side, names) for side in (node.left, node.right)]
    if type(node.op) in _OPERATORS and all(type(side) in (int, float) for side in sides):
        try:
            return _OPERATORS[type(node.op)](*sides)
        except ArithmeticError:
            pass
    return Unread(ast.unparse(node))


def _called(node: ast.Call, names: dict[str, Any]) -> Any:
    function = ast.unparse(node.func)
    arguments = [_value(argument, names) for argument in node.args]
    fields: dict[str, Any] = {}  # also of a `**dict`; one that cannot be read is a field `**NAME`
    for word in node.keywords:
        value = _value(word.value, names)
        if word.arg:
            fields[word.arg] = value
        elif isinstance(value, dict):
            fields |= value
        else:
            fields[f"**{ast.unparse(word.value)}"] = Unread(ast.unparse(word.value))
    name = function.rpartition(".")[2]
    if name == "load_dataset":
        return Part(name, {**dict(zip(("path", "name"), arguments, strict=False)), **fields})
    if name == "from_pretrained" and arguments:
        return arguments[0]
    if isinstance(node.func, ast.Attribute) and _is_dataset(
        dataset := _value(node.func.value, names)
    ):
        return Part("load_dataset", {**dataset.fields, "changes": Unread(ast.unparse(node))})
    is_config = name.endswith("Config") or name == "SampleParams" or name in _INSIDE
    if function in ("os.environ.get", "os.getenv") and arguments:
        return _variable(node, arguments[0], (*arguments, fields.get("default"))[1])
    if function in _KINDS and len(arguments) == 1 and isinstance(arguments[0], str | int | float):
        try:
            return _KINDS[function](arguments[0])
        except ValueError:
            return Unread(ast.unparse(node))
    if name == "GRPOConfig" and len(arguments) == 1:
        fields, arguments = {"output_dir": arguments[0], **fields}, []
    is_whole = all(
        word.arg or f"**{ast.unparse(word.value)}" not in fields for word in node.keywords
    )
    if arguments or not (is_config or function == "dict") or not (is_whole or name == "GRPOConfig"):
        return Unread(ast.unparse(node))
    return Part(name, fields) if is_config else fields


def _variable(node: ast.expr, name: Any, default: Any) -> Any:
    source = ast.unparse(node)
    if isinstance(name, str) and name in os.environ:
        text = FromEnvironment(os.environ[name])
        text.source = source
        return text
    return Unread(source) if default is None else default


def _words_of(part: Part, prefix: str, within: str) -> Iterator[tuple[str, Any]]:
    """Yield (word, value) for every field of a part and of the parts in it."""
    name = "Trainer" if part.name in _TRAINERS else part.name.removeprefix("Disagg")
    name = next((family for family in _FAMILIES if name.endswith(family)), name)
    for field, value in part.fields.items():
        inner = OF_EVALUATION if field == "eval_agent_loop_manager_cfg" else prefix
        yield from _word(f"{within or f'{prefix}{name}.'}{field}", value, inner)


def _word(word: str, value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Part):
        yield word, value.name
        yield from _words_of(value, prefix, f"{word}." if value.name in _INSIDE else "")
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _word(f"{word}.{name}", inner, prefix)
    elif isinstance(value, list) and any(isinstance(element, Part | dict) for element in value):
        for number, element in enumerate(value):
            # further tasks are tasks too (2:); of other lists the first is converted, the rest is left (#2:)
            mark = "" if word.endswith(_TASKS) else "#"
            yield from _word(word, element, f"{prefix}{mark}{number + 1}:" if number else prefix)
    else:
        yield word, value
