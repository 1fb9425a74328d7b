"""What a rollout server says of itself, as far as a launcher asks."""

import httpx

from coordexp.errors import EngineError
from coordexp.rollout.wire import TOKEN

ANSWER_S = 2.0


def asking(token: str | None) -> httpx.Client:
    """A client for the calls below. Proxies of the environment are for the world outside."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(headers=headers, timeout=ANSWER_S, trust_env=False, follow_redirects=True)


def is_ready(client: httpx.Client, base_url: str) -> bool:
    """False while nothing listens there, and while what listens is not well."""
    try:
        return client.get(f"{base_url}/health/").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def world_size(client: httpx.Client, base_url: str) -> int:
    url = f"{base_url}/get_world_size/"
    try:
        answer = client.get(url)
    except httpx.HTTPError as error:
        raise EngineError(f"{url}: {type(error).__name__} {error}\n  is a rollout server there?") from error
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise EngineError(
            f"{url}: the server wants another token than this run has\n"
            f"  set {TOKEN} to what the server was started with"
        )
    try:
        size = answer.json()["world_size"] if answer.is_success else None
    except (ValueError, KeyError, TypeError):
        size = None
    if type(size) is not int or size < 1:
        raise EngineError(
            f"{url}: {answer.status_code} {answer.text[:200]!r} is not the answer of a rollout server\n"
            "  is something else listening there?"
        )
    return size
