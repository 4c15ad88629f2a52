"""The script `train` in the ranks of `tests.integrations.resuming`. PaddleFormers reads them while it is imported."""

from __future__ import annotations

from tests.integrations.paddle import gloo


def main() -> None:
    gloo.place()
    gloo.complete()
    from tests.integrations.paddle.trainer import train

    train.main()


if __name__ == "__main__":
    main()
