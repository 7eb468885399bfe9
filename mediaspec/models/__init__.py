"""Networks of our own: plain PyTorch modules that know neither the engine nor a drafter's logic."""
