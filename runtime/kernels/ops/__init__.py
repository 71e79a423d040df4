"""The contract and the torch reference of each operation."""
