"""Restores states: chooses a step, asks each leaf for its form, and places what was read on devices."""
