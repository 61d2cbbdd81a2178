"""A SimpleProducer built with ColossalAI's parameter names, and one that runs as a Ray actor."""

from __future__ import annotations

from typing import Any

from penstock.compat.producers import SimpleProducer

ARGUMENTS = {
    "producer_idx": 0,
    "num_producers": 2,
    "num_consumer_procs": 1,
    "num_episodes": 2,
    "batch_size": 2,
    "microbatch_size": 2,
    "train_dataset_config": {"path": "addition", "data_options": {"size": 8}},
    "model_config": {"path": "demo"},
    "generate_config": {"temperature": 0.7, "top_k": -1, "max_new_tokens": 12},
    "num_generations": 3,
    "grpo_config": {"reward_fn_type": "think_answer_tags"},
}


class FollowingProducer(SimpleProducer):
    """Receives new weights from rank 0 of a group by broadcast and reports what it did."""

    def new_weights(self) -> dict[str, Any]:
        return self.receive_state_dict("weights")

    def account(self) -> tuple[int, str, int]:
        stats = self._wait(self._engine.stats())
        return stats.policy_version, stats.digest, sum(len(m["reward"]) for m in self.delivered)
