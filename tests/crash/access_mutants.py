"""What `mutations` takes away of the access checks: authentication, authorization, admission and the limits of bodies."""

from __future__ import annotations

from tests.crash.mutants import Mutation

_API = "service/holdfast_service/api"
_TOKENS = "service/holdfast_service/control/access/tokens.py"
_MIDDLEWARE = "tests/api/access/test_middleware.py"
_AUTHORIZATION = "tests/api/access/test_authorization.py"
_LOGINS = "tests/api/access/test_logins.py"
_CALLERS = "tests/daemon/arena/test_callers.py"

ACCESS = (
    Mutation(
        "asking for a token",
        f"{_API}/access/authentication.py",
        "            raise missing()\n",
        "            principal = ANYBODY\n",
        (_MIDDLEWARE,),
    ),
    Mutation(
        "revocation",
        _TOKENS,
        "            if row.revoked is not None:\n                raise Unau",
        "            if False:\n                raise Unau",
        ("tests/control/access/test_tokens.py",),
    ),
    Mutation(
        "a token's end",
        _TOKENS,
        "            if row.expires is not None and row.expires <= now:\n",
        "            if False:\n",
        ("tests/control/access/test_tokens.py",),
    ),
    Mutation(
        "the scope, before the body",
        f"{_API}/access/middleware.py",
        "                required.check(principal)\n",
        "",
        (_MIDDLEWARE,),
    ),
    Mutation(
        "the scope, in both checks",
        f"{_API}/access/authorization.py",
        "            principal.require(self.scope)\n",
        "            pass\n",
        (_MIDDLEWARE,),
    ),
    Mutation(
        "a declaration on every route",
        f"{_API}/access/authorization.py",
        "    if len(found) != 1 or not isinstance(found[0], Needs):\n",
        "    if not found:\n        return Needs(None)\n    if False:\n",
        (_AUTHORIZATION,),
    ),
    Mutation(
        "an admin for what no route serves",
        f"{_API}/access/authorization.py",
        'Needs("read") if safe else Needs("admin", "all")',
        'Needs("read")',
        (_MIDDLEWARE,),
    ),
    Mutation(
        "the runs of a token, in paths",
        f"{_API}/access/authorization.py",
        'return self.path.get("run") if self.needs.runs != "viewer" else None',
        "return None",
        (_AUTHORIZATION,),
    ),
    Mutation(
        "the runs of a token, in lists",
        "service/holdfast_service/control/database/database.py",
        "translated(), Session(self._reading) as session:\n            restrict(session)\n",
        "translated(), Session(self._reading) as session:\n",
        (_MIDDLEWARE,),
    ),
    Mutation(
        "the runs of a token, in bodies",
        f"{_API}/access/authorization.py",
        "        else:\n            principal.require_run(run)\n",
        "",
        (_MIDDLEWARE,),
    ),
    Mutation(
        "the Host",
        f"{_API}/access/authentication.py",
        "        if bearer is None:  # a browser",
        "        if False:  # a browser",
        (_MIDDLEWARE,),
    ),
    Mutation(
        "the Origin",
        f"{_API}/access/authentication.py",
        "            self._check_origin(headers, required=cookie is not None or login is not None)\n",
        "            pass\n",
        (_MIDDLEWARE,),
    ),
    Mutation(
        "the word of a browser that shows a cookie",
        f"{_API}/access/authentication.py",
        "required=cookie is not None or login is not None)",
        "required=login is not None)",
        (_MIDDLEWARE,),
    ),
    Mutation(
        "the secret of a login proxy",
        f"{_API}/access/logins.py",
        "        if secret is None or not hmac.compare_digest(secret.encode(), self.secret.encode()) or not",
        "        if not",
        (_LOGINS,),
    ),
    Mutation(
        "the address of a login proxy",
        f"{_API}/access/logins.py",
        " or not self._is_proxy(peer):\n",
        ":\n",
        (_LOGINS,),
    ),
    Mutation(
        "the runs of a token, of watched daemons",
        "service/holdfast_service/wings/notify/watched_daemons/watched.py",
        "(one for one in merged if sees(one[0].summary.run))",
        "iter(merged)",
        ("tests/wings/notify/watched_daemons/test_watched.py",),
    ),
    Mutation(
        "the limit of a token",
        f"{_API}/access/admission.py",
        "                if rate.requests < 1:\n",
        "                if False:\n",
        ("tests/api/access/test_admission.py",),
    ),
    Mutation(
        "a token on loopback addresses",
        f"{_API}/access/policy.py",
        "    return Policy(tokens=True, tls",
        "    return Policy(tokens=not here, tls",
        ("tests/api/access/test_policy.py",),
    ),
    Mutation(
        "the length of bodies",
        f"{_API}/access/bodies.py",
        "        if len(body) > BODY_BYTES_MAX:\n",
        "        if False:\n",
        ("tests/api/access/test_connections.py",),
    ),
    Mutation(
        "members that stand twice",
        f"{_API}/access/bodies.py",
        "    if len(unique) != len(pairs):\n",
        "    if False:\n",
        ("tests/api/access/test_connections.py",),
    ),
    Mutation(
        "heads that trickle",
        f"{_API}/access/connections.py",
        "        self.transport.abort()\n",
        "        pass\n",
        ("tests/api/access/test_connections.py",),
    ),
    Mutation(
        "the number of connections",
        f"{_API}/access/connections.py",
        "        if len(self.connections) > connections_max() and not self._make_room():\n",
        "        if False:\n",
        ("tests/api/access/test_connections.py",),
    ),
    Mutation(
        "who is at the socket",
        "service/holdfast_service/daemon/rank_connection.py",
        "            self._callers.check(caller)\n",
        "            pass\n",
        (_CALLERS,),
    ),
    Mutation(
        "who is at the holder's socket",
        "service/holdfast_service/daemon/arena/holder.py",
        "            if not is_ours(connection):\n",
        "            if False:\n",
        (_CALLERS,),
    ),
    Mutation(
        "whose the holder is",
        "service/holdfast_service/daemon/arena/fd_keeper.py",
        "        Callers().check(Caller.of(connection))",
        "        pass",
        (_CALLERS,),
    ),
    Mutation(
        "whose the socket's directory is",
        "service/holdfast_service/daemon/arena/callers.py",
        "    if status.st_uid not in (0, os.geteuid()):\n",
        "    if False:\n",
        (_CALLERS,),
    ),
)
