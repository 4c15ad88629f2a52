"""The version of Paddle that was tested."""

from __future__ import annotations

from functools import cache

from holdfast.save_warning import warn

TESTED = "3.3.1"


@cache
def check_version() -> None:
    """Warn once of a version of Paddle other than the tested one."""
    import paddle

    version = str(paddle.__version__)
    if version != TESTED:
        warn(f"Holdfast was tested with paddlepaddle {TESTED}, and this is {version}: compare a restored training once")
