"""`holdfast notify`: targets of alerts, results of deliveries, and a test message."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.rest import notifications
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.rest import lists

app = typer.Typer(
    help="Show where alerts are sent, and send test messages. Targets are configured in the file of `serve --notify`.",
    no_args_is_help=True,
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the target.")]


@app.command()
def ls(url: Url = None, as_json: AsJson = False) -> None:
    """List targets, and the last result of each. Secrets are not shown."""
    with console.service(url, as_json) as api:
        notification_targets = notifications.targets(api)
    console.listed(lists.TARGETS, notification_targets, "The file of --notify has no target.", as_json)


@app.command()
def test(name: Name, url: Url = None, as_json: AsJson = False) -> None:
    """Send a test message to a target, now. Exit status 1 if it is not accepted."""
    with console.service(url, as_json) as api:
        delivery = notifications.send_test(api, name)
    if as_json:
        console.print_json(delivery)
    elif delivery.delivered:
        console.out().print(f"{name} accepted the test message", markup=False)
    else:
        console.err().print(f"{name} could not be reached: {delivery.problem}\n  {delivery.hint}", markup=False)
    if not delivery.delivered:
        raise typer.Exit(1)
