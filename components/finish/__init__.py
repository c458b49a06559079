from mar_grpo.components.finish.component import finish

__all__ = ["finish"]
