"""Neuron apoptosis: a network shrinks while it trains, on all workers at once."""
