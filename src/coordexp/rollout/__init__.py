"""From images to rollouts: prompts, the repeat guard, and the rollout backends behind one interface."""
