"""From images to rollouts: the interface of backends, prompts, the repeat guard, and the transformers backend."""
