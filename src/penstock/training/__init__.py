"""Training: from a batch of groups to new weights of the policy, and its part of a checkpoint.

`consumer.py` trains one step from start to end; a new metric of a step goes into `metrics.py`, a
term of the loss into `objective.py`. `parallel/` divides a model over several ranks. May import weights, models and
data; knows no engine, no journal, and no process but its own ranks.
"""
