"""One GRPO step, Penstock and TRL on the same model in one process tree; prints both and the ratio.

    python benchmarks/grpo_step.py [--model small|demo|smollm2|qwen0.5b|PATH] [--steps 6]
    python benchmarks/grpo_step.py --model qwen0.5b --prompts 64 --new-tokens 256     # on a GPU

N prompts x 8 samples of exactly so many new tokens (the end of sequence is held back), then one update.
TRL runs in a subprocess of the same interpreter (pip install trl), Penstock as a user runs it (`penstock
train`): once on-policy (max_staleness 0) and once overlapped (1). The figure is the median time of a step
after the first two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLES, WARM_UP = 8, 2


@dataclass(frozen=True)
class Load:
    prompts: int
    new_tokens: int
    steps: int

    def write_data(self, path: Path) -> Path:
        """Questions of about 64 characters, enough for every step."""
        with path.open("w") as file:
            for number in range(self.prompts * (self.steps + 4)):
                question = f"{number % 90 + 10}+{number % 71 + 10}" * 11
                message = {"role": "user", "content": question}
                file.write(json.dumps({"messages": [message], "gt_answer": "0"}) + "\n")
        return path


def parity_reward(rollout: object, prompt: object) -> float:
    """A reward with variance that costs nothing: is the sum of the ids even?"""
    return float(int(rollout.response_ids.sum()) % 2 == 0)  # type: ignore[attr-defined]


def random_model(folder: Path, **shape: Any) -> Path:
    """A random policy of that shape with the demo's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from penstock.demo import policy_path

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(policy_path())
    config = Qwen2Config(
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SHAPES = {
    "small": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 49152,
    },
    "qwen0.5b": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
    },
}


def penstock_step_s(model: str, load: Load, staleness: int, folder: Path) -> float:
    """Median step time of a real run, from its metrics."""
    data = load.write_data(folder / "train.jsonl")
    name = f"staleness-{staleness}"
    config = folder / f"{name}.toml"
    config.write_text(
        f"""
[run]
dir = "{folder}"
name = "{name}"
[model]
path = "{model}"
[tasks.train]
data = "{data}"
rewards = [{{ type = "{Path(__file__).resolve()}:parity_reward" }}]
[sampling]
num_generations = {SAMPLES}
min_tokens = {load.new_tokens}
max_tokens = {load.new_tokens}
[engine]
max_slots = {load.prompts * SAMPLES}
[produce]
max_staleness = {staleness}
[train]
steps = {load.steps}
groups_per_step = {load.prompts}
lr = 1e-6
[track]
trackers = []
"""
    )
    command = [sys.executable, "-m", "penstock.cli", "train", str(config)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["time/step_s"] for line in lines[WARM_UP:])


def trl_step_s(model: str, load: Load, folder: Path) -> float | None:
    """Median step time of TRL's GRPOTrainer, or None where TRL is not installed."""
    sizes = [str(load.prompts), str(load.new_tokens), str(load.steps)]
    command = [sys.executable, __file__, "--trl", model, str(folder), *sizes]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print("TRL did not run:", done.stderr.strip().splitlines()[-1:], file=sys.stderr)
        return None
    return float(done.stdout.strip().splitlines()[-1])


def run_trl(model: str, folder: str, load: Load) -> None:
    import time

    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Timer(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            self.times.append(time.perf_counter() - self.started)

    def reward(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
        return [float(sum(ids) % 2 == 0) for ids in completion_ids]

    lines = [json.loads(line) for line in (Path(folder) / "train.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"prompt": line["messages"]} for line in lines])
    gpu = torch.cuda.is_available()
    arguments = GRPOConfig(
        output_dir=f"{folder}/trl",
        per_device_train_batch_size=load.prompts * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=load.new_tokens,
        generation_kwargs={"min_new_tokens": load.new_tokens},
        max_steps=load.steps,
        learning_rate=1e-6,
        use_cpu=not gpu,
        bf16=gpu,
        gradient_checkpointing=False,
        beta=0.0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1000,
    )
    timer = Timer()
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=arguments, train_dataset=data, callbacks=[timer]
    )
    trainer.train()
    print(statistics.median(timer.times[WARM_UP:]))


def main() -> None:
    if sys.argv[1:2] == ["--trl"]:
        run_trl(sys.argv[2], sys.argv[3], Load(*(int(word) for word in sys.argv[4:7])))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--model", default="small", help=f"{', '.join(SHAPES)}, demo, smollm2, PATH"
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no-trl", action="store_true", help="only ours")
    options = parser.parse_args()
    load = Load(options.prompts, options.new_tokens, options.steps)
    print(f"one GRPO step, {load.prompts} x {SAMPLES} x {load.new_tokens}, model {options.model}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = model_path(options.model, folder)
        ours = {}
        for bound in (0, 1):
            ours[bound] = penstock_step_s(model, load, bound, folder)
            print(f"  Penstock, max_staleness {bound}   {ours[bound]:8.3f} s", flush=True)
        peer = None if options.no_trl else trl_step_s(model, load, folder)
    if peer:
        print(f"  TRL GRPOTrainer            {peer:8.3f} s")
        for bound, seconds in ours.items():
            print(f"  ratio at max_staleness {bound}    {peer / seconds:8.1f} x")


def model_path(name: str, folder: Path) -> str:
    if name in SHAPES:
        return str(random_model(folder / "model", **SHAPES[name]))
    if name == "demo":
        from penstock.demo import policy_path

        return str(policy_path())
    if name == "smollm2":
        from smollm2 import load_smollm2, load_tokenizer

        load_smollm2().save_pretrained(folder / "model")
        load_tokenizer().save_pretrained(folder / "model")
        return str(folder / "model")
    return name


if __name__ == "__main__":
    main()
