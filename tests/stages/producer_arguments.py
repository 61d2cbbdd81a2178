"""The arguments of a SimpleProducer, in the names of the system that it comes from."""

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
