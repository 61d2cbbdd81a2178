"""The Dockerfile by a parser of its instructions: no Docker is needed to find a wrong line."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KNOWN = {"FROM", "RUN", "CMD", "ENTRYPOINT", "COPY", "ENV", "WORKDIR", "USER", "ARG", "LABEL"}
Instructions = list[tuple[str, str]]


def stages() -> dict[str, Instructions]:
    """Return the instructions of each stage by its name, after those of the stage it builds on."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    found: dict[str, Instructions] = {}
    for line in filter(str.strip, lines):
        word, _, rest = line.partition(" ")
        assert word in KNOWN, f"no instruction: {line}"
        if word == "FROM":
            base, _, name = re.fullmatch(r"(\S+)( AS (\w+))", rest).groups()  # type: ignore[union-attr]
            current = found[name] = list(found.get(base, []))
        current.append((word, " ".join(rest.split())))
    return found


def values(stage: Instructions, word: str) -> list[str]:
    return [rest for name, rest in stage if name == word]


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_an_image_starts_penstock_as_a_user_without_rights(name: str) -> None:
    stage = stages()[name]
    assert values(stage, "USER")[-1] == "penstock"
    assert "useradd --create-home penstock" in " ".join(values(stage, "RUN"))
    assert json.loads(values(stage, "ENTRYPOINT")[-1]) == ["penstock"]
    assert isinstance(json.loads(values(stage, "CMD")[-1]), list)
    assert re.fullmatch(r"python:3\.1[123]-slim-\w+ AS base", values(stage, "FROM")[0])


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_every_command_line_is_whole_and_installs_by_hash(name: str) -> None:
    runs = [shlex.split(run) for run in values(stages()[name], "RUN")]
    installs = [words for words in runs if "scripts/locked_install.py" in words]
    assert len(installs) == 1
    assert all("--require-hashes" in words for words in runs if "pip" in words)
    extras = installs[0][installs[0].index("scripts/locked_install.py") + 1 :]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= project["optional-dependencies"].keys()


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"]
    copied = [path for rest in values(stages()["base"], "COPY") for path in rest.split()[:-1]]
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert any(fnmatch.fnmatch(path, pattern) for pattern in kept), path
