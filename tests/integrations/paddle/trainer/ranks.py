"""The script `train` in the ranks of `tests.integrations.resuming`. PaddleFormers reads them while it is imported."""

from __future__ import annotations

import os

from tests.integrations.paddle import gloo


def main() -> None:
    about = os.environ
    gloo.place(int(about.get("RANK", "0")), int(about.get("WORLD_SIZE", "1")), int(about.get("MASTER_PORT", "0")))
    gloo.complete()
    from tests.integrations.paddle.trainer import train

    train.main()


if __name__ == "__main__":
    main()
