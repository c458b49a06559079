from mar_grpo.components.prompt_data.component import prompt_data

__all__ = ["prompt_data"]
