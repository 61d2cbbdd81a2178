"""A loop of a user of the Tinker SDK, under its own Python; prints what it saw as JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any

import tinker
from tinker import types

IDS = [1, 5, 6, 7, 8, 9, 10, 11]
STEPS = 12


def refusals(service: Any, trainer: Any, datum: Any, path: str) -> dict[str, list[str]]:
    """The SDK's error class and its text for each mistake of a user; the same trainer makes several."""
    short = types.Datum(
        model_input=types.ModelInput.from_ints(IDS[:-1]),
        loss_fn_inputs={"target_tokens": IDS[1:], "weights": [1.0] * 3},
    )
    prompt, long = types.ModelInput.from_ints(IDS), types.SamplingParams(max_tokens=10**6)
    create = service.create_lora_training_client
    base = service.create_sampling_client(base_model="demo")
    foreign = tinker.ServiceClient(api_key="tml-somebody-else")
    mistakes: dict[str, Callable[[], Any]] = {
        "loss": lambda: trainer.forward_backward([datum], "gspo").result(),
        "shape": lambda: trainer.forward_backward([short], "cross_entropy").result(),
        "optimizer": lambda: trainer.optim_step(types.AdamParams(learning_rate=-1)).result(),
        "name": lambda: trainer.save_state("a/b").result(),
        "model": lambda: create(base_model="other", rank=4),
        "rank": lambda: create(base_model="demo", rank=10**6),
        "too long": lambda: base.sample(prompt, 1, long).result(),
        "foreign": lambda: foreign.create_sampling_client(model_path=path),
    }
    told = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
        except tinker.TinkerError as error:
            told[name] = [type(error).__name__, str(error)]
    return told


def main() -> None:
    service = tinker.ServiceClient()
    trainer = service.create_lora_training_client(base_model="demo", rank=4, seed=3)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(IDS[:-1]),
        loss_fn_inputs={"target_tokens": IDS[1:], "weights": [1.0] * 7},
    )
    adam = types.AdamParams(learning_rate=3e-3, eps=1e-8)
    losses = []
    for step in range(STEPS):
        done = trainer.forward_backward([datum, datum], "cross_entropy")
        stepped = trainer.optim_step(adam)
        losses.append(done.result().metrics["loss:sum"])
        stepped.result()
        print(f"step {step}", flush=True)
    prompt, params = types.ModelInput.from_ints(IDS[:3]), types.SamplingParams(max_tokens=4, seed=1)
    sampler = trainer.save_weights_and_get_sampling_client()
    sampled = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
    path = trainer.save_state("a").result().path
    again = service.create_training_client_from_state_with_optimizer(path)
    outputs = [c.forward([datum], "cross_entropy").result() for c in (trainer, again)]
    [served] = service.get_server_capabilities().supported_models
    full = types.ModelInput.from_ints(
        (IDS * served.max_context_length)[: served.max_context_length]
    )
    tinker.RestClient().set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    seen = {
        "losses": losses,
        "tokens": [list(sequence.tokens) for sequence in sampled.sequences],
        "logprobs": sampler.compute_logprobs(prompt).result(),
        "loaded": [output.metrics["loss:sum"] for output in outputs],
        "refused": refusals(service, trainer, datum, path),
        "full": len(sampler.compute_logprobs(full).result()) - served.max_context_length,
        "tokenizer": len(sampler.get_tokenizer()) - len(trainer.get_tokenizer()),
        "listed": [
            [c.tinker_path.rpartition("/")[2], c.expires_at is not None]
            for c in tinker.RestClient().list_user_checkpoints().result().checkpoints
        ],
    }
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    sys.exit(main())
