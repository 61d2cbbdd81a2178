"""A loop of a user of the Tinker SDK, under its own Python; prints what it saw as JSON."""

import json
import sys

import tinker
from tinker import types

IDS = [1, 5, 6, 7, 8, 9, 10, 11]
STEPS = 12


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
    refused = ""
    try:
        trainer.forward_backward([datum], "gspo").result()
    except tinker.RequestFailedError as error:
        refused = str(error)
    seen = {
        "losses": losses,
        "tokens": [list(sequence.tokens) for sequence in sampled.sequences],
        "logprobs": sampler.compute_logprobs(prompt).result(),
        "loaded": [output.metrics["loss:sum"] for output in outputs],
        "refused": refused,
        "listed": [
            c.tinker_path.rpartition("/")[2]
            for c in tinker.RestClient().list_user_checkpoints().result().checkpoints
        ],
    }
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    sys.exit(main())
