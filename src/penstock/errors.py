"""Every exception that Penstock raises on purpose, in one tree.

A `UserError` is the user's mistake: the command line prints its one line and exits with 2.
A `RunError` is a fault at run time: one line, exit 1, and the journal is intact.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base class; catch it to catch every error that Penstock raises on purpose."""


class UserError(PenstockError, ValueError):
    """The input is wrong. The message says what, what was given, and what is allowed."""


class RunError(PenstockError, RuntimeError):
    """The run cannot continue. Nothing that was journalled is lost."""


class EngineError(RunError):
    """An inference engine refused, failed or died; the message names the request or the engine."""


class EnginesLost(EngineError):
    """Every engine was given up: no request will ever be answered, so the run stops."""


class WeightsGone(EngineError):
    """Published weights can no longer be read, or are incomplete; they must be published again."""


class RewardError(RunError):
    """A reward could not be computed (a dead server, broken test cases): a failure, not a zero."""


class SandboxError(RewardError):
    """Untrusted code was not run: the isolation is too weak here, or the sandbox itself failed."""


class WorkerDied(RunError):
    """A worker process or actor ended while something waited for it."""


class WrongStep(RunError):
    """A trainer was given a batch that is not its next step; it has changed nothing."""


class PartFailed(RunError):
    """A part in a worker raised a foreign exception; the message names the part and the exception."""


class TooManyFailures(RunError):
    """The share of failing groups went past its limit (docs/architecture.md, law 7)."""


class PromptsRetired(RunError):
    """Every prompt of a task is solved, and solved prompts are not drawn again."""


class DigestMismatch(RunError):
    """Weights do not match their digest; they are refused and the run stops."""


class JournalDamaged(RunError):
    """The journal's file is not what was written to it."""


class StopRequested(PenstockError):
    """The user asked the run to stop (Ctrl-C); work ends cleanly with a checkpoint."""
