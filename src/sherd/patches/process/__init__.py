"""Patches of the whole process: its imports and its memory."""
