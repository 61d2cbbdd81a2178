"""Isolated execution of untrusted code, its HTTP server and client.

Stopped: network, files outside a scratch folder, other processes, memory, time, output, disk, signals to
others, the parent's environment. `self_check.check()` says which layers are active on this machine.

Not stopped: a bug in the Linux kernel; timing and cache side channels between sandboxes and the host;
use of the processor up to the time limit (a hostile solution slows its neighbours); reading the Python
standard library and system libraries; knowing the kernel's version and the time; guessing right
answers; within one submission, seeing from its process number how many threads earlier tests
started. Below the level `full` (no namespaces) code also sees that other processes exist, and has no
scratch folder.
"""
