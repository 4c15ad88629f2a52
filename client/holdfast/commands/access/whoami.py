"""`holdfast whoami`: the caller's identity and scopes."""

from __future__ import annotations

from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.printable import visible
from holdfast_formats.rest.access import Grant, Whoami

_BY = {
    "token": "a token",
    "owner": "the token of the daemon's own user",
    "login": "a login at the proxy",
    "anybody": "nothing: this service authenticates no client",
}


def whoami(url: Url = None, as_json: AsJson = False) -> None:
    """Show your user name in the service, and your permissions."""
    with console.service(url, as_json) as api:
        caller = api.get("/v1/whoami", Whoami)
    if as_json:
        console.print_json(caller)
        return
    facts = [("you are", caller.name), ("known by", _BY.get(caller.by, caller.by))]
    for grant in caller.grants or [Grant(scope=caller.scope, runs=caller.runs)]:
        facts.append(("you may", f"{grant.scope} {'all runs' if grant.runs == '*' else grant.runs}"))
    ends = "this daemon ends" if caller.by == "owner" else "for ever"
    facts += [("until", caller.expires or ends), ("from", caller.address)]
    for what, value in facts:
        console.out().print(f"{what:<10}{visible(value)}", markup=False, highlight=False, soft_wrap=True)
