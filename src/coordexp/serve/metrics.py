"""What a server counts, for Prometheus. vLLM's own numbers stand beside it under the same address."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.registry = registry
        self.requests = Counter("coordexp_requests", "Requests, by outcome", ["outcome"], registry=registry)
        self.tokens = Counter("coordexp_generated_tokens", "Tokens written", registry=registry)
        self.calls = Histogram("coordexp_infer_seconds", "Time of a call", buckets=SECONDS, registry=registry)
        self.running = Gauge("coordexp_running_requests", "Requests being answered", registry=registry)
        self.updates = Counter("coordexp_updates", "Weight updates, by outcome", ["outcome"], registry=registry)
        self.update_bytes = Counter("coordexp_update_bytes", "Bytes of weights taken", registry=registry)
        self.update_seconds = Histogram(
            "coordexp_update_seconds", "Time of a weight update", buckets=SECONDS, registry=registry
        )

    def updated(self, how: str, seconds: float, size: int) -> None:
        self.updates.labels(how).inc()
        self.update_bytes.inc(size)
        self.update_seconds.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
