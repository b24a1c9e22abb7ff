"""Who may ask the server of `pseudoreal ui`: whoever has the token, by the machine's own address, to read.

Other programs and users of the machine reach the port, too, and so does a web page in the same browser, by a name
that leads to 127.0.0.1 (DNS rebinding). So each request needs the token that the command printed, and a Host header
that names this machine. The first request has the token in its address; the answer puts it into a cookie and leads to
an address without it, so that it does not stay in the browser's history. No answer allows another origin to read it.
"""

import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pseudoreal_trainer.ui.html import message_page

_HOSTS = ("127.0.0.1", "localhost")
_MOST_COOKIE_BYTES = 4096
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def new_token() -> str:
    return secrets.token_urlsafe(32)


class Guard:
    """Passes on only requests that may be answered, and adds the headers of security to every answer."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token
        # Cookies do not tell the ports of a machine apart: two programs at two ports have two names.
        self._cookie = f"pseudoreal-ui-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # the server has neither WebSockets nor a lifespan

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        answer = self._refusal(scope) or self._entrance(scope) or self._without_cookie(scope) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        hosts = Headers(scope=scope).getlist("host")
        if len(hosts) != 1 or _name_in(hosts[0]) not in _HOSTS:
            return _message(421, "Wrong address", "This server answers only to 127.0.0.1 and localhost.")
        if scope["method"] not in ("GET", "HEAD"):
            return _message(405, "Nothing to change", "This server only shows; it takes GET.")
        return None

    def _entrance(self, scope: Scope) -> Response | None:
        """Return the answer to a request with the token in its address."""
        try:
            given = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=20).get("token", [])
        except ValueError:  # more fields: the printed address has one
            return None
        if scope["path"] != "/" or len(given) != 1 or not self._is_token(given[0]):
            return None
        answer = RedirectResponse("/", 303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        return answer

    def _without_cookie(self, scope: Scope) -> Response | None:
        cookies = SimpleCookie()
        try:
            cookies.load(Headers(scope=scope).get("cookie", "")[:_MOST_COOKIE_BYTES])
        except CookieError:
            cookies.clear()
        found = cookies.get(self._cookie)
        if found is not None and self._is_token(found.value):
            return None
        sentence = "Open the address that pseudoreal ui printed; it has the token, and each start makes a new one."
        return _message(403, "The token is missing or wrong", sentence)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(errors="replace"), self._token.encode())


def _name_in(host: str) -> str:
    """Return the name in a Host header, without the port: a tunnel of ssh may have another one."""
    name, _, port = host.partition(":")
    return name.lower() if not port or port.isdecimal() else ""


def _message(status: int, title: str, sentence: str) -> Response:
    return HTMLResponse(message_page(title, sentence), status)
