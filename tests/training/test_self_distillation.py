"""The policy as its own teacher: the same response under a prompt that tells more, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config import Config
from penstock.data.chat import ChatTemplate
from penstock.data.dataset import load_dataset, with_hint
from penstock.errors import UserError
from penstock.run import preflight
from penstock.training.algo.method import check_algorithm
from penstock.training.consumer import Consumer
from penstock.training.scorers import with_hints
from penstock.types import Batch, Group, Prompt, Rollout, Score, VersionSegment
from stages.tiny_run import SMALL_POLICY, SUMS


def config_of(**fields: Any) -> Config:
    task = {"data": str(SUMS), "teacher_template": "{prompt} = {answer}"} | fields.pop("task", {})
    algorithm = {"name": "distill", "teacher": "self"} | fields.pop("algorithm", {})
    sections: dict[str, Any] = {
        "model": {"path": str(SMALL_POLICY), "dtype": "float32"},
        "tasks": {"train": task},
        "algorithm": algorithm,
        "teachers": {"self": {"path": "policy"}},
        "train": {"steps": 2},
    }
    return Config.model_validate(sections | fields)


def sampled(chat: ChatTemplate) -> Group:
    messages = ({"role": "user", "content": "12+34"},)
    prompt = Prompt("sums:1", messages, chat.encode(messages), gt_answer="46")
    response = chat.encode_text("46!").astype(np.int32)
    rollout = Rollout(
        rollout_id="train:0.0",
        prompt_ids=prompt.token_ids,
        seed=0,
        response_ids=response,
        logprobs=np.zeros(len(response), np.float32),
        loss_mask=np.ones(len(response), np.bool_),
        segments=(VersionSegment(0, len(response)),),
        score=Score(1.0),
    )
    return Group(group_id="train:0", task="train", cursor=0, prompt=prompt, rollouts=[rollout])


def logprobs(model: Any, prompt_ids: np.ndarray, response_ids: np.ndarray) -> torch.Tensor:
    ids_T = torch.from_numpy(np.concatenate([prompt_ids, response_ids])).long()
    with torch.no_grad():
        table_TV = model(ids_T[None]).logits[0].double().log_softmax(-1)
    return table_TV[len(prompt_ids) - 1 : -1].gather(-1, ids_T[len(prompt_ids) :, None])[:, 0]


def test_the_teacher_reads_the_hint_and_scores_the_same_response() -> None:
    from transformers import AutoModelForCausalLM

    config = config_of()
    chat = ChatTemplate.from_config(config.model)
    group, model = sampled(chat), AutoModelForCausalLM.from_pretrained(SMALL_POLICY)
    (hinted,) = with_hints([group], config, chat)
    (taught,), (rollout,) = hinted.rollouts, group.rollouts
    expected_ids = chat.encode([{"role": "user", "content": "12+34 = 46"}])
    np.testing.assert_array_equal(taught.prompt_ids, expected_ids)
    np.testing.assert_array_equal(taught.response_ids, rollout.response_ids)
    own_N = logprobs(model, rollout.prompt_ids, rollout.response_ids)
    teacher_N = logprobs(model, expected_ids, rollout.response_ids)
    rollout.logprobs[:] = own_N.numpy()  # on-policy: the ratio is 1
    consumer = Consumer.from_config(config, total_steps=2)
    metrics = consumer.train(Batch(step=1, groups=(group,))).metrics
    assert metrics["teacher/kl"] == pytest.approx((own_N - teacher_N).mean().item(), rel=1e-4)
    loss = ((own_N - teacher_N).square() / 2).mean().item()
    assert metrics["loss/teacher"] == pytest.approx(loss, rel=1e-4)
    assert metrics["grad_norm"] > 0


def records(folder: Path, *answers: str, role: str = "user") -> Config:
    """The config of a task with a question for each answer; prompts have at most 12 tokens."""
    path = folder / "data.jsonl"
    messages = [{"role": role, "content": "1+2"}]
    path.write_text(
        "".join(json.dumps({"messages": messages, "answer": answer}) + "\n" for answer in answers)
    )
    return config_of(task={"data": str(path), "max_prompt_tokens": 12})


def test_a_prompt_whose_hint_is_too_long_is_left_out_and_counted(tmp_path: Path) -> None:
    config = records(tmp_path, "3", "3" * 20)
    chat = ChatTemplate.from_config(config.model)
    dataset = load_dataset("train", config.tasks["train"], chat)
    assert [prompt.gt_answer for prompt in dataset] == ["3"]
    assert (dataset.num_skipped_long, dataset.longest) == (1, 28)
    assert dataset.longest_kept == len(chat.encode([{"role": "user", "content": "1+2 = 3"}]))


def test_a_template_names_fields_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": "1+2", "answer": "3", "hint": "count", "level": 1}]
    path.write_text(json.dumps(rows[0]) + "\n")
    config = config_of(
        task={"data": str(path), "teacher_template": "{prompt} {hint}{level} {}", "weight": 2.0}
    )
    preflight.check(config)
    chat = ChatTemplate.from_config(config.model)
    (prompt,) = load_dataset("train", config.tasks["train"], chat)
    assert with_hint(prompt, "{prompt} {hint}{level} {}")[0]["content"] == "1+2 count1 {}"
    path.write_text(json.dumps(rows[0] | {"hint": None}) + "\n")
    with pytest.raises(UserError, match="got no 'hint', which reward teacher_template reads"):
        preflight.check(config)


def test_the_note_of_the_reward_is_the_hint_of_its_response_alone(tmp_path: Path) -> None:
    """`{feedback}` needs no field of the data; a long note is cut, so that the prompt stays within its limit."""
    config = config_of(task={"teacher_template": "{prompt} {feedback}", "max_prompt_tokens": 12})
    preflight.check(config)
    chat = ChatTemplate.from_config(config.model)
    group = sampled(chat)
    notes = ["=46", "", "=4\ud8006", "=" * 50]
    group.rollouts = [replace(group.rollouts[0], score=Score(0.0, note=note)) for note in notes]
    (hinted,) = with_hints([group], config, chat)
    read = [chat.decode_prompt(rollout.prompt_ids) for rollout in hinted.rollouts]
    assert "12+34 =46" in read[0]
    assert "=" not in read[1]
    assert "12+34 =" in read[3]
    assert len(hinted.rollouts[3].prompt_ids) == 12
    for taught, rollout in zip(hinted.rollouts, group.rollouts, strict=True):
        np.testing.assert_array_equal(taught.response_ids, rollout.response_ids)


def test_a_prompt_without_a_user_has_no_place_for_a_hint(tmp_path: Path) -> None:
    config = records(tmp_path, "3", role="system")
    with pytest.raises(UserError, match=r"data.jsonl line 1: got no user message"):
        load_dataset("train", config.tasks["train"], ChatTemplate.from_config(config.model))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"task": {"teacher_template": ""}}, r"teacher_template: got '' with teacher the policy"),
        ({"task": {"teacher_template": "46"}}, r"allowed: a text with \{prompt\}"),
        (
            {"algorithm": {"name": "grpo", "teacher": None}, "teachers": {}},
            r"teacher_template: got .* with teacher none",
        ),
        (  # nor one that lacks the prompt
            {
                "task": {"teacher_template": "{answer}"},
                "algorithm": {"name": "grpo", "teacher": None},
                "teachers": {},
            },
            r"teacher_template: got '\{answer\}' with teacher none",
        ),
        ({"algorithm": {"divergence": "reverse"}}, r"divergence: got reverse with the policy"),
        ({"task": {"agent": "tools"}}, r"agent: got tools with the policy itself as teacher"),
    ],
)
def test_what_cannot_be_taught_so_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_algorithm(config_of(**fields))
