"""Builds the model and the rows that the package ships: word problems, tokenizer, training, evaluation.

Used by `scripts/train_shipped_model.py` alone; the package itself never imports this.
"""
