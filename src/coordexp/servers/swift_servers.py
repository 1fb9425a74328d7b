"""Rollout servers of ms-swift 4.6: how a learner uses one, and what our plugin in one needs.

Such a server has no owner and no versions, answers 200 although a worker failed, and responds to nothing
while it generates. It has no repeat guard, unless it was started with our plugin (`coordexp.servers`), which reads
the guard's settings from the environment and reports them.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordexp.config.rollout import RepeatTerminate
from coordexp.errors import EngineError
from coordexp.rollout.backend import AdapterConfig
from coordexp.rollout.weights import AdapterRefused
from coordexp.servers.client import OTHERWISE, RequestRefused, ServerClient, ServerFacts
from coordexp.servers.protocol import Message, Response, read_response
from coordexp.servers.send import FlatBucket, Link

GUARD_ROUTE = "/coordexp_repeat_guard/"  # the route that our plugin adds
# The calls after the weights, and whether older servers may lack them.
ENDING = (
    ("/process_weights_after_loading/", True),
    ("/reset_prefix_cache/", False),
    ("/reset_mm_cache/", True),
    ("/reset_encoder_cache/", True),
)
TEXT, FILE = "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON", "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON_PATH"
UNSET = "unset it: `coordexp serve` takes the guard from rollout_matching.repeat_terminate"


class PluginGuard(Response):
    """The response of GUARD_ROUTE."""

    guard: dict[str, Any]
    workers: int


def read_facts(
    client: ServerClient, world_size: int, guard: RepeatTerminate
) -> tuple[ServerFacts, dict[str, Any] | None]:
    """Return the facts about a server, and the settings of the guard that its plugin has loaded, if it has one.
    Raise EngineError if the run needs the guard and it is not loaded, or not by all workers."""
    facts = ServerFacts(world_size, reports_version=False, responds_while_busy=False)
    body = client.get_if_present(GUARD_ROUTE)
    if body is None and guard.enabled:
        raise EngineError(
            f"{client.name}: this ms-swift server reports no repeat guard, but "
            "rollout_matching.repeat_terminate.enabled is true",
            "start it with `swift rollout --external_plugins FILE`, where FILE is coordexp.servers."
            "SWIFT_REPEAT_GUARD, as docs/operations.md shows, or with `coordexp serve`, or set enabled: false, "
            f"{OTHERWISE}",
        )
    if body is None:
        return facts, None
    plugin: PluginGuard = read_response(PluginGuard, body, client.name, GUARD_ROUTE)
    if plugin.workers < world_size:
        raise EngineError(
            f"{client.name}: the repeat guard of its plugin is active in {plugin.workers} of its {world_size} "
            "workers",
            "start it again and see what it printed; the plugin was written for ms-swift 4.6",
        )
    return facts, plugin.guard


class SwiftLink(Link):
    """A group with a server of ms-swift. Anybody may join it or send weights to it."""

    is_ours = False
    is_alive = _may_join = True

    def begin(self, version: str, adapter: AdapterConfig | None, until: float) -> None:
        """Do nothing: the first bucket begins an update."""
        if adapter is not None:
            problem = "it is an ms-swift server, which does not report whether it loaded an adapter"
            raise AdapterRefused(f"{self.client.name}: {problem}")

    def load(self, bucket: FlatBucket, until: float) -> None:
        self._begin_load("/update_flattened_params/", {"metadatas": bucket.metadatas}, until)
        self._broadcast(bucket.part, until)

    def finish(self, version: str, until: float) -> None:
        self._wait_for_load(until)
        for path, is_optional in ENDING:
            try:
                self.post(path, Message(), until)
            except RequestRefused as refused:
                if refused.status != 404 or not is_optional:
                    raise
                self.notify(
                    f"warning: {self.client.name} has no {path}: its answers may use results of the old weights"
                )

    def leave(self) -> None:
        with suppress(EngineError):
            self.post("/close_communicator/", Message(), time.monotonic() + self.client.timeouts.health)
        super().leave()

    def _join_message(self, size: int, timeout: float) -> dict[str, Any]:
        return {"host": self._host, "port": self.client.group_port, "world_size": size}

    @property
    def _has_joined(self) -> bool:
        return self._joined.has_ended


def check_guard_environment(guard: RepeatTerminate) -> None:
    """Raise EngineError if the environment has other guard settings than the config. A server takes those of
    its config, and ignoring the others silently would be wrong."""
    if TEXT not in os.environ and FILE not in os.environ:
        return
    if (exported := read_guard_settings()) != guard:
        raise EngineError(
            f"{TEXT if TEXT in os.environ else FILE} is {exported.model_dump_json()}, but "
            f"rollout_matching.repeat_terminate is {guard.model_dump_json()}",
            UNSET,
        )


def read_guard_settings(fix: str = UNSET) -> RepeatTerminate:
    """Return the settings in the environment. Raise EngineError if one is missing: its default might not be what
    the learner uses. `fix` says what to do then."""
    name = TEXT if TEXT in os.environ else FILE
    try:
        text = os.environ[TEXT] if name == TEXT else Path(os.environ[FILE]).read_text(encoding="utf-8")
        values = json.loads(text)
        missing = sorted(set(RepeatTerminate.model_fields) - set(values))
        if missing:
            raise ValueError(f"{', '.join(missing)}: missing")
        return RepeatTerminate.model_validate(values)
    except (KeyError, OSError, TypeError, ValueError, ValidationError) as error:
        reason = "it is not set" if isinstance(error, KeyError) else str(error)
        raise EngineError(f"{name}: the repeat guard cannot be loaded ({reason})", fix) from error
