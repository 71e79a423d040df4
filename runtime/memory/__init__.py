"""How much memory a model and its steps take, predicted and measured."""
