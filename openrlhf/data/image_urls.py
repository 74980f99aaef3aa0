"""Fetches images from the web: over HTTPS, from allowed hosts and public addresses only.

A dataset or an environment thus cannot reach into the network of the run.
"""

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Collection, Sequence
from urllib.parse import quote, urljoin, urlsplit

from openrlhf.errors import ErrorCode, UsageError

TIMEOUT = 30.0
"""Seconds for one image, including redirects."""
MAX_REDIRECTS = 5
PORT = 443


def fetch(url: str, hosts: Collection[str], max_bytes: int) -> bytes:
    """Returns the body that the URL answers with. Raises UsageError if the URL or a redirect is not
    allowed, answers with an error or more than max_bytes, or takes too long. No proxy is used: the connection
    goes to the address that was checked."""
    deadline = time.monotonic() + TIMEOUT
    for _ in range(1 + MAX_REDIRECTS):
        check_url(url, hosts)
        answer = _ask(url, max_bytes, deadline)
        if isinstance(answer, bytes):
            return answer
        url = answer
    raise _unusable(url, f"it redirects more than {MAX_REDIRECTS} times in a row.")


def check_url(url: str, hosts: Collection[str]) -> None:
    """Raises UsageError for a URL that is not https or whose host is not allowed; the host's address is not
    checked."""
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname:
        raise _unusable(url, "only https:// addresses are downloaded.")
    if parts.hostname not in hosts:
        allowed = " ".join([*hosts, parts.hostname])
        text = f"the host {parts.hostname} is not allowed. If you trust it: --data.image_hosts {allowed}"
        raise _unusable(url, text)


def _unusable(url: str, text: str) -> UsageError:
    return UsageError(ErrorCode.UNREADABLE, text, value=url)


def public_addresses(host: str) -> list[str]:
    """Returns all addresses of a host. Raises UsageError if it has none, or one that is not public:
    private, loopback, link-local, ..."""
    try:
        found = socket.getaddrinfo(host, PORT, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _unusable(host, f"the host has no address: {error.strerror or error}.") from error
    addresses = [str(place[0]) for *_, place in found]
    for text in addresses:
        address = ipaddress.ip_address(text.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        if not address.is_global or address.is_multicast:
            raise _unusable(host, f"its address {text} is not public, so no request is sent.")
    return addresses


class _Connection(http.client.HTTPSConnection):
    """A connection to the first of these addresses that answers; the certificate must still be the host's."""

    def __init__(self, host: str, addresses: Sequence[str], port: int, timeout: float) -> None:
        super().__init__(host, port, timeout=timeout)
        self._addresses = addresses

    def connect(self) -> None:
        plain = self._first_that_answers()
        self.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=self.host)

    def _first_that_answers(self) -> socket.socket:
        *others, last = self._addresses
        for address in others:
            try:
                return socket.create_connection((address, self.port), self.timeout)
            except OSError:
                continue
        return socket.create_connection((last, self.port), self.timeout)


def _ask(url: str, max_bytes: int, deadline: float) -> bytes | str:
    """Returns the body, or the URL that the server redirects to."""
    parts = urlsplit(url)
    assert parts.hostname  # ensured by check_url
    connection = _Connection(
        parts.hostname, public_addresses(parts.hostname), parts.port or PORT, _seconds_until(deadline, url)
    )
    target = quote(f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/", safe=_SAFE)
    try:
        connection.request("GET", target, headers={"User-Agent": "openrlhf", "Accept": "image/*"})
        response = connection.getresponse()
        if response.status in _REDIRECTS:
            return urljoin(url, response.headers.get("Location", ""))
        if response.status != 200:
            raise _unusable(url, f"the server answers {response.status} {response.reason}.")
        return _body(response, url, max_bytes, deadline)
    except (OSError, http.client.HTTPException) as error:
        raise _unusable(url, f"{str(error) or type(error).__name__}.") from error
    finally:
        connection.close()


def _body(response: http.client.HTTPResponse, url: str, max_bytes: int, deadline: float) -> bytes:
    blocks, size = [], 0
    while block := response.read1(_BLOCK):
        size += len(block)
        if size > max_bytes:
            raise _unusable(url, f"it has more than {max_bytes} bytes.")
        _seconds_until(deadline, url)
        blocks.append(block)
    return b"".join(blocks)


def _seconds_until(deadline: float, url: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _unusable(url, f"it takes more than {TIMEOUT:g} seconds.")
    return left


_BLOCK = 2**16
_REDIRECTS = (301, 302, 303, 307, 308)
_SAFE = "/?:@!$&'()*+,;=-._~%"
"""Characters of a path and a query that are not percent-encoded."""
