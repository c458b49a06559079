from mar_grpo.components.promotion_gate.component import promotion_gate

__all__ = ["promotion_gate"]
