"""MAR-GRPO: reinforcement-learning fine-tuning of masked-autoregressive image generators with a diffusion head."""

__version__ = "0.1.0"
