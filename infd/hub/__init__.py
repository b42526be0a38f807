"""Models that are named by an id, `org/name`, and fetched before they are loaded.

fetch.py decides which files; huggingface.py and modelscope.py know how to get
them, each through its own library, which is imported only then.
"""
