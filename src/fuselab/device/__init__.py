"""The device of this process, and its measured ceilings."""
