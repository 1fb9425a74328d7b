"""Rollout servers and the backend that asks them: both ends of one wire, around `protocol`."""
