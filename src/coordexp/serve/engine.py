"""The vLLM engine of a rollout server: vLLM's own asynchronous one, with a way in for weights.

With `data_parallel_size` above 1 it has that many replicas. vLLM deals the requests among them; everything about
weights, versions and caches goes to all of them.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from coordexp.errors import EngineError
from coordexp.rollout.engine import (
    cause,
    check_vocabulary,
    has_ended,
    lora_arguments,
    lora_request,
    starting,
    stop_engine,
)
from coordexp.rollout.setup import Setup
from coordexp.serve.answering import RefusedByEngine
from coordexp.serve.refusal import Refusal

BROADCAST = "coordexp_broadcast"
SERVER_SIDE = "coordexp.serve.worker.ServerSide"
ENDING = 3.0  # seconds in which the process of an engine that refuses calls ends, if it does


class ServedEngine:
    """What the server asks of its engine. Everything is awaited, so that nothing holds up the others."""

    def __init__(self, about: Setup) -> None:
        self.about = about
        with starting(about, BROADCAST, SERVER_SIDE) as arguments:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            arguments |= lora_arguments(about.settings.vllm) | replica_arguments(about)
            self.vllm: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self.takes_adapters = about.settings.vllm.enable_lora
        self._adapter: Any = None  # that answers are made with
        self._adapters = 0
        self.max_model_len: int = self.vllm.model_config.max_model_len
        self.most_at_once: int = self.vllm.vllm_config.scheduler_config.max_num_seqs * about.replicas
        self.defaults: dict[str, Any] = self.vllm.model_config.get_diff_sampling_param()
        check_vocabulary(self.vllm.get_tokenizer(), self.vllm.model_config.get_vocab_size(), about.table)

    @property
    def has_ended(self) -> bool:
        return bool(self.vllm.errored) or has_ended(self.vllm.engine_core)

    async def ready(self) -> None:
        await self._call_workers("coordexp_is_ready")

    async def ping(self) -> None:
        """Return when every worker has answered."""
        await self._call_workers("coordexp_ping")

    async def render(self, prompt: dict[str, Any]) -> Any:
        """Return the prompt as token ids and patches, after which its image is not needed any more."""
        from vllm.exceptions import VLLMClientError
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        try:
            parsed = parse_model_prompt(self.vllm.model_config, prompt)
            (rendered,) = await self.vllm.renderer.render_cmpl_async([parsed])
        except (VLLMClientError, ValueError) as error:
            raise RefusedByEngine(str(error)) from error
        return rendered

    async def answer(self, prompt: Any, sampling: dict[str, Any], id: str) -> Any:
        """vLLM's output, when it is whole. `prompt` is a rendered one."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        try:
            drawn = SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY)
            asked = self.vllm.generate(prompt, drawn, id, lora_request=self._adapter)
            (output,) = [output async for output in asked]
        except (VLLMClientError, ValueError) as error:
            raise RefusedByEngine(str(error)) from error
        return output

    async def join(self, host: str, port: int, world_size: int, timeout: float, plain: bool) -> None:
        told = {"host": host, "port": port, "world_size": world_size, "timeout_s": timeout, "plain": plain}
        await self._ask("init_weight_transfer_engine", told)

    async def leave(self) -> None:
        await self._ask("coordexp_leave")

    async def begin(self) -> None:
        """Of whole weights: an adapter belongs to those before."""
        self._adapter = None
        if self.takes_adapters:
            await self._ask("coordexp_remove_adapter")
        await self._ask("start_weight_update")

    async def take(self, metadatas: Sequence[dict[str, Any]], next_bytes: int) -> None:
        told = {"metadatas": list(metadatas), "next_bytes": next_bytes}
        await self._ask("update_weights", told)

    async def finish(self, version: str) -> None:
        """What was computed with the old weights is forgotten before the new version is given out (D23)."""
        await self._ask("finish_weight_update")
        await self._commit(version)

    async def _commit(self, version: str) -> None:
        await self._ask("coordexp_clear_kv_cache")
        await self.forget()
        await self.vllm.update_weight_version(version)
        if (found := await self.vllm.get_weight_version()) != version:
            raise EngineError(f"weights of version {version} were sent, and the engine says it has {found}")

    async def abandon(self) -> None:
        await self._ask("coordexp_abandon")

    async def begin_adapter(self) -> None:
        await self._ask("coordexp_forget_adapter")

    async def take_adapter(self, metadatas: Sequence[dict[str, Any]]) -> None:
        await self._ask("coordexp_take_adapter", list(metadatas))

    async def build_adapter(self, config: dict[str, Any]) -> None:
        """All that can be wrong with it is found here, while answers are still made as before."""
        self._adapters += 1
        await self._ask("coordexp_build_adapter", config, self._adapters)

    async def finish_adapter(self, version: str) -> None:
        self._adapter = None
        await self._ask("coordexp_use_adapter")
        await self._commit(version)
        self._adapter = lora_request(self._adapters)

    async def abandon_adapter(self) -> None:
        await self._ask("coordexp_forget_adapter")

    async def forget(self) -> None:
        if not await self.vllm.reset_prefix_cache():
            raise EngineError("vLLM could not forget the prompts that it computed with the old weights")
        await self.vllm.reset_mm_cache()
        await self.vllm.reset_encoder_cache()

    async def state_keys(self) -> list[str]:
        return list((await self._call_workers("coordexp_state_keys"))[0])

    def close(self) -> None:
        """End the engine and close its sockets. When a replica has died, vLLM leaves them to the event loop, which
        has ended by now, and a socket that is open keeps this process from ending."""
        from vllm.utils.network_utils import close_sockets

        stop_engine(self.vllm.engine_core)
        left = self.vllm.engine_core.resources
        close_sockets(
            (
                left.output_socket,
                left.input_socket,
                left.first_req_send_socket,
                left.first_req_rcv_socket,
                left.stats_update_socket,
            )
        )

    async def _ask(self, method: str, *arguments: Any) -> None:
        """Every worker. What went wrong in one comes as its answer: vLLM would raise it, and leave the answers of
        the others to be taken for those of the next question."""
        try:
            said = await self._call_workers("coordexp_try", method, *arguments)
        except Exception as error:
            if await self._ends():
                raise engine_ended(f"it ended while its workers were asked for {method}") from error
            raise EngineError(cause(str(error)) or type(error).__name__) from error
        for wrong in said:
            if wrong is not None:
                raise EngineError(wrong)

    async def _ends(self) -> bool:
        """Return True if the engine has ended, or does so now: vLLM refuses calls a moment before its process
        ends, with a message about something else."""
        until = time.monotonic() + ENDING
        while not self.has_ended and time.monotonic() < until:
            await asyncio.sleep(0.05)
        return self.has_ended

    async def _call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker of every replica and return all results, in the order of the ranks.
        `AsyncLLM.collective_rpc` also calls them all, but drops the results of every replica but the first."""
        core = self.vllm.engine_core
        by_replica = await core.call_utility_all_async("collective_rpc", method, None, arguments, None)
        return [result for results in by_replica for result in results]


def engine_ended(when: str = "") -> Refusal:
    message = "the vLLM engine has ended: one of its processes has died" + (f"; {when}" if when else "")
    return Refusal(503, "engine_ended", message, "this server's output may say why; start the server again")


def check_devices(about: Setup, gpus: int) -> None:
    """Raise `EngineError` if a server on GPUs sees fewer of them than its replicas need."""
    if about.device.type == "cuda" and gpus < about.world_size:
        raise EngineError(
            f"rollout_matching.vllm: tensor_parallel_size {about.size} * data_parallel_size {about.replicas} is "
            f"{about.world_size} GPUs, and this server sees {gpus}\n  give it {about.world_size} GPUs "
            "(CUDA_VISIBLE_DEVICES, or `coordexp launch --server-gpus`), or lower data_parallel_size"
        )


def replica_arguments(about: Setup) -> dict[str, Any]:
    """Return vLLM's arguments for data-parallel replicas, which it starts side by side."""
    if about.replicas == 1:
        return {}
    from coordexp.serve.coordinator import tie_coordinator_to_server

    tie_coordinator_to_server()
    return {"data_parallel_size": about.replicas}
