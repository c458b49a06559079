"""What all components share."""

IMAGE = "mar-grpo/trainer:0.1.0"
"""Base image: Python with this package, its models and kfp. KFP's SubprocessRunner ignores it."""
