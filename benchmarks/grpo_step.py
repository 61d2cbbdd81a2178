"""Time one GRPO step of Penstock and of TRL on the same model; print both and the ratio.

    python benchmarks/grpo_step.py [--model small|demo|smollm2|qwen0.5b|PATH] [--steps 6]
    python benchmarks/grpo_step.py --model qwen0.5b --prompts 64 --new-tokens 256     # on a GPU

A step is N prompts x 8 samples of exactly --new-tokens tokens (the end of sequence is suppressed) and one
update. TRL runs in a subprocess of the same interpreter (pip install trl). Penstock runs as `penstock train`:
once on-policy (max_staleness 0: engine and trainer take turns, each on all cores, like TRL) and once overlapped
(max_staleness 1: the engine has one thread, the trainer one per core, so no core idles while either has work).
Prints medians over the steps after the warm-up: wall time, and the CPU time of all processes, which is the
better figure on a busy machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SAMPLES = 8


@dataclass(frozen=True)
class Load:
    prompts: int
    new_tokens: int
    steps: int
    warm_up: int
    train_threads: int = 0  # of the trainer; 0: one per core on a CPU, one beside a GPU

    def write_data(self, path: Path) -> Path:
        """Write questions of about 64 characters, enough for every step; return the path."""
        with path.open("w") as file:
            for number in range(self.prompts * (self.steps + 4)):
                question = f"{number % 90 + 10}+{number % 71 + 10}" * 11
                message = {"role": "user", "content": question}
                file.write(json.dumps({"messages": [message], "gt_answer": "0"}) + "\n")
        return path


@dataclass(frozen=True)
class Cost:
    """The cost of one step, in seconds."""

    wall: float
    cpu: float

    @classmethod
    def of_steps(cls, walls: list[float], cpus: list[float], warm_up: int) -> Cost:
        return cls(statistics.median(walls[warm_up:]), statistics.median(cpus[warm_up:]))

    def __str__(self) -> str:
        return f"{self.wall:8.3f} s {self.cpu:10.3f} CPU s"


def cpu_seconds(root: int) -> float:
    """Return user and system time of a process and all its descendants."""
    parents, spent = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(") ")[2].split()
        except OSError:
            continue  # the process ended
        pid = int(path.parent.name)
        parents[pid], spent[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    tree, size = {root}, 0
    while len(tree) > size:
        size = len(tree)
        tree |= {pid for pid, parent in parents.items() if parent in tree}
    return sum(spent.get(pid, 0) for pid in tree) / os.sysconf("SC_CLK_TCK")


def parity_reward(rollout: object, prompt: object) -> float:
    """Return 1 if the sum of the ids is even: a reward with variance that costs nothing."""
    return float(int(rollout.response_ids.sum()) % 2 == 0)  # type: ignore[attr-defined]


def random_model(folder: Path, name: str) -> Path:
    """Save a random model of this shape with the demo's tokenizer; return its folder."""
    import torch
    from shapes import make_model
    from transformers import AutoTokenizer

    from penstock.config.demo import policy_path

    tokenizer = AutoTokenizer.from_pretrained(policy_path())
    model = make_model(
        name,
        torch.float32,
        "cuda" if torch.cuda.is_available() else "cpu",
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def write_config(model: str, load: Load, staleness: int, folder: Path) -> Path:
    """Write the data and the config of a run named staleness-N; return the config's path."""
    data = load.write_data(folder / "train.jsonl")
    name = f"staleness-{staleness}"
    cores = 1 if _has_gpu() else os.cpu_count() or 1  # beside a GPU they have no work
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
threads = {1 if staleness else cores}
[produce]
max_staleness = {staleness}
[train]
steps = {load.steps}
groups_per_step = {load.prompts}
lr = 1e-6
threads = {load.train_threads or cores}
[track]
trackers = []
"""
    )
    return config


def penstock_step(model: str, load: Load, staleness: int, folder: Path) -> Cost:
    """Run `penstock train` and return the cost of a step; the wall times are in its metrics."""
    config = write_config(model, load, staleness, folder)
    command = [sys.executable, "-m", "penstock.cli", "train", str(config)]
    metrics, spent = folder / f"staleness-{staleness}" / "metrics.jsonl", [0.0]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
        while running.poll() is None:
            now, done = (
                cpu_seconds(running.pid),
                metrics.exists() and len(metrics.open().readlines()),
            )
            spent += [now] * (done + 1 - len(spent))
            time.sleep(0.5)
    if running.returncode:
        raise SystemExit("Penstock did not run")
    walls = [json.loads(line)["time/step_s"] for line in metrics.read_text().splitlines()]
    cpus = [after - before for before, after in itertools.pairwise(spent)]
    return Cost.of_steps(walls, cpus, load.warm_up)


def trl_step(model: str, load: Load, folder: Path) -> Cost | None:
    """Return the cost of a step of TRL's GRPOTrainer, or None if TRL is not installed."""
    sizes = [str(load.prompts), str(load.new_tokens), str(load.steps), str(load.warm_up)]
    command = [sys.executable, __file__, "--trl", model, str(folder), *sizes]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print("TRL did not run:", done.stderr.strip().splitlines()[-1:], file=sys.stderr)
        return None
    return Cost(*(float(word) for word in done.stdout.strip().splitlines()[-1].split()))


def run_trl(model: str, folder: str, load: Load) -> None:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Timer(TrainerCallback):
        def __init__(self) -> None:
            self.walls: list[float] = []
            self.cpus: list[float] = []

        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            self.started = time.perf_counter(), time.process_time()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            self.walls.append(time.perf_counter() - self.started[0])
            self.cpus.append(time.process_time() - self.started[1])

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
    cost = Cost.of_steps(timer.walls, timer.cpus, load.warm_up)
    print(cost.wall, cost.cpu)


def main() -> None:
    if sys.argv[1:2] == ["--trl"]:
        run_trl(sys.argv[2], sys.argv[3], Load(*(int(word) for word in sys.argv[4:8])))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="small", help="a name of shapes.py, demo, smollm2, PATH")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=2, help="steps left out of the medians")
    parser.add_argument(
        "--train-threads", type=int, default=0, help="of the trainer; 0: one per core on a CPU"
    )
    parser.add_argument("--no-trl", action="store_true", help="measure Penstock only")
    options = parser.parse_args()
    sizes = (options.prompts, options.new_tokens, options.steps, options.warm_up)
    load = Load(*sizes, train_threads=options.train_threads)
    print(f"one GRPO step, {load.prompts} x {SAMPLES} x {load.new_tokens}, model {options.model}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = model_path(options.model, folder)
        ours = {}
        for bound in (0, 1):
            ours[bound] = penstock_step(model, load, bound, folder)
            print(f"  Penstock, max_staleness {bound}   {ours[bound]}", flush=True)
        peer = None if options.no_trl else trl_step(model, load, folder)
    if peer:
        print(f"  TRL GRPOTrainer            {peer}")
        for bound, cost in ours.items():
            ratios = f"{peer.wall / cost.wall:8.1f} x {peer.cpu / cost.cpu:10.1f} x"
            print(f"  ratio at max_staleness {bound}    {ratios}")
    print(f"  load of the machine: {', '.join(f'{value:.1f}' for value in os.getloadavg())}")


def model_path(name: str, folder: Path) -> str:
    from shapes import SHAPES

    if name in SHAPES and name != "demo":
        return str(random_model(folder / "model", name))
    if name == "demo":
        from penstock.config.demo import policy_path

        return str(policy_path())
    if name == "smollm2":
        from smollm2 import load_smollm2, load_tokenizer

        load_smollm2().save_pretrained(folder / "model")
        load_tokenizer().save_pretrained(folder / "model")
        return str(folder / "model")
    return name


if __name__ == "__main__":
    main()
