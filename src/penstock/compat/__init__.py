"""For users of other systems: producers driven from Python, `launch_distributed`, padded tensors.

Nothing else imports this package. It only translates names and drives the parts that a run has.
"""

from __future__ import annotations

from penstock.compat.distributed import launch_distributed
from penstock.compat.producers import (
    BaseProducer,
    SimpleProducer,
    join_group,
    receive_state_dict,
    send_state_dict,
)

__all__ = [
    "BaseProducer",
    "SimpleProducer",
    "join_group",
    "launch_distributed",
    "receive_state_dict",
    "send_state_dict",
]
