from mar_grpo.components.promote.component import promote

__all__ = ["promote"]
