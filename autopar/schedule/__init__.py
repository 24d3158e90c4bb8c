"""Schedules of a pipeline as tables of actions: made, lowered to communication, checked."""
