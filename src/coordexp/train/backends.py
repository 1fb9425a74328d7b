"""Choose the backend that makes the rollouts of a run."""

from pathlib import Path

from transformers import TrainingArguments

from coordexp.config import Settings
from coordexp.config.rollout import BACKENDS
from coordexp.engine import check_vllm
from coordexp.engine.colocate import ColocateBackend
from coordexp.engine.start import EngineSetup
from coordexp.extensions import find_extensions, load_extension
from coordexp.rollout.backend import RolloutBackend
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.tasks import ignore
from coordexp.train.callbacks import say
from coordexp.train.encode import TrainingSet
from coordexp.train.folder import RolloutFacts, ServerLog
from coordexp.train.learner import Learner


def backend_for(
    settings: Settings, arguments: TrainingArguments, training_set: TrainingSet, learner: Learner
) -> RolloutBackend:
    """Return the backend that the settings name. In a run without rollouts only evaluation needs one, and the
    learner answers with transformers."""
    rollout, prompts, table = settings.rollout_matching_cfg, training_set.prompts, training_set.table
    own = HuggingFaceBackend(learner.current_model, prompts, table, rollout.decode_batch_size)
    if not settings.uses_rollouts or rollout.rollout_backend == "hf":
        return own
    added = find_extensions("rollout_backends", taken=frozenset(BACKENDS))
    if rollout.rollout_backend in added:
        backend: RolloutBackend = load_extension(added[rollout.rollout_backend])(settings, training_set, learner)
        return backend
    folder, rank = Path(arguments.output_dir), arguments.process_index
    setup = EngineSetup(
        Path(settings.model.path), learner.dtype, rollout, table, learner.device, learner.precision
    )
    adapter = learner.adapter_weights if learner.has_plain_adapter else None
    notify = say if rank == 0 else ignore
    if rollout.vllm.mode == "server":
        from coordexp.servers.backend import ServerBackend  # httpx is needed only here

        if arguments.device.type == "cuda":
            check_vllm()  # weights are sent over its NCCL
        return ServerBackend(
            setup,
            prompts,
            own,
            probe=training_set[0].image,
            notify=notify,
            record=ServerLog(folder, rank),
            adapter=adapter,
        )
    return ColocateBackend(
        setup,
        prompts,
        own,
        probe=training_set[0].image,
        room=learner.offload,
        notify=notify,
        adapter=adapter,
        record=RolloutFacts(folder) if rank == 0 else ignore,
    )
