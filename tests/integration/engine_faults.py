"""Methods of the engine's workers for tests only: they look at its state, and make faults.

The engine imports this module by name, instead of the module whose class it extends.
"""

from coordexp.engine import receive

ENGINE_SIDE = "tests.integration.engine_faults.FaultyEngineSide"


class FaultyEngineSide(receive.EngineSide):
    def encoded_images(self) -> int:
        """Return the number of images whose features are cached."""
        return len(self.model_runner.encoder_cache)

    def watch_batches(self) -> None:
        """Count the sequences of every batch that the engine computes from now on."""
        execute, self.batches = self.model_runner.execute_model, []

        def execute_and_count(scheduled, *arguments, **named):
            self.batches.append(len(scheduled.num_scheduled_tokens))
            return execute(scheduled, *arguments, **named)

        self.model_runner.execute_model = execute_and_count

    def batch_sizes(self) -> list[int]:
        return list(self.batches)

    def fault_do_not_pack_again(self, on: bool) -> None:
        receive.pack_again = (lambda model: None) if on else PACK_AGAIN

    def fault_load_non_finite_weights(self, on: bool) -> None:
        receive.check_finite = (lambda weights: None) if on else CHECK_FINITE

    def fault_keep_the_kv_cache(self, on: bool) -> None:
        receive.clear_kv_caches = (lambda caches: None) if on else CLEAR_KV_CACHES

    def non_finite_in_kv_cache(self) -> int:
        return sum(int(cache.isfinite().logical_not().sum()) for cache in self.model_runner.kv_caches)

    def non_zero_in_kv_cache(self) -> int:
        return sum(int(cache.count_nonzero()) for cache in self.model_runner.kv_caches)


CHECK_FINITE, CLEAR_KV_CACHES = receive.check_finite, receive.clear_kv_caches
PACK_AGAIN = receive.pack_again
