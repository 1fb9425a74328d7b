"""Check that rollouts, weight sync and faults work on this machine: `coordexp doctor --gpu` (or `--cpu`)."""
