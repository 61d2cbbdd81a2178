"""Secrets stay out of configs, because a config is written to run folders, journals, reports and trackers.

A setting that would hold a secret names an environment variable instead, as `token_variable` does. A
config with a secret in it is refused; no message repeats the secret.
"""

from __future__ import annotations

import os
import re
from typing import Any

from penstock.config.tree import leaves
from penstock.errors import UserError

_NAMES = re.compile(
    r"(?:\w+_)?(?:password|passwd|passphrase|secret|secret_key|api_?key|access_key|private_key"
    r"|(?:api|access|auth|bearer|hf|hub|wandb|session)_?token|credentials?|authorization)|token",
    re.IGNORECASE,
)
_VALUES = re.compile(  # the beginnings of keys that well-known services hand out; a header; a JWT
    r"(?<![\w-])(?:sk-|hf_|gsk_|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA|AIza|xai-|nvapi-|npm_|pypi-|Bearer )"
    r"(?=[\w.-]*\d)(?=[\w.-]*[A-Z])[\w.-]{16,}"
    r"|(?i:authorization: *[^\s$])|(?<![\w-])eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.|-----BEGIN [A-Z ]{0,40}PRIVATE KEY"
)
# a name and what looks like a key behind it: a header, an option of a command, a variable
_NAMED = re.compile(
    r"(?<![\w-])-{0,2}([a-zA-Z][\w-]{1,60})[=:\s]\s{0,9}(?=[\w.+/-]{0,200}\d)(?=[\w.+/-]{0,200}[a-z])[\w.+/-]{16}"
)
_WANDB_KEY = re.compile(r"[0-9a-f]{40}")
_USER_OF_URL = re.compile(r"https?://[^\s/?#@]+@|\w+://[^\s/?#@:]*:[^\s/?#@]*@", re.IGNORECASE)
_FIELD_OF_URL = re.compile(r"[?&]([\w-]{1,40})=[^&\s]")


def refuse_secrets(tree: Any) -> None:
    """Raise a UserError that names the first setting which holds a secret, without its value."""
    before = "", ""
    for key, value in leaves(tree, in_lists=True):
        if not isinstance(value, str) or not value:
            continue
        in_list = f"{before[1]} {value}" if before[0] == key else value  # --api-key VALUE
        before = key, value
        last = key.rpartition(".")[2]
        is_wandb_key = last == "key" and _WANDB_KEY.fullmatch(in_list)
        names = (last, *_NAMED.findall(in_list))
        is_named = any(_NAMES.fullmatch(name.replace("-", "_")) for name in names)
        if is_named or is_wandb_key or _VALUES.search(in_list):
            raise UserError(
                f"{key}: got a secret, which a config must not hold (it is written to the run folder), "
                f"allowed: {key}_variable = the name of an environment variable that holds it"
            )
        fields = (field.replace("-", "_") for field in _FIELD_OF_URL.findall(value))
        is_key = any(f in ("key", "sig", "signature") or _NAMES.fullmatch(f) for f in fields)
        if "://" in value and (is_key or _USER_OF_URL.search(value)):
            raise UserError(
                f"{key}: got a URL with a key or password, allowed: a URL without one, and the name of an "
                "environment variable that holds it"
            )


def from_environment(key: str, variable: str, *, default: str = "") -> str:
    """The secret that an environment variable holds; only `default` may be unset."""
    value = os.environ.get(variable, "")
    if variable and not value and variable != default:
        raise UserError(f"{key}: got {variable!r}, allowed: an environment variable that is set")
    return value
