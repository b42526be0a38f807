"""Training data, tokenizer, training and evaluation of the embedded model; all text is written for this project.

python -m infd.embedded.recipe.train WORK        # train tokenizer, model, draft and adapters; resumable
python -m infd.embedded.recipe.evaluate [MODEL]  # print the scores of the model card
"""
