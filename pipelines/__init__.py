"""KFP pipelines of MAR-GRPO; `mar_grpo.pipelines` when installed."""
