"""The part of a rollout server that only clients of ms-swift use.

Such a client has no session. Its first bucket begins an update, and each of the calls that it makes after its
weights ends the update. Versions that it does not name are numbered.
"""

from math import prod
from typing import Annotated, Any

import torch
from pydantic import Field

from coordexp.servers.protocol import Metadata, Name, Text, WeightMessage
from coordexp.servers.updates import Updates, check_bucket


class LoadTensor(WeightMessage):  # POST /update_named_param/
    name: Text
    dtype: Name
    shape: Annotated[list[Annotated[int, Field(ge=0, le=2**48)]], Field(max_length=64)]


class SwiftClients:
    """Updates without a session, and the routes for them."""

    def __init__(self, engine: Any, updates: Updates) -> None:
        self.engine, self.updates = engine, updates
        self._count = 0  # updates that began so far

    def routes(self) -> list[tuple[str, str, Any]]:
        return [
            ("GET", "/get_model_state_keys/", self.get_state_keys),
            ("POST", "/get_engine_type/", self.get_engine_type),
            ("POST", "/update_named_param/", self.load_tensor),
            ("POST", "/process_weights_after_loading/", self.finish_update),
            ("POST", "/reset_prefix_cache/", self.clear_caches),
            ("POST", "/reset_mm_cache/", self.clear_caches),
            ("POST", "/reset_encoder_cache/", self.clear_caches),
        ]

    async def get_state_keys(self) -> dict[str, list[str]]:
        return {"keys": await self.engine.state_keys()}

    async def get_engine_type(self) -> dict[str, Any]:
        return {"engine_type": "AsyncLLMEngine", "enable_multi_turn": False}

    async def begin(self, message: WeightMessage, is_adapter: bool = False) -> None:
        """Begin an update before its first bucket, unless the bucket came with a session."""
        if message.session is None and self.updates.update is None:
            self.updates.check_session(None)
            self._count += 1
            await self.updates.begin(None, f"plain-{self._count}", is_adapter)

    async def load_tensor(self, tensor: LoadTensor) -> dict[str, str]:
        dtype = getattr(torch, tensor.dtype.removeprefix("torch."), None)
        count = prod(tensor.shape)
        place: Metadata = {"start_idx": 0, "end_idx": count * getattr(dtype, "itemsize", 0), "numel": count}
        bucket = [place | tensor.model_dump(include={"name", "dtype", "shape"})]
        check_bucket(bucket)
        await self.begin(tensor)
        await self.updates.load(tensor.session, bucket)
        return {"message": "taken"}

    async def finish_update(self) -> dict[str, str]:
        self.updates.check_session(None)
        if self.updates.update is not None:
            await self.updates.finish(None, self.updates.update.version)
        return {"message": "done"}

    async def clear_caches(self) -> dict[str, str]:
        await self.finish_update()
        async with self.updates.answers():
            await self.engine.clear_caches()
        return {"message": "done"}
