"""Models named by an id, `org/name`, and fetched before they are loaded.

fetch.py chooses the files; huggingface.py and modelscope.py download them, each
through its own library, which is imported on first use.
"""
