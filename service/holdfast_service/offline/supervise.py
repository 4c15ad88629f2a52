"""`python -m holdfast_service.offline.supervise FLAGS`: the holder process, and a daemon with these flags below it.

For the first process of a container. If the daemon is killed, its shared memory stays with the holder, which starts the
daemon again. This program checks the flags, opens the holder's socket, and becomes the holder.
"""

from __future__ import annotations

import os
import sys

from holdfast_formats.errors import CheckpointError, exit_status
from holdfast_service.config import is_shared, parse, service_manager, supervised_environment
from holdfast_service.daemon.arena import fd_keeper, holder


def main(arguments: list[str]) -> int:
    """Returns only if it cannot begin, with the exit status of `holdfast serve`."""
    try:
        config = parse(arguments)
        node = config.node if is_shared(config.catalog_url) else ""
        path = fd_keeper.holder_path(config.socket, config.place.directory, node)
        with fd_keeper.reserved(path), fd_keeper.opened(path) as listener:
            command = fd_keeper.holder_command(path, listener.fileno())
            notify = fd_keeper.notify_path(path)
            watched = ["--notify", str(notify), "--above", service_manager().address or ""]
            os.set_inheritable(listener.fileno(), True)
            daemon = ["--supervise", sys.executable, "-m", "holdfast_service", *arguments]
            os.execve(command[0], [*command, *watched, *daemon], supervised_environment(notify, holder.SILENT_S))
    except CheckpointError as error:
        print(f"holdfast serve: {error}", file=sys.stderr)
        return exit_status(error)
    except OSError as error:
        print(f"holdfast serve: cannot open the holder's socket: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
