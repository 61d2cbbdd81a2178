"""The consuming side: packing, the policy model, the update, its checkpoints. Layer 3."""
