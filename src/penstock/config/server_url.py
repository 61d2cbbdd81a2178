"""The addresses of servers that a config names: the one reader of them.

Clients of HTTP drop blanks and tabs, and take other schemes for http. What a user reads in a config must be what
is called, with the user's key, so an address that is not plainly http or https is refused.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from penstock.errors import UserError


def server_url(key: str, url: str) -> str:
    """The address in one form, without a slash at its end; `key` names the setting in an error."""
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or half an IPv6 address
        is_server = False
    is_plain = url.isascii() and url.isprintable() and not set(" \\@?#") & set(url)
    if not is_server or not is_plain:
        raise UserError(f"{key}: got {url!r}, allowed: http://HOST:PORT or https://HOST")
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"
