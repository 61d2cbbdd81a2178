"""One GRPO step, Penstock and TRL on the same model in one process tree; prints both and the ratio.

    python benchmarks/grpo_step.py [--model small|demo|PATH] [--steps 6]

8 prompts x 8 samples x 32 new tokens (exactly 32: the end of sequence is held back), then one update,
float32 on this machine's CPU. TRL runs in a subprocess of the same interpreter (pip install trl), Penstock
as a user runs it (`penstock train`): once on-policy (max_staleness 0) and once overlapped (1). The figure
is the median time of a step after the first two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPTS, SAMPLES, NEW_TOKENS, WARM_UP = 8, 8, 32, 2


def parity_reward(rollout: object, prompt: object) -> float:
    """A reward with variance that costs nothing: is the sum of the ids even?"""
    return float(int(rollout.response_ids.sum()) % 2 == 0)  # type: ignore[attr-defined]


def small_model(folder: Path) -> Path:
    """About a million parameters of layers under a vocabulary of 49k, random, with the demo's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from penstock.demo import policy_path

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(policy_path())
    config = Qwen3Config(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=512,
        vocab_size=49152,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def penstock_step_s(model: str, steps: int, staleness: int, folder: Path) -> float:
    """Median step time of a real run, from its metrics."""
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
data = "addition"
rewards = [{{ type = "{Path(__file__).resolve()}:parity_reward" }}]
[sampling]
num_generations = {SAMPLES}
min_tokens = {NEW_TOKENS}
max_tokens = {NEW_TOKENS}
[engine]
max_slots = {PROMPTS * SAMPLES}
[produce]
max_staleness = {staleness}
[train]
steps = {steps}
groups_per_step = {PROMPTS}
lr = 1e-6
[track]
trackers = []
"""
    )
    command = [sys.executable, "-m", "penstock.cli", "train", str(config)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["time/step_s"] for line in lines[WARM_UP:])


def trl_step_s(model: str, steps: int, folder: Path) -> float | None:
    """Median step time of TRL's GRPOTrainer, or None where TRL is not installed."""
    command = [sys.executable, __file__, "--trl", model, str(steps), str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print("TRL did not run:", done.stderr.strip().splitlines()[-1:], file=sys.stderr)
        return None
    return float(done.stdout.strip().splitlines()[-1])


def run_trl(model: str, steps: int, folder: str) -> None:
    import time

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

    data = Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(10, 74) for b in (11, 57)])
    arguments = GRPOConfig(
        output_dir=f"{folder}/trl",
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
        max_steps=steps,
        learning_rate=1e-6,
        use_cpu=True,
        bf16=False,
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
        run_trl(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="small", help="small, demo, smollm2, or a model folder")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = model_path(options.model, folder)
        ours = {bound: penstock_step_s(model, options.steps, bound, folder) for bound in (0, 1)}
        peer = trl_step_s(model, options.steps, folder)
    print(
        f"\none GRPO step, {PROMPTS} x {SAMPLES} x {NEW_TOKENS} tokens, model {options.model}, CPU"
    )
    for bound, seconds in ours.items():
        ratio = f"{peer / seconds:6.1f}x" if peer else "   -  "
        print(f"  Penstock, max_staleness {bound}   {seconds:8.3f} s   {ratio}")
    print(f"  TRL GRPOTrainer            {peer:8.3f} s" if peer else "  TRL: not installed")


def model_path(name: str, folder: Path) -> str:
    if name == "small":
        return str(small_model(folder / "model"))
    if name == "demo":
        from penstock.demo import policy_path

        return str(policy_path())
    if name == "smollm2":
        sys.path.insert(0, str(Path(__file__).parent))
        from smollm2 import smollm2_path

        return str(smollm2_path())
    return name


if __name__ == "__main__":
    main()
