"""A process that has imported everything and forks one server after another, each of which may be killed.

Nine tenths of the start of a server are imports. `serve` reads one JSON line per server, with its folder and its
arguments, and forks it; the server's output is that of this process. An empty line waits for the server's end.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import IO

import torch

import penstock
from penstock import AdamParams, Datum, SamplingParams
from penstock.cli import main
from penstock.service.models import Models
from stages import nursery, quick_transformers
from stages.nursery import renew_thread_pool


class WarmServices:
    """Starts servers; one runs at a time."""

    def __init__(self) -> None:
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self._process = nursery.open_program(
            "stages.warm_services:serve",
            environment={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self.output = self._process.stdin, self._process.stdout

    def _ask(self, line: str) -> str:
        self._requests.write(f"{line}\n")
        self._requests.flush()
        return self.output.readline()

    def start(self, folder: Path, arguments: list[str]) -> int:
        """The process id of a new server; what it says comes from `output`."""
        return int(self._ask(json.dumps([str(folder), arguments])))

    def wait(self) -> None:
        """Wait until the server has ended, so that its port is free."""
        while self._ask("") != "ended\n":
            """A line of the server's, which was not read."""

    def close(self) -> None:
        self._requests.close()
        self._process.wait()
        self.output.close()


def serve() -> None:
    torch.set_num_threads(1)
    quick_transformers.install()
    with (
        tempfile.TemporaryDirectory() as folder,
        penstock.Service("demo", folder=folder) as service,
    ):
        trainer = service.create_lora_training_client(rank=2)
        data = [Datum([1, 5, 6], {"target_tokens": [5, 6, 7], "weights": [1.0] * 3})]
        trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(AdamParams()).result()
        sampler = trainer.save_weights_and_get_sampling_client()
        sampler.compute_logprobs([1, 5, 6]).result()
        sampler.sample([1, 5], 2, SamplingParams(max_tokens=2)).result()
    Models.snapshot.__kwdefaults__ = {"wait_s": 0.3}  # kills meet snapshots too
    gc.collect()
    gc.freeze()  # no collection in a child walks through the modules
    answer_requests(sys.stdin)


def answer_requests(requests: IO[str]) -> None:
    child = 0
    for line in requests:
        if line == "\n":
            os.waitpid(child, 0)
            print("ended", flush=True)
        elif (child := os.fork()) == 0:
            folder, arguments = json.loads(line)
            code = 70
            try:
                print(os.getpid(), flush=True)
                renew_thread_pool()
                os.chdir(folder)
                sys.argv = ["penstock", *arguments]
                main()
            except SystemExit as end:
                code = int(end.code or 0)
            finally:
                sys.stdout.flush()
                os._exit(code)
