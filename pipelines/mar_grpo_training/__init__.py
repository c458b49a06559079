from mar_grpo.pipelines.mar_grpo_training.pipeline import mar_grpo_training

__all__ = ["mar_grpo_training"]
