"""Models of a service: exact losses and gradients, AdamW, adapters side by side, memory that comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.config.source import load_config
from penstock.errors import DigestMismatch, UserError
from penstock.service.batches import LOSSES, make_rows
from penstock.service.models import Models, _adam
from penstock.store import wire
from penstock.store.command_log import FILE, Command, CommandLog
from stages.service_client import forward_backward
from stages.tiny_policy import save_policy

IDS = [3, 9, 4, 17, 8, 30, 22]
OTHER = [3, 9, 4, 40, 41]
GENERATOR = np.random.default_rng(0)
INPUTS = {
    name: GENERATOR.normal(scale, 0.3, len(IDS) - 1).astype(np.float32).tolist()
    for name, scale in (("weights", 0.5), ("logprobs", -4.0), ("advantages", 0.2))
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


class Room:
    """Models of one folder, whose commands go through the log as the service does it."""

    def __init__(self, policy: Path, folder: Path) -> None:
        self.config = load_config(None, [f"model.path={policy}"], bare=True).config
        self.log = CommandLog(folder / FILE)
        self.folder = folder
        self.begin()

    def begin(self) -> None:
        """What a start of the service does."""
        self.models = Models(self.config, self.folder)
        self.models.load_base()
        self.count: dict[str, int] = {}

    def create(self, number: int, rank: int, **lora: Any) -> str:
        fields = {"base_model": "x", "lora_config": {"rank": rank, "seed": 7, **lora}}
        line = "session:train"
        command = self.log.add(line, number, "me", "create_model", json.dumps(fields).encode())
        digest = self.models.create(f"{line}:{number}", command)
        self.log.answer(command, "done", b"{}", digest)
        return f"{line}:{number}"

    def do(self, model_id: str, kind: str, body: Any = None, **source: Any) -> Any:
        rows = self.log.query("SELECT max(seq) FROM commands WHERE line = ?", (model_id,))
        octets = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        command = self.log.add(model_id, (rows[0][0] or 0) + 1, "me", kind, octets)
        result, digest = self.models.run(model_id, command, source or None)
        self.log.answer(command, "done", _octets(result), digest)
        self.models.snapshot(model_id)
        return result

    def train(self, model_id: str, ids: list[int], **adam: Any) -> None:
        self.do(model_id, "forward_backward", forward_backward(model_id, 0, ids))
        self.do(model_id, "optim_step", {"adam_params": adam})

    def digest(self, model_id: str) -> str:
        return self.models._digest(self.models._open(model_id))

    def gradients(self, model_id: str) -> dict[str, torch.Tensor]:
        masters = self.models._open(model_id).consumer.masters.parameters
        return {name: p.grad.clone() for name, p in masters.items() if p.grad is not None}


def _octets(result: Any) -> bytes:
    return result if isinstance(result, bytes) else json.dumps(result).encode()


@pytest.fixture
def room(policy: Path, tmp_path: Path) -> Iterator[Room]:
    room = Room(policy, tmp_path)
    yield room
    room.log.close()


def direct(policy: Path, ids: list[int], loss: str) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """(log-probs, loss, the model with its gradients), by transformers and autograd alone."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    logits = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    lp = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    x = {name: torch.tensor(values) for name, values in INPUTS.items()}
    ratio = (lp - x["logprobs"]).exp()
    clipped = ratio.clamp(0.8, 1.2)
    total = {
        "cross_entropy": -(x["weights"] * lp).sum(),
        "importance_sampling": -(ratio * x["advantages"]).sum(),
        "ppo": -torch.minimum(ratio * x["advantages"], clipped * x["advantages"]).sum(),
        "cispo": -(clipped.detach() * lp * x["advantages"]).sum(),
        "dro": -(lp * x["advantages"] - 0.025 * (lp - x["logprobs"]) ** 2).sum(),
    }[loss]
    total.backward()
    return lp.detach(), total.detach(), model


@pytest.mark.parametrize("loss", LOSSES)
def test_log_probs_loss_and_gradients_are_those_of_direct_computation(
    room: Room, policy: Path, loss: str
) -> None:
    model_id = room.create(0, rank=0)
    inputs = {name: INPUTS[name] for name in LOSSES[loss].inputs}
    answer = room.do(model_id, "forward_backward", forward_backward("", 1, IDS, loss, **inputs))
    message = wire.decode("ForwardBackwardOutput", answer)
    tensor = message["loss_fn_outputs"][0]["fields"]["logprobs"]
    logprobs, total, model = direct(policy, IDS, loss)
    np.testing.assert_allclose(np.frombuffer(tensor["data"], "<f4"), logprobs, atol=1e-5)
    assert message["metrics"]["loss:sum"] == pytest.approx(float(total), abs=1e-5)
    gradients = room.gradients(model_id)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4)


def test_gradients_of_requests_add_up_until_a_step_of_adamw(room: Room, policy: Path) -> None:
    model_id = room.create(0, rank=0)
    for weights in ([1.0] * 6, INPUTS["weights"]):
        body = forward_backward("", 1, IDS, weights=weights)
        room.do(model_id, "forward_backward", body)
    adam = {"learning_rate": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "grad_clip_norm": 0.5}
    result = room.do(model_id, "optim_step", {"adam_params": adam})
    _, _, model = direct(policy, IDS, "cross_entropy")
    logits = model(torch.tensor([IDS[:-1]])).logits[0].log_softmax(-1)
    (-logits.gather(1, torch.tensor(IDS[1:])[:, None]).sum()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}
    torch.optim.AdamW(model.parameters(), **settings).step()
    assert result["metrics"]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    own = room.models._open(model_id).consumer.masters.parameters
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(own[name].detach(), parameter.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_adapters_of_several_ranks_train_as_if_each_were_alone(
    room: Room, policy: Path, tmp_path: Path
) -> None:
    together = [room.create(number, rank) for number, rank in enumerate((2, 5, 2))]
    for _ in range(2):
        for number, model_id in enumerate(together):
            room.train(model_id, IDS[number:], learning_rate=1e-2)
    for number, rank in enumerate((2, 5, 2)):
        folder = tmp_path / f"alone-{number}"
        folder.mkdir()
        alone = Room(policy, folder)
        model_id = alone.create(number, rank)
        for _ in range(2):
            alone.train(model_id, IDS[number:], learning_rate=1e-2)
        assert alone.digest(model_id) == room.digest(together[number])
    base = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    for name, parameter in room.models._base.named_parameters():
        assert torch.equal(parameter, base.get_parameter(name)), name


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_a_model_comes_back_from_snapshot_and_log_with_all_its_bits(room: Room, rank: int) -> None:
    model_id, twin = room.create(0, rank), room.create(1, rank)
    for step in range(3):
        for one in (model_id, twin):
            room.train(one, IDS[step:], learning_rate=1e-2)
        if step == 1:
            room.models.put_away(model_id)  # with a snapshot
    for one in (model_id, twin):
        room.do(one, "forward_backward", forward_backward(one, 0, OTHER))
    room.begin()  # as after a kill: gradients that no step has applied come back too
    assert {n: g.tolist() for n, g in room.gradients(model_id).items()} == {
        n: g.tolist() for n, g in room.gradients(twin).items()
    }
    for one in (model_id, twin):
        room.do(one, "optim_step", {"adam_params": {"learning_rate": 1e-2}})
    assert room.digest(model_id) == room.digest(twin)


def test_a_model_whose_log_has_other_bits_is_refused(room: Room) -> None:
    model_id = room.create(0, rank=2)
    room.train(model_id, IDS, learning_rate=1e-2)
    room.log.query("UPDATE commands SET digest = 'leaves-0' WHERE kind = 'optim_step'")
    room.begin()
    with pytest.raises(DigestMismatch, match=r"command 2 \(optim_step\) gave other bits"):
        room.train(model_id, IDS, learning_rate=1e-2)


def test_a_checkpoint_loads_into_its_like_with_and_without_moments(room: Room) -> None:
    first, second, other = (room.create(number, rank) for number, rank in enumerate((2, 2, 4)))
    room.train(first, IDS, learning_rate=1e-2)
    room.do(first, "save_weights", {"path": "a"})
    source = {"folder": f"checkpoints/{first}/3", "shape": [2, True, True]}
    load = {"path": "tinker://a", "optimizer": True}
    room.do(second, "load_weights", load, **source)
    assert room.digest(second) == room.digest(first)
    for one in (first, second):
        room.train(one, OTHER, learning_rate=1e-2)
    assert room.digest(second) == room.digest(first)
    room.do(second, "load_weights", {**load, "optimizer": False}, **source)
    room.train(second, OTHER, learning_rate=1e-2)
    assert room.digest(second) != room.digest(first)  # its moments began anew
    with pytest.raises(
        UserError, match="rank 2, allowed: those of a model like this one, of rank 4"
    ):
        room.do(other, "load_weights", load, **source)


def test_scores_are_the_models_own(room: Room, policy: Path) -> None:
    ids = np.array(IDS, np.int32)
    rows = make_rows([ids], [ids[1:]])
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    with torch.no_grad():
        table = model(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    scores = room.models.score(room.models.scorer(""), rows)
    wanted = table.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    np.testing.assert_allclose(scores, wanted, atol=1e-5)
    best_ids, best = room.models.most_likely(room.models.scorer(""), rows, 3)
    np.testing.assert_allclose(best, table.topk(3).values, atol=1e-5)
    assert best_ids.tolist() == table.topk(3).indices.tolist()


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"rank": -1}, "lora_config.rank: got -1"),
        ({"rank": 10_000}, "lora_config.rank: got 10000, allowed: 0 (all weights) to "),
        ({"rank": 2, "train_mlp": False, "train_attn": False}, "lora_config: got no layers"),
    ],
)
def test_a_model_that_cannot_be_is_refused(room: Room, lora: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        room.create(0, **lora)
    assert says in str(caught.value)


def test_layers_can_be_chosen(room: Room) -> None:
    chosen = room.create(0, 2, train_mlp=False)
    names = room.models._open(chosen).consumer.masters.parameters
    assert names
    assert all("self_attn" in name for name in names)


def test_what_is_not_finite_changes_no_weight(room: Room) -> None:
    model_id = room.create(0, rank=2)
    before = room.digest(model_id)
    weights = [3e38] * (len(IDS) - 1)
    room.do(model_id, "forward_backward", forward_backward("", 0, IDS, weights=weights))
    assert room.do(model_id, "optim_step") == {"metrics": {"skipped": 1.0}}
    assert room.digest(model_id) == before


def test_commands_are_checked_as_they_are_read(room: Room) -> None:
    model_id = room.create(0, rank=2)
    room.train(model_id, IDS)
    assert list(room.log.damaged()) == []
    room.log.query("UPDATE commands SET body = ? WHERE seq = 1", (b"other",))
    assert list(room.log.damaged()) == [f"{model_id}#1"]
    assert isinstance(room.log.find(model_id, 1), Command)


@pytest.mark.parametrize("eps", [0, 1e-300])
def test_a_step_that_would_divide_nothing_by_nothing_is_refused(eps: float) -> None:
    with pytest.raises(UserError, match=r"adam_params\.eps: got .*, allowed: from 1e-38"):
        _adam({"adam_params": {"eps": eps}})
