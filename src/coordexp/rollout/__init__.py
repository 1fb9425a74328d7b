"""Prompts, and later the engines that answer them."""
