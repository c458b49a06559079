from mar_grpo.components.grpo_training.component import grpo_training

__all__ = ["grpo_training"]
