from mar_grpo.components.sft_checkpoint.component import sft_checkpoint

__all__ = ["sft_checkpoint"]
