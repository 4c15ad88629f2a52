"""To whom a daemon's owner shows the token: to that daemon alone."""

from __future__ import annotations

import pytest

from holdfast_formats.owner_key import OwnerKey


@pytest.mark.parametrize(
    ("bound", "asked", "port", "address"),
    [
        ("127.0.0.1", "127.0.0.1", 8420, "http://127.0.0.1:8420"),
        ("127.0.0.1", "localhost", 8420, "http://127.0.0.1:8420"),  # and not ::1, where somebody else may listen
        ("::1", "localhost", 8420, "http://[::1]:8420"),
        ("0.0.0.0", "localhost", 8420, "http://127.0.0.1:8420"),
        ("0.0.0.0", "127.0.0.7", 8420, "http://127.0.0.7:8420"),
        ("0.0.0.0", "0.0.0.0", 8420, "http://0.0.0.0:8420"),
        ("::", "::1", 8420, "http://[::1]:8420"),
        ("10.0.0.5", "10.0.0.5", 8420, "http://10.0.0.5:8420"),
        ("127.0.0.1", "127.0.0.1", 8421, None),
        ("127.0.0.1", "127.0.0.2", 8420, None),
        ("127.0.0.1", "::1", 8420, None),
        ("0.0.0.0", "::1", 8420, None),
        ("0.0.0.0", "10.0.0.6", 8420, None),
        ("0.0.0.0", "evil.example", 8420, None),
        ("127.0.0.1", "evil.localhost", 8420, None),
        ("10.0.0.5", "127.0.0.1", 8420, None),
    ],
)
def test_a_key_is_for_one_daemon(bound: str, asked: str, port: int, address: str | None) -> None:
    """Where another user's process could listen at the same port, the token is not shown."""
    assert OwnerKey(host=bound, port=8420, token="hf_x").address(asked, port) == address


@pytest.mark.parametrize("token", ["", "x", "hf_a b", "hf_a\r\nX: y", "hf_" + "a" * 200])
def test_what_is_no_token(token: str) -> None:
    """What could not stand in a header is no key; a key that is printed does not show its token."""
    with pytest.raises(ValueError, match="key"):
        OwnerKey(host="127.0.0.1", port=1, token=token)
    assert "secret" not in repr(OwnerKey(host="127.0.0.1", port=1, token="hf_secret"))
