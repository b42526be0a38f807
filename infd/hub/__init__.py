"""Fetch models that settings name by a hub's id, `org/name`.

fetch.py chooses the files. huggingface.py and modelscope.py download them, each
through its hub's library; the library is imported on first use.
"""
