"""Which worker: one small object per policy, and the placement that applies them to both roles."""
