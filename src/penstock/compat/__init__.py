"""For users of other systems: producers driven from Python, `launch_distributed`, padded tensors.

Nothing else imports this package. It only translates names and drives the parts that a run has.
"""
