"""Adapters alone on their way to the servers (R07), and the reasons for which whole weights have to be sent."""

from collections.abc import Sequence

import torch

from coordexp.rollout.adapter_fallback import AdapterRefused
from coordexp.rollout.backend import AdapterWeights
from coordexp.rollout.server_weights import Link, Sent, send

# A server that says one of these would say it again. One that says anything else is left out until it is back.
FOR_GOOD = frozenset({"no_lora", "base_changed", "adapter_refused", "update_failed", "bad_request", "no_route"})


def send_adapter(
    links: Sequence[Link], adapter: AdapterWeights, version: str, device: torch.device, seconds: float
) -> Sent:
    for link in links:
        if link.facts.foreign:
            raise AdapterRefused(
                f"{link.client.name}: it is a server of ms-swift, which does not say whether it took an adapter"
            )
    config, weights = adapter
    sent = send(links, weights, version, device, seconds, adapter=config)
    for index, code in sent.codes.items():
        if code in FOR_GOOD:
            raise AdapterRefused(sent.failed[index].splitlines()[0])
    return sent
