"""The parts of strategies that send what local steps have changed: when and which, and how it looks."""
