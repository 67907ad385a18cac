"""The parts of GossipGraD: what travels when, how messages look, push-sum, and picking what fits."""
