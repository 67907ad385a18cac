"""Neuron apoptosis: a network shrinks while it trains, on all workers at once."""

from thinwire.apoptosis.architecture import export, export_onnx, rebuild
from thinwire.apoptosis.settings import Apoptosis

__all__ = ["Apoptosis", "export", "export_onnx", "rebuild"]
