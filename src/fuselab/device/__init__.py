"""Which device this is, and its measured ceilings."""
