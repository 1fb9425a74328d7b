"""Runs rollout servers and learners of one config on one machine: plan, preflight, processes. Imports no torch."""
