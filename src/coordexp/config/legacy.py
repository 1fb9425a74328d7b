"""Keys of older versions and of other tools. Each is an error that says what to write instead, never an alias."""

OLD_SECTION = ("custom", "extra", "rollout_matching")
OLD_VARIANT = "rollout_matching_sft"  # of custom.trainer_variant
RENAMED = {
    "rollout_matching.rollout_generate_batch_size": "rollout_matching.decode_batch_size",
    "rollout_matching.rollout_infer_batch_size": "rollout_matching.decode_batch_size",
    "rollout_matching.temperature": "rollout_matching.decoding.temperature",
    "rollout_matching.top_p": "rollout_matching.decoding.top_p",
    "rollout_matching.top_k": "rollout_matching.decoding.top_k",
    # Names that other tools use, and names of transformers 4.
    "training.lr": "training.learning_rate",
    "training.batch_size": "training.per_device_train_batch_size",
    "training.epochs": "training.num_train_epochs",
    "model.adapter.r": "model.adapter.rank",
    "model.adapter.lora_alpha": "model.adapter.alpha",
    "model.adapter.lora_dropout": "model.adapter.dropout",
    "training.evaluation_strategy": "training.eval_strategy",
    "training.no_cuda": "training.use_cpu",
}
_SERVER = "rollout_matching.vllm.server"
EXAMPLE = "servers: [{base_url: http://127.0.0.1:8000, group_port: 51216}]"
_LIST_SERVERS = f"list each server under {_SERVER}.servers, e.g. {EXAMPLE}"
REMOVED = {
    "rollout_matching.post_rollout_pack_scope": "remove it: packing always works on one micro-step; "
    "training.packing turns it on",
    "rollout_matching.rollout_buffer": "remove it: rollouts are never reused; each is trained on at most once",
    "rollout_matching.optimal_transport.max_iterations": "remove it: it is always 10,000",
    "rollout_matching.optimal_transport.tolerance": "remove it: it has the value of its former default",
    "rollout_matching.vllm.enable_prefix_caching": "remove it: prefixes are always cached",
    "custom.on_checkpoint": "remove it: a checkpoint is complete once it has a manifest.json, so a program "
    "beside the run can wait for that file",
    "rollout_matching.vllm.engine_args.quantization": "remove it: a weight sync replaces every weight of the "
    "engine by its name, and quantised layers have scales that no learner sends; engine_args.kv_cache_dtype: fp8 "
    "halves the memory of the KV cache",
    f"{_SERVER}.base_url": _LIST_SERVERS,
    f"{_SERVER}.group_port": _LIST_SERVERS,
    "custom.coord_soft_ce_w1": "declare a coord_reg module under rollout_matching.pipeline.objective "
    "(stage1.pipeline.objective in Stage 1); its config has soft_ce_weight and w1_weight",
    "training.warmup_ratio": "use training.warmup_steps: a number below 1 is a share of all steps",
    "training.group_by_length": "remove it: samples are not grouped by length; training.packing fills rows",
    "training.overwrite_output_dir": "remove it: transformers 5 has no such argument",
    "training.save_safetensors": "remove it: checkpoints are always safetensors",
    "training.logging_dir": "remove it: transformers 5 logs below training.output_dir",
    "training.push_to_hub_token": "set the HF_TOKEN environment variable: settings are logged",
}
# Old names of module weights. Each is refused in its own module, and unknown in others.
ALIASES = {
    "bbox_geo": {"bbox_smoothl1_weight": "smoothl1_weight", "bbox_ciou_weight": "ciou_weight"},
    "coord_reg": {"coord_soft_ce_weight": "soft_ce_weight", "coord_w1_weight": "w1_weight"},
}
