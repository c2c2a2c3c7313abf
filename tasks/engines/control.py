"""Calls to an engine's HTTP control routes: one request each, never repeated, each under its deadline. Must not know
which engine answers, nor put a key into an error, a log or a repr."""

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

from weighbridge.errors import EngineError, UsageError
from weighbridge.tasks.engines.http import FAILURES, Http

_TAIL = 600  # characters of an answer that an error shows

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Keys:
    """What an engine wants to see: `api` on its normal routes, `admin` on its control routes. Shown nowhere."""

    api: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)


class Control:
    """One engine's address. Raises UsageError for one that is no HTTP address, or that others can reach too.

    The control routes of today's engines answer without a key, or with one that goes over the wire as it is: whoever
    reaches them can load any folder. So only loopback is spoken to, unless `remote` says that the way there is guarded.
    """

    def __init__(self, url: str, *, keys: Keys, remote: bool) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise UsageError(f"{url!r} is no engine's address; write http://127.0.0.1:8000. Nothing was started.")
        if not remote and not _is_loopback(parts.hostname):
            raise UsageError(
                f"the engine at {url} is not on this machine's loopback, and its control routes load any folder for "
                "whoever reaches them. Nothing was started. Let it listen on 127.0.0.1, or say engine_remote when "
                "something else guards the way."
            )
        self.url = url.rstrip("/")
        self._keys = keys
        self._http = Http()

    def get(self, route: str, *, seconds: float, admin: bool = True) -> Answer:
        """The JSON object that a route answers; an empty one where it answers anything else. Raises EngineError."""
        return self._ask("GET", route, seconds, admin)

    def post(
        self,
        route: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        seconds: float,
        admin: bool = True,
    ) -> Answer:
        """The same for what a route answers to a body and a query. An error's message names the answer."""
        return self._ask("POST", route, seconds, admin, body={} if body is None else body, query=query)

    def _ask(
        self,
        method: str,
        route: str,
        seconds: float,
        admin: bool,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Answer:
        key = self._keys.admin if admin and self._keys.admin else self._keys.api
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        content = b"" if body is None else json.dumps(body).encode()
        if content:
            headers["Content-Type"] = "application/json"
        asked = self.url + route + (f"?{urlencode(query)}" if query else "")
        try:
            status, data = self._http.ask(method, asked, headers=headers, content=content, seconds=seconds)
        except TimeoutError as error:
            raise EngineError(f"{self.url}{route} did not answer within {seconds:.1f} s.") from error
        except FAILURES as error:
            raise EngineError(f"{self.url}{route} could not be asked: {type(error).__name__}: {error}.") from error
        said = data.decode(errors="replace").strip()
        # Some servers show what they were sent.
        told = (said if key is None else said.replace(key, "..."))[:_TAIL]
        if status in (401, 403):
            which = "admin key" if admin and self._keys.admin else "key"
            raise EngineDenied(f"{self.url}{route} does not take the {which} it was given ({status}).")
        if status == 404:
            raise RouteMissing(f"{self.url} has no {route}.")
        if status != 200:
            raise EngineError(f"{self.url}{route} answered {status}: {told or 'nothing'}")
        try:
            answer = json.loads(said) if said else {}
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.url}{route} answered no JSON: {told}") from error
        return answer if isinstance(answer, dict) else {}


class EngineDenied(EngineError):
    """The engine wants another key."""


class RouteMissing(EngineError):
    """The engine has no such route: another engine, another release, or one started without it."""


def version_in(answer: Answer) -> int | None:
    """The version in an answer with a `weight_version`; None for what no sync of ours has set."""
    said = answer.get("weight_version")
    return int(said) if isinstance(said, str) and said.isascii() and said.isdigit() and len(said) <= 18 else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
