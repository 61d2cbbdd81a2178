"""Distillation: divergences on hand-worked numbers, against TRL, and through a whole update."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config import Config
from penstock.errors import UserError
from penstock.run import preflight
from penstock.training import vocabulary
from penstock.training.algo.doubts import algorithm_doubts
from penstock.training.algo.method import check_algorithm
from penstock.training.logprobs import LogitRule
from penstock.training.vocabulary import HeadInputs
from penstock.types import Batch
from stages.tiny_run import SMALL_POLICY, SUMS
from stages.training_data import (
    VOCABULARY,
    config_of,
    consumer_of,
    exact_model,
    gradient_of,
    random_batch,
    relative_gap,
    tiny_model,
)

KINDS = ("forward", "reverse", "jsd")


def taught(**algorithm: Any) -> Config:
    return config_of(
        algorithm={"name": "distill", "teacher": "big"} | algorithm,
        teachers={"big": {"path": "demo"}},
    )


def test_divergences_on_hand_worked_numbers() -> None:
    """The policy says (1/2, 1/2), the teacher (1/4, 3/4)."""
    policy, teacher = (torch.tensor([row]).log() for row in ([0.5, 0.5], [0.25, 0.75]))
    log = math.log
    forward = 0.25 * log(0.25 / 0.5) + 0.75 * log(0.75 / 0.5)
    reverse = 0.5 * log(0.5 / 0.25) + 0.5 * log(0.5 / 0.75)
    middle = (0.375, 0.625)
    jsd = 0.5 * sum(p * log(p / m) for p, m in zip((0.5, 0.5), middle, strict=True)) + 0.5 * sum(
        p * log(p / m) for p, m in zip((0.25, 0.75), middle, strict=True)
    )
    for kind, wanted in (("forward", forward), ("reverse", reverse), ("jsd", jsd)):
        assert vocabulary.term(kind, policy, teacher).item() == pytest.approx(wanted, rel=1e-5)
    assert vocabulary.term("entropy", policy, None).item() == pytest.approx(log(2))


@pytest.mark.parametrize("divergence", ["sampled", "reverse"])
def test_min_tokens_ban_the_policy_s_end_tokens_for_a_teacher_that_ends_with_others(
    divergence: str,
) -> None:
    """A teacher whose own end token the policy has sampled scores it; it did not ban it."""
    batch, config = random_batch(min_tokens=3), taught(divergence=divergence)
    for rollout in batch.rollouts:
        rollout.response_ids[0] = 5
    same, other = (
        gradient_of(
            config,
            batch,
            model=exact_model(eos_token_id=2),
            teachers={"big": exact_model(seed=5, eos_token_id=end)},
        )
        for end in (2, 5)
    )
    assert relative_gap(other, same) < 1e-12


def heads(generator: torch.Generator) -> tuple[HeadInputs, HeadInputs]:
    """A policy and a wider teacher over the same vocabulary."""

    def head(width: int) -> HeadInputs:
        shape = {"generator": generator, "dtype": torch.float64}
        return HeadInputs(
            hidden_ND=torch.randn(7, width, **shape),
            weight_VD=torch.randn(VOCABULARY, width, **shape),
            bias_V=None,
            rule=LogitRule(),
        )

    return head(8), head(12)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_neither_value_nor_gradient(kind: str, monkeypatch: Any) -> None:
    policy, teacher = heads(torch.Generator().manual_seed(0))
    policy.hidden_ND.requires_grad_()
    policy.weight_VD.requires_grad_()
    temperatures_N = torch.linspace(0.5, 2.0, 7, dtype=torch.float64)
    found = []
    for elements in (1 << 22, 2 * VOCABULARY):
        monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS_CPU", elements)
        value_N = vocabulary.terms_of(policy, teacher, kind, temperatures_N, None)
        grads = torch.autograd.grad(value_N.sum(), (policy.hidden_ND, policy.weight_VD))
        found.append((value_N.detach(), *grads))
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=1e-12, atol=1e-12)
    assert (found[0][0] >= 0).all()


@pytest.mark.parametrize(("kind", "beta"), [("forward", 0.0), ("reverse", 1.0), ("jsd", 0.5)])
def test_loss_and_gradient_are_those_of_trl(kind: str, beta: float) -> None:
    trl = pytest.importorskip("trl.trainer.distillation_trainer", reason="TRL is not installed")
    policy, teacher = heads(torch.Generator().manual_seed(1))
    parameters = (policy.hidden_ND.requires_grad_(), policy.weight_VD.requires_grad_())
    ones_N = torch.full((7,), 1.3, dtype=torch.float64)
    ours = vocabulary.terms_of(policy, teacher, kind, ones_N, None).mean()
    theirs, *_ = trl._chunked_divergence_loss(
        policy.hidden_ND[None],
        teacher.hidden_ND[None],
        policy.weight_VD,
        teacher.weight_VD,
        torch.ones(1, 7),
        beta,
        temperature=1.3,
    )
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    for own, other in zip(
        torch.autograd.grad(ours, parameters), torch.autograd.grad(theirs, parameters), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-7)


def logits(model: Any, batch: Batch) -> torch.Tensor:
    """The log-probs of the whole vocabulary at every trained token, at temperature 1."""
    rows = []
    for rollout in batch.rollouts:
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids])).long()
        rows.append(model(ids[None]).logits[0, len(rollout.prompt_ids) - 1 : -1].log_softmax(-1))
    return torch.cat(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_an_update_is_that_of_the_mean_divergence(kind: str) -> None:
    batch, model, teacher = random_batch(), exact_model(), exact_model(seed=5)
    with torch.no_grad():
        teacher_NV = logits(teacher, batch)
    vocabulary.term(kind, logits(model, batch), teacher_NV).mean().backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    config, parts = taught(divergence=kind), {"teachers": {"big": exact_model(seed=5)}}
    assert relative_gap(gradient_of(config, batch, model=exact_model(), **parts), wanted) < 1e-10
    metrics = (
        consumer_of(config, model=exact_model(), teachers={"big": exact_model(seed=5)})
        .train(batch)
        .metrics
    )
    mean = vocabulary.term(kind, logits(exact_model(), batch), teacher_NV).mean().item()
    assert metrics["teacher/kl"] == pytest.approx(mean, rel=1e-9)
    assert metrics["loss/teacher"] == pytest.approx(mean, rel=1e-9)


def test_on_its_own_samples_the_sampled_gradient_is_that_of_the_reverse_kl() -> None:
    """The expectation over one token, computed exactly: every token of the vocabulary, times its probability."""
    generator = torch.Generator().manual_seed(2)
    scores_V, teacher_V = (
        torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    scores_V.requires_grad_()
    log_V, teacher_V = scores_V.log_softmax(-1), teacher_V.log_softmax(-1)
    (wanted,) = torch.autograd.grad(
        vocabulary.term("reverse", log_V[None], teacher_V[None]).sum(), scores_V, retain_graph=True
    )
    sampled_V = (log_V - teacher_V).square() / 2  # k2, as the loss has it
    (got,) = torch.autograd.grad((log_V.exp().detach() * sampled_V).sum(), scores_V)
    torch.testing.assert_close(got, wanted)


def test_the_sampled_term_of_an_update() -> None:
    batch, teacher = random_batch(), exact_model(seed=5)
    for rollout in batch.rollouts:
        alone = dataclasses.replace(batch.groups[0], rollouts=[rollout])
        own_NV = logits(exact_model(), Batch(step=1, groups=(alone,))).detach()
        ids_N1 = torch.from_numpy(rollout.response_ids).long()[:, None]
        rollout.logprobs = own_NV.gather(-1, ids_N1)[:, 0].numpy()  # on-policy: the ratio is 1
    model = exact_model()
    ids_N = torch.from_numpy(np.concatenate([r.response_ids for r in batch.rollouts])).long()
    own_N, teacher_N = (logits(m, batch).gather(-1, ids_N[:, None])[:, 0] for m in (model, teacher))
    ((own_N - teacher_N.detach()).square() / 2).mean().backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    parts = {"teachers": {"big": exact_model(seed=5)}}
    got = gradient_of(taught(), batch, model=exact_model(), **parts)
    assert relative_gap(got, wanted) < 1e-6


def test_a_teacher_beside_rewards_adds_its_gradient() -> None:
    batch = random_batch()
    both = config_of(
        algorithm={"teacher": "big", "teacher_beta": 0.3, "divergence": "reverse"},
        teachers={"big": {"path": "demo"}},
    )

    def gradient(config: Config, **parts: Any) -> dict[str, torch.Tensor]:
        return gradient_of(config, batch, model=exact_model(), **parts)

    teachers = {"teachers": {"big": exact_model(seed=5)}}
    rewards, distilled = gradient(config_of()), gradient(taught(divergence="reverse"), **teachers)
    wanted = {name: rewards[name] + 0.3 * distilled[name] for name in rewards}
    assert relative_gap(gradient(both, **teachers), wanted) < 1e-10


def test_the_entropy_bonus_has_the_gradient_of_the_entropy() -> None:
    batch, model = random_batch(), exact_model()
    vocabulary.term("entropy", logits(model, batch), None).mean().backward()
    plain = gradient_of(config_of(), batch, model=exact_model())
    wanted = {name: plain[name] - 0.2 * p.grad for name, p in model.named_parameters()}
    config = config_of(algorithm={"entropy_beta": 0.2})
    assert relative_gap(gradient_of(config, batch, model=exact_model()), wanted) < 1e-10


@pytest.mark.parametrize(
    ("algorithm", "teachers", "said"),
    [
        ({"name": "distill"}, {}, r"algorithm\.teacher: got '', allowed: none is defined"),
        ({"name": "distill", "teacher": "b"}, {"a": {"path": "demo"}}, "allowed: a$"),
        ({"teacher": "a"}, {"a": {"path": "demo"}}, r"algorithm\.teacher_beta: got 0 with"),
        ({"teacher_beta": 0.5}, {}, r"algorithm\.teacher_beta: got 0.5 with teacher ''"),
        ({}, {"a": {"path": "demo"}}, r"teachers\.a: got a teacher of no task"),
    ],
)
def test_settings_without_meaning_are_refused(
    algorithm: dict[str, Any], teachers: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        check_algorithm(config_of(algorithm=algorithm, teachers=teachers))


def test_weights_of_samples_that_change_nothing_are_told() -> None:
    whole = taught(divergence="jsd", decoupled=True, correction={"kind": "token_mask"})
    keys = [line.split(" has no effect")[0] for line in algorithm_doubts(whole)]
    assert keys == ["algorithm.decoupled", "algorithm.correction"]
    (line,) = algorithm_doubts(taught(decoupled=True))
    assert line.startswith("algorithm.decoupled has no effect with distill")
    assert algorithm_doubts(taught(correction={"kind": "token_mask"})) == []


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    from stages.trl_run import word_tokenizer

    tiny_model(dtype=torch.float32).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    config = Config.model_validate(
        {
            "model": {"path": str(SMALL_POLICY)},
            "tasks": {"train": {"data": str(SUMS)}},
            "algorithm": {"name": "distill", "teacher": "other"},
            "teachers": {"other": {"path": str(tmp_path)}},
            "train": {"steps": 1},
        }
    )
    with pytest.raises(UserError, match=r"teachers\.other\.path: got .* with another vocabulary"):
        preflight.check(config)
