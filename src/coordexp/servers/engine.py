"""The vLLM engine of a rollout server: vLLM's asynchronous engine, with methods to load weights, and its watchdog.

With `data_parallel_size` above 1 it has that many replicas. vLLM distributes the requests among them. Calls about
weights, versions and caches go to all of them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from coordexp.config.rollout import ENGINE_STEP_TOKENS
from coordexp.errors import EngineError
from coordexp.rollout.start import EngineSetup, check_vocabulary, lora_arguments, lora_request
from coordexp.servers.processes import has_ended, starting, stop_engine
from coordexp.servers.protocol import Refusal, bad_request

SERVER_SIDE = "coordexp.servers.worker.ServerSide"
PING = 15.0  # seconds between two pings, at most: after each, a worker of vLLM spins for a second
LOOK = 0.5  # seconds between two checks for a reply
# The sampling of a learner. Without a seed, vLLM also compiles what clients without seeds use.
FIRST_ANSWERS = {"temperature": 1.0, "top_k": 2, "top_p": 0.9, "max_tokens": 2, "logprobs": 0, "ignore_eos": True}
# vLLM refuses calls a moment before its process ends, with a message about something else.
ENDING = 3.0  # seconds to wait for the end of an engine that has refused a call


class ServedEngine:
    """The engine as the server uses it. Every call is awaited, so none holds up the event loop."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        with starting(setup, SERVER_SIDE) as arguments:
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            arguments = batch_arguments(setup) | arguments | lora_arguments(setup.settings.vllm)
            arguments["data_parallel_size"] = setup.replicas
            self.vllm: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self.accepts_adapters = setup.settings.vllm.enable_lora
        self._adapter: Any = None  # the adapter that answers are made with
        self._adapters = 0
        self.max_model_len: int = self.vllm.model_config.max_model_len
        self.most_at_once: int = self.vllm.vllm_config.scheduler_config.max_num_seqs * setup.replicas
        self.defaults: dict[str, Any] = self.vllm.model_config.get_diff_sampling_param()
        check_vocabulary(self.vllm.get_tokenizer(), self.vllm.model_config.get_vocab_size(), setup.table)

    @property
    def has_ended(self) -> bool:
        return bool(self.vllm.errored) or has_ended(self.vllm.engine_core)

    async def ready(self) -> None:
        """Return once all workers are ready and have made answers, one and then two at a time. vLLM compiles
        functions at their first use, and meanwhile no worker replies to a ping."""
        await self._call_workers("coordexp_is_ready")
        prompt = await self.render({"prompt_token_ids": [0]})
        for replica in range(self.setup.replicas):
            for count in (1, 2):
                await self.answer(prompt, FIRST_ANSWERS | {"n": count}, f"first-{replica}-{count}", replica)

    async def ping(self) -> None:
        """Return once every worker has replied."""
        await self._call_workers("coordexp_ping")

    async def render(self, prompt: dict[str, Any]) -> Any:
        """Return the prompt as token ids and image patches. Its image is not needed any more after that."""
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        with refuse_client_errors():
            parsed = parse_model_prompt(self.vllm.model_config, prompt)
            (rendered,) = await self.vllm.renderer.render_cmpl_async([parsed])
        return rendered

    async def answer(self, prompt: Any, sampling: dict[str, Any], id: str, replica: int | None = None) -> Any:
        """Return vLLM's output for a rendered prompt, once it is complete, from this replica or from any."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        with refuse_client_errors():
            parameters = SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY)
            outputs = self.vllm.generate(
                prompt, parameters, id, lora_request=self._adapter, data_parallel_rank=replica
            )
            (output,) = [output async for output in outputs]
        return output

    async def join(self, host: str, port: int, world_size: int, timeout: float) -> None:
        await self._ask("join", host, port, world_size, timeout)

    async def leave(self) -> None:
        await self._ask("leave")

    async def begin(self, is_adapter: bool) -> None:
        """Begin an update of whole weights or of an adapter. An adapter belongs to the weights before, so one that
        is in use is removed for whole weights."""
        if not is_adapter:
            self._adapter = None
        await self._ask("begin", is_adapter)

    async def load(self, metadatas: Sequence[dict[str, Any]], next_bytes: int) -> None:
        """Load one bucket. `next_bytes` is the length of the next one, if it comes at once."""
        await self._ask("load", list(metadatas), next_bytes)

    async def build_adapter(self, config: dict[str, Any]) -> None:
        """Build the adapter beside the one in use. Everything that can be wrong with it is found here, before the
        old version is touched."""
        self._adapters += 1
        await self._ask("build_adapter", config, self._adapters)

    async def finish(self, version: str, is_adapter: bool) -> None:
        """Put the new weights into use, clear everything that was computed with the old ones, and only then report
        the new version."""
        self._adapter = None
        await self._ask("finish")
        if not await self.vllm.reset_prefix_cache():
            raise EngineError("vLLM could not clear the prompts that it computed with the old weights")
        await self.vllm.reset_mm_cache()
        await self.vllm.reset_encoder_cache()
        await self.vllm.update_weight_version(version)
        if (reported := await self.vllm.get_weight_version()) != version:
            raise EngineError(f"weights of version {version} were sent, but the engine reports version {reported}")
        self._adapter = lora_request(self._adapters) if is_adapter else None

    async def abandon(self, is_adapter: bool) -> None:
        """Forget what was received. Without an adapter, the engine then has neither old nor new weights."""
        await self._ask("abandon", is_adapter)

    def close(self) -> None:
        """End the engine and close its sockets. When a replica has died, vLLM leaves them to the event loop. That
        has ended by now, and an open socket would keep this process from ending."""
        from vllm.utils.network_utils import close_sockets

        stop_engine(self.vllm.engine_core)
        resources = self.vllm.engine_core.resources
        close_sockets(
            (
                resources.output_socket,
                resources.input_socket,
                resources.first_req_send_socket,
                resources.first_req_rcv_socket,
                resources.stats_update_socket,
            )
        )

    async def _ask(self, method: str, *arguments: Any) -> None:
        """Call a method of every worker's receiver, and raise EngineError if it fails in one. A worker returns its
        error as a result. If it raised it, vLLM would take the other workers' results for those of the next
        call."""
        try:
            failures = await self._call_workers("coordexp_try", method, *arguments)
        except Exception as error:
            until = time.monotonic() + ENDING
            while not self.has_ended and time.monotonic() < until:
                await asyncio.sleep(0.05)
            if self.has_ended:
                raise engine_ended(f"it ended while its workers ran {method}") from error
            problem = str(error).removeprefix("Call to collective_rpc method failed: ")
            raise EngineError(problem or type(error).__name__) from error
        for problem, fix in filter(None, failures):
            raise EngineError(problem, fix)

    async def _call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker of every replica, and return all results in the order of the ranks.
        `AsyncLLM.collective_rpc` also calls them all, but drops the results of every replica but the first."""
        core = self.vllm.engine_core
        by_replica = await core.call_utility_all_async("collective_rpc", method, None, arguments, None)
        return [result for results in by_replica for result in results]


class Watchdog:
    """Detects an engine that hangs: its processes are alive but no longer respond.

    Every few seconds, all workers of all replicas get a ping. vLLM forwards it between two decoding steps, so a
    reply shows that the engine's loop and its workers make progress, with or without requests. On a GPU a step
    takes seconds at most. A large model on a slow CPU may need longer, so the deadline is a setting.

    `ping` returns once every worker has replied, which may take `deadline` seconds. `extra_seconds` returns how
    much longer it may take right now, because workers wait for a learner's weights."""

    def __init__(
        self, ping: Callable[[], Awaitable[None]], deadline: float, extra_seconds: Callable[[], float]
    ) -> None:
        self._ping, self._deadline, self._extra_seconds = ping, deadline, extra_seconds
        self.silent = 0.0  # seconds since the ping that has no reply yet
        self._allowed = 0.0  # the largest `extra_seconds` since that ping

    @property
    def problem(self) -> Refusal | None:
        if self.silent <= self._deadline + max(self._allowed, self._extra_seconds()):
            return None
        problem = f"the engine hangs: its processes are alive and have not answered for {self.silent:.0f} s"
        fix = (
            "this server stops itself: start it again, as `coordexp launch` does; if one decoding step takes that "
            "long here, raise rollout_matching.vllm.server.hung_after_s"
        )
        return Refusal(503, "engine_hung", problem, fix)

    async def run(self) -> None:
        """Ping until cancelled, or until a ping fails because the engine has ended."""
        look = min(LOOK, self._deadline / 4)
        while True:
            ping = asyncio.ensure_future(self._ping())
            try:
                while not ping.done():
                    began = time.monotonic()
                    self._allowed = max(self._allowed, self._extra_seconds())
                    await asyncio.wait({ping}, timeout=look)
                    self._allowed = max(self._allowed, self._extra_seconds())
                    # A look that comes late counts as two: then this process itself was suspended.
                    self.silent += min(time.monotonic() - began, 2 * look)
            finally:
                ping.cancel()
            if ping.cancelled() or ping.exception() is not None:
                return
            self.silent = self._allowed = 0.0
            await asyncio.sleep(min(PING, self._deadline / 4))


@contextmanager
def refuse_client_errors() -> Iterator[None]:
    """Turn vLLM's errors about a request into refusals of that request."""
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except (VLLMClientError, ValueError) as error:
        raise bad_request(str(error)) from error


def engine_ended(when: str = "") -> Refusal:
    problem = "the vLLM engine has ended: one of its processes has died" + (f"; {when}" if when else "")
    return Refusal(503, "engine_ended", problem, "see this server's output for the reason, and start it again")


def check_devices(setup: EngineSetup, gpus: int) -> None:
    """Raise EngineError if a server on GPUs sees fewer of them than its replicas need."""
    if setup.device.type == "cuda" and gpus < setup.world_size:
        raise EngineError(
            f"rollout_matching.vllm: tensor_parallel_size {setup.size} * data_parallel_size {setup.replicas} is "
            f"{setup.world_size} GPUs, but this server sees {gpus}",
            f"give it {setup.world_size} GPUs (CUDA_VISIBLE_DEVICES, or `coordexp launch --server-gpus`), or "
            "lower data_parallel_size",
        )


def batch_arguments(setup: EngineSetup) -> dict[str, Any]:
    """Return vLLM's argument for the tokens of one step, if the settings leave it open.

    vLLM chooses a default by the entry point that starts the engine. It knows its own server and its `LLM` class,
    and otherwise takes 2048 tokens: the prompts of two images of a megapixel."""
    if setup.device.type != "cuda":
        return {}
    most_at_once = setup.settings.decode_batch_size * setup.size
    longest = setup.settings.vllm.max_model_len or ENGINE_STEP_TOKENS
    return {"max_num_batched_tokens": max(most_at_once, min(ENGINE_STEP_TOKENS, most_at_once * longest))}
