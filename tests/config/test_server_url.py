"""A server that a config names is the server that is called, with the user's key."""

from __future__ import annotations

import pytest

from penstock.config.server_url import server_url
from penstock.config.source import load_config
from penstock.errors import UserError

DISGUISED = [
    "//host:8000",
    " http://host",
    "http://host ",
    "ht\ttp://host",
    "http://ho\nst",
    "ftp://host",
    "file:///etc/passwd",
    "host:8000",
    "http://",
    "http://host:0",
    "http://host:99999",
    "http://good@evil",
    "http://good\\.evil",
    "http://host?x=1",
    "http://host#x",
    "http://h\u00f6st",
]


@pytest.mark.parametrize("url", DISGUISED)
def test_an_address_that_is_not_plainly_http_is_refused(url: str) -> None:
    tree = f"['{url}']" if url.isprintable() and "\\" not in url else None
    with pytest.raises(UserError, match=r"engine\.options\.urls: got"):
        server_url("engine.options.urls", url)
    if tree and "@" not in url:
        with pytest.raises(UserError, match=r"engine\.options\.urls: got"):
            load_config(None, ["engine.name=openai", f"engine.options.urls={tree}"])


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("HTTP://Host:8000/", "http://host:8000"),
        ("https://host/v1/", "https://host/v1"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_address_has_one_form(url: str, read: str) -> None:
    assert server_url("url", url) == read
