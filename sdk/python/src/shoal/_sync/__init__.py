# Generated from _async/__init__.py by generate_sync.py. Do not edit: change that file and run the program again.
"""The client for ordinary programs."""
