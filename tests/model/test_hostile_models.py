"""A model folder of somebody else executes nothing: no pickle of it is loaded, no code of it is imported."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import cli
from penstock.config import ModelConfig
from penstock.config.memory import count_parameters
from penstock.data import chat
from penstock.data.chat import load_tokenizer
from penstock.errors import UserError
from penstock.model import stored_weights
from penstock.model.loading import load_causal_lm

POLICY = Path(cli.__file__).parent / "config" / "demo" / "policy"


class _Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(POLICY, folder)
    return folder


def load(model: Path) -> None:
    device, dtype = torch.device("cpu"), torch.float32
    stored_weights.build(str(model), dtype=dtype, device=device, trust_remote_code=False)
    load_causal_lm(str(model), dtype=dtype, device=device, trust_remote_code=False)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin"])
def test_a_pickle_of_weights_executes_nothing(model: Path, tmp_path: Path, name: str) -> None:
    (model / "model.safetensors").unlink()
    torch.save({"weight": _Evil(tmp_path / "pwned")}, model / name)
    if "-of-" in name:
        index = {"metadata": {}, "weight_map": {"weight": name}}
        (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model\.path: got .* cannot be loaded"):
        load(model)
    assert not (tmp_path / "pwned").exists()


def test_code_of_a_model_is_not_imported_unless_the_config_says_so(
    model: Path, tmp_path: Path
) -> None:
    code = f"import os\nos.mkdir({str(tmp_path / 'pwned')!r})\nclass Model: pass\n"
    (model / "modeling_evil.py").write_text(code)
    for file, names in {
        "config.json": ["AutoConfig", "AutoModelForCausalLM"],
        "tokenizer_config.json": ["AutoTokenizer"],
    }.items():
        tree = json.loads((model / file).read_text())
        target: Any = "modeling_evil.Model"
        tree["auto_map"] = dict.fromkeys(names, target)
        tree["model_type"] = "evil"
        (model / file).write_text(json.dumps(tree))
    with pytest.raises(UserError):
        load(model)
    with contextlib.suppress(UserError):  # or a tokenizer without that code
        load_tokenizer(model)
    assert not (tmp_path / "pwned").exists()


Header = dict[str, Any]
EMBEDDINGS = "model.embed_tokens.weight"


def cut(header: Header, body: bytes) -> tuple[Header, bytes]:
    return header, body[:-100]


def made_larger(header: Header, body: bytes) -> tuple[Header, bytes]:
    header[EMBEDDINGS]["shape"][0] *= 2
    return header, body


def of_no_format(header: Header, body: bytes) -> tuple[Header, bytes]:
    header[EMBEDDINGS]["dtype"] = "F13"
    return header, body


def without_json(header: Header, body: bytes) -> tuple[bytes, bytes]:
    return b"{" * 50, body


def of_a_list(header: Header, body: bytes) -> tuple[bytes, bytes]:
    return b"[1, 2]", body


def nested(header: Header, body: bytes) -> tuple[bytes, bytes]:
    return b"[" * 200_000, body


def write_weights(file: Path, change: Callable[[Header, bytes], tuple[Any, bytes]]) -> None:
    old = file.read_bytes()
    end = 8 + int.from_bytes(old[:8], "little")
    header, body = change(json.loads(old[8:end]), old[end:])
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


@pytest.mark.parametrize(
    "change", [cut, made_larger, of_no_format, without_json, of_a_list, nested]
)
def test_a_wrong_file_of_weights_is_one_line_that_names_it(
    model: Path, change: Callable[[Header, bytes], tuple[Any, bytes]]
) -> None:
    file = model / "model.safetensors"
    write_weights(file, change)
    assert count_parameters(str(model)) >= 0, "what is asked before the model is loaded"
    with pytest.raises(UserError) as told:
        load(model)
    assert str(told.value).startswith(
        f"model.path: got {str(model)!r}, which cannot be loaded ({file}: "
    )
    assert len(str(told.value).splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"12345", b"\xff" * 9000])
def test_a_file_that_holds_no_weights_is_one_line_that_names_it(
    model: Path, content: bytes
) -> None:
    (model / "model.safetensors").write_bytes(content)
    assert count_parameters(str(model)) == 0
    with pytest.raises(UserError, match=r"model\.safetensors: Error while deserializing header"):
        load(model)


@pytest.mark.parametrize("index", ["{nope", "{}", "[1]"])
def test_a_wrong_index_of_weights_is_one_line(model: Path, index: str) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=r"model\.path: got .*, which cannot be loaded"):
        load(model)


def rewrite(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_weights_that_are_whole_numbers_are_refused(model: Path, dtype: torch.dtype) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name] = (tensors[name] * 100).to(dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"whose {re.escape(name)} has the format .* floating"):
        load(model)


def test_weights_that_contradict_the_config_are_named_with_both_shapes(model: Path) -> None:
    rewrite(model / "config.json", vocab_size=17)
    with pytest.raises(
        UserError, match=rf"whose {EMBEDDINGS} is \[106, 128\] in its files and \[17, 128\] by"
    ):
        load(model)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_attention_heads": 0},
        {"num_hidden_layers": "4"},
        {"vocab_size": -3},
        {"model_type": ["qwen3"]},
        {"rope_scaling": "x"},
        {"quantization_config": {"quant_method": "aqlm"}},  # a package that is not installed
    ],
    ids=str,
)
def test_a_config_that_no_model_has_is_one_line(model: Path, settings: dict[str, Any]) -> None:
    rewrite(model / "config.json", **settings)
    with pytest.raises(UserError, match=r"model\.path: got .*, which cannot be loaded") as told:
        load(model)
    assert len(str(told.value).splitlines()) == 1
    with contextlib.suppress(UserError):  # what does not concern a tokenizer may pass
        load_tokenizer(model)


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "end"}'])
def test_a_generation_config_that_cannot_be_read_is_named(model: Path, text: str) -> None:
    (model / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"generation_config\.json: cannot be read"):
        assert chat.ChatTemplate.from_config(ModelConfig(path=str(model))).end_tokens


ODD_TEMPLATES = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop over a long text": "{% set s = 'ab' * 999999 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
    "a huge power": "{{ (9 ** (9 ** 9)) % 7 }}",
    "a huge range": "{% for a in range(999999999) %}x{% endfor %}",
    "a macro of itself": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a loop for one role": "{{ messages[0].content }}{% if messages[-1].role == 'tool' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}",
}


@pytest.mark.parametrize("name", ODD_TEMPLATES)
def test_a_chat_template_that_does_not_end_is_one_line_that_names_it(
    model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "TEMPLATE_LIMIT_S", 0.2)
    (model / "chat_template.jinja").write_text(ODD_TEMPLATES[name])
    template = chat.ChatTemplate(load_tokenizer(str(model)))
    start = time.process_time()
    with pytest.raises(UserError) as told:
        template.encode([{"role": "user", "content": "1+1"}, {"role": "tool", "content": "2"}])
    assert time.process_time() - start < 5
    assert_names_template(told.value, model)


LARGE_TEMPLATES = {
    "a text that doubles": "{% set n = namespace(s='ab') %}{% for a in range(32) %}{% set n.s = n.s ~ n.s %}"
    "{% endfor %}{{ n.s | length }}",
    "a list that grows": "{% set n = namespace(s=[1]) %}{% for a in range(32) %}{% set n.s = n.s + n.s %}"
    "{% endfor %}",
    "a long text": "{{ 'x' * 50000000 }}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE_TEMPLATES)
def test_a_chat_template_that_takes_all_memory_is_one_line_that_names_it(
    model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "TEMPLATE_LIMIT_S", 4.0)
    monkeypatch.setattr(chat, "TEMPLATE_LIMIT_MIB", 128)
    (model / "chat_template.jinja").write_text(LARGE_TEMPLATES[name])
    template = chat.ChatTemplate(load_tokenizer(str(model)))
    with pytest.raises(UserError, match=r"MiB of memory|characters, allowed") as told:
        template.encode([{"role": "user", "content": "1+1"}])
    assert_names_template(told.value, model)


def test_a_long_conversation_is_no_fault_of_its_template(model: Path) -> None:
    template = chat.ChatTemplate(load_tokenizer(str(model)))
    assert len(template.render([{"role": "user", "content": "1+" * 600_000}])) >= 1_200_000


def assert_names_template(error: UserError, model: Path) -> None:
    assert str(error).startswith(f"chat template of {str(model)!r}: ")
    assert len(str(error).splitlines()) == 1
