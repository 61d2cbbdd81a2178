"""Runs a task of a verifiers taskset as a rollout: its harness talks to the policy, its rewards score it.

    examples/verifiers/.venv/bin/python examples/verifiers/agent.py

writes train.jsonl, one line per task of the taskset. Another taskset: change TASKSET and HARNESS.
"""

import json
import os
import sys
from pathlib import Path

import verifiers.v1 as vf

sys.path.insert(0, str(Path(__file__).parent))
TASKSET = HARNESS = "sums_taskset"  # names of packages that can be imported
TASKS = list(vf.load_taskset(vf.taskset_config_type(TASKSET)(id=TASKSET)))


async def rollout(task, model):
    """Run one task; return its reward. What went wrong on the way is raised, never a reward of 0."""
    os.environ["POLICY_KEY"] = model.api_key  # one rollout at a time in this process
    config = vf.AgentConfig(
        harness={"id": HARNESS},
        runtime=vf.SubprocessConfig(),
        model=model.name,
        client=vf.EvalClientConfig(base_url=model.base_url, api_key_var="POLICY_KEY"),
    )
    trace = await vf.Agent(config).run(TASKS[task.extra["index"]])
    if not trace.ok:
        raise RuntimeError(f"the rollout of verifiers failed: {trace.errors}")
    return trace.reward


def write(path):
    """Write one line per task; the prompt is what Penstock shows of it."""
    with open(path, "w") as file:
        for index, one in enumerate(TASKS):
            messages = [{"role": "user", "content": one.data.prompt_text}]
            file.write(json.dumps({"messages": messages, "index": index}) + "\n")


if __name__ == "__main__":
    write(Path(__file__).with_name("train.jsonl"))
