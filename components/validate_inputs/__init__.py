from mar_grpo.components.validate_inputs.component import validate_inputs

__all__ = ["validate_inputs"]
