"""Secrets stay out of configs, because a config is written to run folders, journals, reports and trackers.

A setting that would hold a secret names an environment variable instead, as `token_variable` does. A
config with a secret in it is refused; no message repeats the secret.
"""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import urlsplit

from penstock.config.tree import leaves
from penstock.errors import UserError

_NAMES = re.compile(
    r"(?:\w+_)?(?:password|passwd|passphrase|secret|secret_key|api_?key|access_key|private_key"
    r"|(?:api|access|auth|bearer|hf|hub|wandb|session)_?token|credentials?|authorization)|token",
    re.IGNORECASE,
)
_VALUES = re.compile(  # the beginnings of keys that well-known services hand out
    r"(?=.*\d)(?=.*[A-Z])(?:sk-|hf_|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA|Bearer )[\w.-]{16,}"
)


def refuse_secrets(tree: Any) -> None:
    """Raise a UserError that names the first setting which holds a secret, without its value."""
    for key, value in leaves(tree, in_lists=True):
        if not isinstance(value, str) or not value:
            continue
        if _NAMES.fullmatch(key.rpartition(".")[2]) or _VALUES.fullmatch(value):
            raise UserError(
                f"{key}: got a secret, which a config must not hold (it is written to the run folder), "
                f"allowed: {key}_variable = the name of an environment variable that holds it"
            )
        if "://" in value and _holds_password(value):
            raise UserError(
                f"{key}: got a URL with a password, allowed: a URL without one, and the name of an "
                "environment variable that holds the key or token"
            )


def from_environment(key: str, variable: str, *, default: str = "") -> str:
    """The secret that an environment variable holds; only `default` may be unset."""
    value = os.environ.get(variable, "")
    if variable and not value and variable != default:
        raise UserError(f"{key}: got {variable!r}, allowed: an environment variable that is set")
    return value


def _holds_password(url: str) -> bool:
    try:
        return urlsplit(url).password is not None
    except ValueError:
        return False
