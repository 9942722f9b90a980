"""Stores that keep slices and gather parameters while they are used."""
