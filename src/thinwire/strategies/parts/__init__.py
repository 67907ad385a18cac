"""Parts that strategies are composed of: clipping, momentum correction, density warm-up."""
