"""A loop of a user by the SDK's methods alone: its client runs it, and so does `penstock.Service`."""

import asyncio
import json
from typing import Any

IDS = [1, 5, 6, 7, 8, 9, 10, 11]


async def train(service: Any, types: Any, tokens: Any) -> list[Any]:
    """What the user sees; `tokens` makes a prompt of ids."""
    trainer = await service.create_lora_training_client_async(
        base_model="demo", rank=4, seed=3, train_unembed=False, user_metadata={"who": "me"}
    )
    inputs = {"target_tokens": IDS[1:], "weights": [1.0] * 7}
    datum = types.Datum(model_input=tokens(IDS[:-1]), loss_fn_inputs=inputs)
    told = []
    for _ in range(3):
        done = await trainer.forward_backward_async([datum, datum], "cross_entropy")
        stepped = await trainer.optim_step_async(types.AdamParams(learning_rate=3e-3, eps=1e-8))
        output = await done.result_async()
        told += [output.metrics["loss:sum"], (await stepped).metrics["grad_norm"]]
        told.append(output.loss_fn_outputs[0]["logprobs"].tolist())
    sampler = await trainer.save_weights_and_get_sampling_client_async()
    response = await sampler.sample_async(
        prompt=tokens(IDS[:3]),
        num_samples=2,
        sampling_params=types.SamplingParams(max_tokens=4, seed=1, stop=[]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=1,
    )
    for part in response.sequences:
        told += [list(part.tokens), list(part.logprobs), part.stop_reason, part.topk_logprobs]
    told += [response.prompt_logprobs, response.topk_prompt_logprobs]
    told.append(await sampler.compute_logprobs_async(tokens(IDS)))
    path = (await trainer.save_state_async("a", ttl_seconds=7200)).result().path
    told.append(path.rpartition(":train:")[2])
    for again in (
        await service.create_training_client_from_state_async(path),
        await service.create_training_client_from_state_with_optimizer_async(path),
    ):
        scored = await again.forward_async([datum], "cross_entropy")
        told.append((await scored).metrics)
    named = (await trainer.save_weights_for_sampler_async("b", ttl_seconds=7200)).result().path
    for made in (
        trainer.create_sampling_client(named),
        service.create_sampling_client(model_path=named),
        service.create_sampling_client(base_model="demo"),
    ):
        told += [made.compute_logprobs(tokens(IDS)).result(), len(made.get_tokenizer())]
    [served] = service.get_server_capabilities().supported_models
    told += [served.model_name, served.max_context_length]
    return json.loads(json.dumps(told))


def main() -> None:
    import tinker

    made = tinker.types.ModelInput.from_ints
    print(json.dumps(asyncio.run(train(tinker.ServiceClient(), tinker.types, made))), flush=True)


if __name__ == "__main__":
    main()
