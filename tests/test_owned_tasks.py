"""Every task and thread that the source starts has an owner that reads how it ended.

`OWNED` names each place that starts one, and who tells of its fault. A new place fails this test until it
says so here.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from stages.source_code import FILES, SOURCE, nodes

STARTS = ("create_task", "ensure_future", "Thread", "ThreadPoolExecutor")

OWNED = {
    # awaited in the same function, or in the one that cancels it
    "rollout/evaluation/evaluate.py _play": "a TaskGroup, the first error raised",
    "rollout/evaluation/score.py _in_order": "a TaskGroup",
    "run/job.py _load_and_launch": "awaited before it returns, or cancelled by a stop",
    "workers/workers.py all_or_first_error": "gathered, also after an error",
    "workers/ray/agents.py AgentPart.generate_group": "awaited, its error raised",
    "workers/ray/agents.py ActorAgentLoop._relay": "`_answer` sends every error to the actor",
    "workers/ray/agents.py ActorAgentLoop._start": "`_relay` notes its fault; a cancel has no answer",
    "workers/ray/placement.py Placement.start_actor": "awaited, its error raised",
    "model/transfer.py _copiers": "`_copy_bytes` waits for every copy and raises its error",
    "rollout/agent_loop.py AgentLoop.generate_group.isolated": "awaited; its error fails the rollout",
    "rollout/producer.py Producer.run": "gathered; the first error is raised to the loop",
    "rollout/strategy.py ProduceStrategy.produce_batch": "waits for an event, cancelled at the end",
    "run/loop.py Loop.run": "the loop's TaskGroup",
    "run/loop.py Loop._publish": "the loop's TaskGroup",
    "run/loop.py Loop._start_evaluation": "the loop's TaskGroup",
    "run/session.py StopSignals.run": "awaited before it returns",
    "workers/supervise/trainer.py RankGroup._each": "gathered, the first error raised",
    "workers/supervise/trainer.py RankGroup.ended": "gathered, the first end returned",
    "workers/watchdog.py watched": "its error is raised in the watched block",
    "training/consumer.py Consumer.__init__": "`train` reads the hashes, or raises before",
    "weights/distributor.py Distributor.__init__": "encoders; the first error is sent to the receiver",
    "weights/distributor.py Distributor._receive": "results are read in order, the first error raised",
    # kept: a later call reads how they ended
    "rollout/agent/session.py Session.call": "shielded; the call that waits gets its error, `close` ends it",
    "store/checkpoint.py CheckpointStore.begin": "`settle` raises what `_write` does not explain",
    "engine/openai/engine.py OpenAIEngine._watch": "`_wait_closed` ends the engine with the reason",
    "engine/remote_requests.py RemoteRequests.run": "awaited by its caller",
    "workers/processes/worker_main.py prepare": "torch opens the GPU itself if the thread could not",
    "workers/processes/process_worker.py ProcessWorker.__init__": "`_receive` fails every waiting call",
    "workers/processes/worker_main.py serve": "`_answer` sends every error to the driver",
    "workers/ray/actor.py ActorWorker.__init__": "`ended` returns its error",
    "rollout/group_runner.py GroupRunner.launch": "`GroupRunner._run` keeps the error in `fault`",
    "run/loop.py Loop._one_step": "shielded; `_end_update` awaits it after a stop",
    "workers/supervise/supervised.py Supervised.start": "`_supervise` turns any error into `given_up`",
    "workers/supervise/trainer.py RestartingTrainer.publish": "`_written` raises its error",
    "service/core.py ServiceCore._begin": "`_ended` ends the service with its error",
    "service/samplers.py Samplers._advance": "`_switch` hands any error to those who wait",
    "service/server.py serve_until_stopped.main": "waits for an event; cancelled at the end",
    # their errors cost tokens and no more
    "rollout/agent/single_turn.py SingleTurn._abort_later": "an abort that fails is not raised",
    "workers/pool/requests.py Requests._abort_later": "an abort that fails is not raised",
    "rollout/group_runner.py GroupRunner._abort_all": "an abort that fails is counted and sent again",
    # threads and pools of threads: a call is awaited, or the thread answers its waiters with its error
    "service/core.py ServiceCore.__init__": "every call in it is awaited",
    "service/audit.py replay_service": "every call in it is awaited",
    "service/client.py Service.__init__": "callers await their own coroutines in it",
    "compat/producers.py BaseProducer.__init__": "callers await their own coroutines in it",
    "engine/transformers/engine.py TransformersEngine.start": "`_run` fails every waiting caller",
    "store/journal/writer.py Writer.__init__": "`_run` keeps the thread alive to fail every waiter",
    "workers/rpc.py RpcServer.__init__": "every call in it is awaited",
    "reward/code.py CodeReward._verify": "every call in it is awaited",
    "reward/reward_model.py RewardModel.score": "`_run_batch` fails every waiting rollout; `close` ends it",
    "reward/call_threads.py CallThreads._start_worker": "`_work` carries any error to its waiter",
    "run/run_data.py in_thread": "its outcome carries any error to the caller; a stop leaves it behind",
    "workers/watchdog.py _naming_blocks": "ends with the watched block; its fault costs a note and no more",
    "reward/sandbox/pool.py SandboxPool.__init__": "the next caller of `_take` meets the same error",
    "reward/sandbox/serve.py VerificationService.__init__": "every call in it is awaited",
}


@cache
def started(path: Path) -> list[tuple[str, bool]]:
    """Return each function of a file that starts a task or thread, and whether it drops the result."""

    found = []

    def walk(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{name}.{child.name}".lstrip(".")
            if isinstance(child, ast.Call) and called(child) in STARTS:
                dropped = isinstance(node, ast.Expr) and called(child) != "Thread"
                found.append((f"{path.relative_to(SOURCE).as_posix()} {name}", dropped))
            walk(child, inner)

    if any(isinstance(node, ast.Call) and called(node) in STARTS for node in nodes(path)):
        walk(nodes(path)[0], "")
    return found


def called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def test_every_task_and_thread_has_an_owner() -> None:
    found = {place for path in FILES for place, _ in started(path)}
    assert found - OWNED.keys() == set(), "say in OWNED who reads how it ended"
    assert OWNED.keys() - found == set(), "remove what starts nothing any more"


def test_no_task_is_dropped_where_it_is_started() -> None:
    dropped = [place for path in FILES for place, drops in started(path) if drops]
    assert dropped == []
