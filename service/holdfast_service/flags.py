"""The flags of `holdfast serve`, and its help, in the style of the other commands'."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from holdfast_formats.disk.compacting import RULES

_LINE = "Run this machine's checkpoint daemon until it is interrupted."
_EPILOG = """\
Examples:
  holdfast serve --root /fast/checkpoints
  holdfast serve --root /fast/checkpoints --replica /nas/checkpoints --keep 5
  holdfast serve --root /fast/checkpoints --listen 0.0.0.0:8420 --behind-tls

Every option can also be set in the environment: HOLDFAST_ROOT, HOLDFAST_LISTEN, and so on.

Exit statuses: `holdfast help exit`."""


class Flag(NamedTuple):
    """`metavar` is None for a flag without a value; `default` is the text of one that is no constant."""

    name: str
    metavar: str | None
    help: str
    default: str = ""
    choices: tuple[str, ...] | None = None
    repeats: bool = False


_GROUPS = {
    "Paths and names": (
        Flag("root", "DIR", "Directory of the checkpoints, or s3://BUCKET/PREFIX."),
        Flag("state", "DIR", "For a bucket: directory for what this machine's daemon keeps.", "below XDG_STATE_HOME"),
        Flag("alone", None, "For buckets without conditional writes: no other daemon writes to them."),
        Flag(
            "encryption", "KIND", "For buckets: encryption of new objects, AES256, aws:kms or aws:kms=KEY.", "the bucket's"
        ),
        Flag("storage-class", "CLASS", "For a root in a bucket: class of the checkpoints' objects.", "the bucket's"),
        Flag("listen", "HOST:PORT", "Address of the HTTP service, or 'none'.", "127.0.0.1:8420"),
        Flag("socket", "PATH", "Unix socket for the ranks.", "in the user's runtime directory"),
        Flag("node", "NAME", "Name of this machine in logs and in the catalog.", "the host name"),
        Flag("catalog", "URL", "SQLAlchemy URL of the catalog.", "SQLite under --root, or under --state"),
        Flag(
            "exchange",
            "HOST:PORT",
            "Address at which other machines' daemons read saves of this machine's ranks.",
            "a free port at the address that reaches --catalog",
        ),
        Flag("export-root", "DIR", "Directory for export and import jobs.", "none, these jobs are refused"),
    ),
    "Memory and disk": (
        Flag("arena-bytes-max", "BYTES", "Limit on shared memory.", "94% of the memory of machine and cgroup"),
        Flag(
            "run-share", "PERCENT", "Share that one run may reserve of the shared memory that other runs have not reserved."
        ),
        Flag(
            "token-share",
            "PERCENT",
            "The same limit for all runs of tokens with one run pattern, over HTTP; admins of all runs have no such limit.",
        ),
        Flag("spill", "auto|never", "Stage on the root's disk if memory has no room."),
        Flag("write-bytes-per-second", "BYTES", "Limit of the rate of writes to the root.", "no limit"),
    ),
    "Checkpoints": (
        Flag("keep", "N", "Keep the newest N verified checkpoints of each run without a policy.", "all"),
        Flag("keep-full", "N", "Thin checkpoints older than N whole ones to their weights.", "all stay whole"),
        Flag(
            "keep-optim",
            "exact|bf16|int8",
            "Store older checkpoints in fewer bytes: optimizer states by this rule.",
            "as saved",
            RULES,
        ),
        Flag("keep-optim-full", "N", "With --keep-optim: only checkpoints older than N exact ones."),
        Flag("replica", "[NAME=]DIR", "Also copy verified checkpoints to this directory. Repeatable.", repeats=True),
        Flag("replica-bytes-per-second", "BYTES", "Limit of the rate of copies to each replica.", "no limit"),
        Flag(
            "tier",
            "[NAME=]PLACE",
            "Also copy verified checkpoints to s3://BUCKET/PREFIX, or to this directory. Repeatable.",
            repeats=True,
        ),
        Flag(
            "tier-keep", "N", "Keep the newest N copies of each run in each tier, and those of what is in the root.", "all"
        ),
        Flag("tier-storage-class", "CLASS", "Class of the copies' objects in tiers in buckets.", "the bucket's"),
        Flag("tier-bytes-per-second", "BYTES", "Limit of the rate of copies to each tier.", "no limit"),
        Flag("scrub-bytes-per-second", "BYTES", "Rate at which old checkpoints are verified again; 'none' turns it off."),
        Flag("scrub-every", "SECONDS", "Verify each checkpoint again after this time.", "604800, 7 days"),
        Flag("trash-days", "DAYS", "How long to keep deleted runs; 'none' keeps them for ever."),
        Flag(
            "on-commit",
            "COMMAND",
            "Run this command after each commit, with HOLDFAST_RUN, HOLDFAST_STEP, HOLDFAST_PATH and others in its "
            "environment. No shell is used.",
        ),
        Flag("on-commit-timeout", "SECONDS", "Time limit of that command."),
    ),
    "Alerts and other daemons": (
        Flag(
            "on-event", "COMMAND", "Run this command for each event, with the event as JSON on its input. No shell is used."
        ),
        Flag("on-event-kinds", "KIND,…", "Only for events of these kinds, such as run-died,save-aborted.", "all"),
        Flag("on-event-timeout", "SECONDS", "Time limit of that command."),
        Flag("notify", "FILE", "Send alerts to the targets in this TOML file: webhooks, Slack, mail."),
        Flag("watch", "URL", "Show the runs of the daemon at this address as well. Repeatable.", repeats=True),
        Flag("watch-tokens", "FILE", "A line `URL TOKEN` for each watched daemon that requires a token."),
        Flag("watch-ca", "FILE", "Certificates to trust for --watch.", "the system's"),
    ),
    "Access": (
        Flag("behind-tls", None, "A proxy in front of --listen terminates TLS; tokens are required."),
        Flag(
            "allowed-hosts",
            "NAME,…",
            "More host names for browsers, in addition to addresses, localhost and this machine's name.",
        ),
        Flag("loopback-open", None, "Require no tokens on a loopback address: every user of this machine is an admin."),
        Flag("insecure-no-tokens", None, "Require no tokens at all: every client that reaches --listen is an admin."),
        Flag("metrics-open", None, "Serve /metrics without a token."),
        Flag("logins", "FILE", "Trust the headers of a login proxy, such as oauth2-proxy, as this JSON file says."),
        Flag("audit-days", "DAYS", "How long the audit log keeps entries."),
        Flag("socket-group", "GROUP", "Members of this group may use --socket too.", "only this user"),
    ),
    "Lifetime and logs": (
        Flag("silence-max", "SECONDS", "A remote rank that is silent for this long counts as dead."),
        Flag("exit-when-idle", "SECONDS", "Exit after this time without use.", "never"),
        Flag("log-level", "LEVEL", "debug, info, warning or error."),
        Flag("log-format", "text|json", "Log lines as text, or as JSON."),
    ),
}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Capitals as in the help of the other commands."""

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = "Usage: ",
    ) -> None:
        super().add_usage(usage, actions, groups, prefix)


def parser(defaults: Mapping[str, Any]) -> argparse.ArgumentParser:
    """The parser of all flags, whose values are text, or None. `defaults` are those of the configuration, for the help."""
    made = argparse.ArgumentParser(
        "holdfast serve",
        usage="holdfast serve [OPTIONS]",
        description=_LINE,
        epilog=_EPILOG,
        formatter_class=_Formatter,
        add_help=False,
    )
    for title, flags in _GROUPS.items():
        group = made.add_argument_group(title)
        for flag in flags:
            name, text = f"--{flag.name}", _help(flag, defaults)
            if flag.metavar is None:
                group.add_argument(name, action="store_const", const="true", help=text)
            elif flag.repeats:
                group.add_argument(name, action="append", metavar=flag.metavar, help=text)
            else:
                group.add_argument(name, choices=flag.choices, metavar=flag.metavar, help=text)
    group.add_argument("-h", "--help", action="help", help="Show this message and exit.")
    return made


def _help(flag: Flag, defaults: Mapping[str, Any]) -> str:
    known = defaults[flag.name.replace("-", "_")]
    default = flag.default
    if not default and isinstance(known, str | int | float | Path) and not isinstance(known, bool):
        default = f"{known:g}" if isinstance(known, float) else str(known)
    text = f"{flag.help} [default: {default}]" if default else flag.help
    return text.replace("%", "%%")
