"""The rollout server: a vLLM engine behind HTTP, which speaks ms-swift's rollout contract and takes a learner's
weights. `rollout.server_backend` is the other end of the wire."""
