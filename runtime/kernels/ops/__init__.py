"""The contract and the PyTorch reference of each operation."""
