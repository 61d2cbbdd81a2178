"""docs/engines.md and docs/vllm.md agree with the contract tests and the options."""

from __future__ import annotations

from pathlib import Path

from penstock.engine import ENGINES
from penstock.engine.openai.engine import OpenAIOptions
from penstock.engine.transformers.options import TransformersOptions
from penstock.engine.vllm.options import VllmOptions
from stages.engine_case import CAPABILITIES, LACKS

DOCS = Path(__file__).parents[2] / "docs"
DOC = (DOCS / "engines.md").read_text("utf-8")


def test_the_capability_table_is_true() -> None:
    rows = [line for line in DOC.splitlines() if line.startswith("|")]
    header = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert header[1:] == list(LACKS)
    assert {name.split(",")[0] for name in LACKS} == set(ENGINES)
    said = {}
    for line in rows[2 : 2 + len(CAPABILITIES)]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        said[cells[0]] = cells[1:]
    wanted = {
        words: ["no" if name in lacks else "yes" for lacks in LACKS.values()]
        for name, words in CAPABILITIES.items()
    }
    assert said == wanted


def test_every_option_is_documented() -> None:
    pages = DOC + (DOCS / "vllm.md").read_text("utf-8")
    for name in (
        *TransformersOptions.OPTION_NAMES,
        *VllmOptions.OPTION_NAMES,
        *OpenAIOptions.__dataclass_fields__,
    ):
        assert f"`{name}`" in pages, name
