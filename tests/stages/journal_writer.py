"""A process that writes to a journal without a pause until its input ends.

Run as `python -m stages.journal_writer FILE`: prints the number of each step that it has committed.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

from penstock.data.sampler import Sampler
from penstock.store.journal import Journal
from penstock.types import StepReport
from stages.rollouts import finish_rollout, make_prompts


async def write(path: Path, stopped: threading.Event) -> None:
    journal = Journal.open(path)
    sampler = Sampler(make_prompts(8), task_name="t", prompt_repeat_k=2, seed=0)
    step = 0
    while not stopped.is_set():
        step += 1
        groups = [sampler.sample("t") for _ in range(4)]
        for group in groups:
            journal.drawn(group)
            for rollout in group.rollouts:
                finish_rollout(rollout)
            await journal.landed(group)
        await journal.begin_step(step, groups)
        report = StepReport(step=step, policy_version=step, digest=f"{step:032x}", metrics={})
        await journal.commit_step(report)
        print(step, flush=True)
    journal.close()


def main() -> None:
    stopped = threading.Event()
    reader = threading.Thread(target=lambda: (sys.stdin.read(), stopped.set()), daemon=True)
    reader.start()
    asyncio.run(write(Path(sys.argv[1]), stopped))


if __name__ == "__main__":
    main()
