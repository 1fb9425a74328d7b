"""A tiny but real Qwen3-VL, made here, so that everything runs on a laptop CPU and nothing is downloaded."""
