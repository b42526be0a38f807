"""Fetch models that are named by a hub's id, `org/name`, before loading.

fetch.py chooses the files; huggingface.py and modelscope.py download the files,
each through the hub's library, which is imported on first use.
"""
