from mar_grpo.components.benchmark_evaluation.component import benchmark_evaluation

__all__ = ["benchmark_evaluation"]
