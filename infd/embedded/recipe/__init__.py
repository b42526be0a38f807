"""How the embedded model is made: text written for this project, a tokenizer, training, evaluation.

python -m infd.embedded.recipe.train WORK        # tokenizer, model, draft and adapters, with checkpoints to resume from
python -m infd.embedded.recipe.evaluate [MODEL]  # the table of the model card
"""
