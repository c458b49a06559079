"""KFP components of MAR-GRPO; `mar_grpo.components` when installed. Each is thin: one call into the library."""
