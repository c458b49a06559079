from mar_grpo.components.reward_scoring.component import reward_scoring

__all__ = ["reward_scoring"]
