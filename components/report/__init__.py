from mar_grpo.components.report.component import report

__all__ = ["report"]
