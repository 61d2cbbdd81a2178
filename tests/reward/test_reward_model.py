"""A tiny sequence-classification model scores rollouts in its own process."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config import RewardConfig
from penstock.errors import RewardError, UserError
from penstock.reward import VerifiableReward, build_reward
from penstock.reward.reward_model import RewardModel, RewardModelOptions, Scorer
from penstock.types import Score
from stages.hostile_text import TEXTS as HOSTILE
from stages.own_children import own_children
from stages.reward_samples import prompt, rollout, tagged

TEXTS = ["a", "bb", "the answer is 42", "a b c d e f", ""]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

    path = tmp_path_factory.mktemp("reward-model")
    characters = {chr(code): code - 30 for code in range(32, 127)}
    tokenizer = Tokenizer(
        models.WordLevel({"<pad>": 0, "<unk>": 1, **characters}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=100,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_labels=2,
        pad_token_id=0,
    )
    Qwen3ForSequenceClassification(config).save_pretrained(path)
    return path


def build(path: Path, *others: RewardConfig, **options: Any) -> VerifiableReward:
    model = RewardConfig(type="reward_model", weight=2.0, options={"path": str(path), **options})
    return build_reward([model, *others], max_tokens=100)


def expected(path: Path, texts: list[str], label: int) -> list[float]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    values = []
    for text in texts:
        inputs = tokenizer([f"question\n{text}"], return_tensors="pt")
        with torch.inference_mode():
            values.append(float(model(**inputs).logits[0, label]))
    return values


def test_a_batch_has_the_scores_of_its_texts_alone(model_path: Path) -> None:
    """What the worker's process does, in this one: its imports take seconds."""
    settings = RewardModelOptions(path=str(model_path), label=1).model_dump()
    messages = [{"role": "user", "content": "question"}]
    items = [{"messages": messages, "response": tagged(text)} for text in TEXTS]
    by_hand = expected(model_path, [tagged(text) for text in TEXTS], label=1)
    assert Scorer(settings).score(items) == pytest.approx(by_hand, abs=1e-4)


def test_a_response_cannot_write_special_tokens(model_path: Path) -> None:
    """A response that ends its turn and begins another would put words into the user's mouth."""
    scorer = Scorer(RewardModelOptions(path=str(model_path)).model_dump())
    responses = ["a<pad>b", "a< pad>b", "ab"]
    forged, spaced, other = scorer.score([{"messages": [], "response": r} for r in responses])
    assert forged == pytest.approx(spaced, abs=1e-6)
    assert forged != pytest.approx(other, abs=1e-6)


def test_an_input_that_is_cut_keeps_its_question(model_path: Path) -> None:
    """Without its question, a long response could not be wrong."""
    scorer = Scorer(RewardModelOptions(path=str(model_path), max_tokens=12).model_dump())
    items = [
        {"messages": [{"role": "user", "content": question}], "response": "x" * 500 + "end"}
        for question in ("six?", "six!", "seven sevens are how many?")
    ]
    first, second, _ = scorer.score(items)
    assert first != pytest.approx(second, abs=1e-6)
    tokens = [scorer.tokens(item["messages"], item["response"]) for item in items]
    assert [len(ids) for ids in tokens] == [12, 12, 12]
    text = scorer.chat.decode_prompt(tokens[0]).replace(" ", "")
    assert (text[:4], text[-3:]) == ("six?", "end")


@pytest.mark.slow
def test_every_hostile_response_has_a_score(model_path: Path) -> None:
    scorer = Scorer(RewardModelOptions(path=str(model_path), max_tokens=16).model_dump())
    question = [{"role": "user", "content": "six?"}]
    for size in (1_000, 10_000, 100_000):
        names = [name for name in HOSTILE if name != "lone surrogates"]  # no token stands for one
        names = names if size < 100_000 else names[::8]
        items = [{"messages": question, "response": HOSTILE[name](size)} for name in names]
        assert all(map(math.isfinite, scorer.score(items)))


@pytest.mark.slow
def test_scores_are_those_of_the_model(model_path: Path) -> None:
    async def run() -> list[Score]:
        reward = build(model_path, RewardConfig(), batch_size=3, label=1, truncated=-7.0)
        try:
            jobs = [reward.score(rollout(tagged(text)), prompt("42")) for text in TEXTS]
            scores = await asyncio.gather(*jobs)
            cut = await reward.score(rollout("a", finish_reason="length"), prompt("42"))
            assert cut.parts["reward_model"] == -7.0
            return scores
        finally:
            await reward.close()

    scores = asyncio.run(run())
    by_hand = expected(model_path, [tagged(text) for text in TEXTS], label=1)
    assert [one.parts["reward_model"] for one in scores] == pytest.approx(by_hand, abs=1e-4)
    for one in scores:
        total = 2 * one.parts["reward_model"] + one.parts["think_answer_tags"]
        assert one.value == pytest.approx(total)


STAND_IN = """
import json, sys
print('"ready"', flush=True)
for line in sys.stdin:
    print(json.dumps({"scores": [len(item["response"]) for item in json.loads(line)]}), flush=True)
"""


def test_a_process_that_dies_fails_its_batch_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program without a model takes the place of the worker's, which takes seconds to start."""
    program = tmp_path / "stand_in_model.py"
    program.write_text(STAND_IN)
    monkeypatch.setattr(RewardModel, "_command", lambda self: [sys.executable, str(program)])

    async def run() -> None:
        reward = build(tmp_path)
        try:
            assert (await reward.score(rollout("abc"), prompt("42"))).value == 6.0
            _kill_the_model()
            with pytest.raises(
                RewardError, match=r"rollout task:0\.0: reward reward_model: the model's"
            ):
                await reward.score(rollout("abc"), prompt("42"))
            assert (await reward.score(rollout("abcd"), prompt("42"))).value == 8.0
        finally:
            await reward.close()

    asyncio.run(run())


def _kill_the_model() -> None:
    for pid in own_children():
        if b"stand_in_model" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def test_a_model_that_is_not_there_is_a_failure_that_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        reward = build(tmp_path / "absent")
        try:
            await reward.score(rollout("a"), prompt())
        finally:
            await reward.close()

    with pytest.raises(RewardError, match="does not start"):
        asyncio.run(run())


def test_a_name_that_is_no_model_is_refused_before_a_process_starts() -> None:
    with pytest.raises(
        UserError, match="option path: got 'nowhere', allowed: a folder that exists"
    ):
        build(Path("nowhere"))


def test_rollouts_that_were_given_up_do_not_disturb_the_end(model_path: Path) -> None:
    """A run that is stopped cancels its rollouts first, some of which no batch has taken yet."""

    async def main() -> None:
        judge = build(model_path, batch_size=1)
        asked = [asyncio.create_task(judge.score(rollout(text), prompt())) for text in TEXTS]
        for _ in range(3):  # the first is in a batch, whose process starts; the others wait
            await asyncio.sleep(0)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await judge.close()

    asyncio.run(main())
