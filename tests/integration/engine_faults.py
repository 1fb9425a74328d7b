"""What tests ask the engine's processes beside what a learner asks them, and the faults that they make there.

The engine imports this module by name, in place of the one whose class it extends.
"""

from coordexp.rollout import engine_side

ENGINE_SIDE = "tests.integration.engine_faults.FaultyEngineSide"


class FaultyEngineSide(engine_side.EngineSide):
    def encoded_pictures(self) -> int:
        """Pictures whose features are kept."""
        return len(self.model_runner.encoder_cache)

    def watch_batches(self) -> None:
        """Count the sequences of every batch that the engine computes from now on."""
        run, self.batches = self.model_runner.execute_model, []

        def counted(scheduled, *arguments, **named):
            self.batches.append(len(scheduled.num_scheduled_tokens))
            return run(scheduled, *arguments, **named)

        self.model_runner.execute_model = counted

    def watched_batches(self) -> list[int]:
        return list(self.batches)

    def fault_heads_stay_as_they_are(self, on: bool) -> None:
        engine_side.rebuild_heads = (lambda model: None) if on else REBUILD_HEADS

    def fault_load_what_is_not_finite(self, on: bool) -> None:
        engine_side.check_finite = (lambda weights: None) if on else CHECK_FINITE

    def fault_keep_the_kv_cache(self, on: bool) -> None:
        engine_side.clear_kv_caches = (lambda caches: None) if on else CLEAR_KV_CACHES

    def non_finite_in_kv_cache(self) -> int:
        return sum(int(cache.isfinite().logical_not().sum()) for cache in self.model_runner.kv_caches)

    def non_zero_in_kv_cache(self) -> int:
        return sum(int(cache.count_nonzero()) for cache in self.model_runner.kv_caches)


CHECK_FINITE, CLEAR_KV_CACHES = engine_side.check_finite, engine_side.clear_kv_caches
REBUILD_HEADS = engine_side.rebuild_heads
