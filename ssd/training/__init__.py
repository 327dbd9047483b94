"""Training: the embedded pair from nothing, and a draft for any target by distillation."""
