"""Detection with a trained model: `Detector` in Python, and the part that `coordexp predict` shares with it.

A model answers with transformers, with a vLLM engine of this process, or through a server such as `vllm serve`.
All three get the same prompt, token by token, and their answers are parsed and scored in the same place.
"""
